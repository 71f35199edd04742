"""The alfworld package where its import could not make its folder."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[2]
_PLAY = """
import os, sys
from hgpo_jax.envs import alfworld
env = alfworld.AlfworldEnv(
    games=alfworld.HouseholdGames(), max_steps=5, engine=sys.argv[1]
)
print(env.make().reset(env.split('train')[0]).observation)
print(os.environ.get('ALFWORLD_DATA'))
"""


@pytest.mark.parametrize('engine', ['fast', 'stock'])
def test_games_are_played_without_a_home(engine):
  environ = {**os.environ, 'HOME': '/proc/nobody', 'XDG_CACHE_HOME': '/proc/no'}
  environ.pop('ALFWORLD_DATA', None)
  found = subprocess.run(
      [sys.executable, '-c', _PLAY, engine],
      cwd=_ROOT,
      env=environ,
      capture_output=True,
      text=True,
      check=False,
  )
  assert found.returncode == 0, found.stderr
  assert 'Your task is to' in found.stdout
  assert found.stdout.splitlines()[-1] == 'None'


def test_nothing_is_made_in_the_home(tmp_path):
  environ = {**os.environ, 'HOME': str(tmp_path), 'ALFWORLD_DATA': '/my/data'}
  environ['XDG_CACHE_HOME'] = str(tmp_path / 'cache')
  found = subprocess.run(
      [sys.executable, '-c', _PLAY, 'fast'],
      cwd=_ROOT,
      env=environ,
      capture_output=True,
      text=True,
      check=True,
  )
  assert found.stdout.splitlines()[-1] == '/my/data'
  assert [p.name for p in tmp_path.iterdir()] == ['cache']
