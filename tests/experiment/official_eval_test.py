"""Evaluation on the official layout plays each game, whatever the slots."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

from hgpo_jax import config
from hgpo_jax.envs import alfworld
from hgpo_jax.envs import household
from hgpo_jax.envs import household_pddl
from hgpo_jax.experiment import saved_policy
from tests.experiment import logged_games
from tests.experiment import tiny_policy

_GIN = pathlib.Path(__file__).with_name('official.gin')


@pytest.fixture(name='folder', scope='module')
def _folder(tmp_path_factory):
  """As many games as the official split has; all of them the same one."""
  root = tmp_path_factory.mktemp('json_2.1.1')
  game = household_pddl.game_data(
      household.generate(0, household.KINDS[0], tiny_policy.LAYOUT)
  )
  for split, count in alfworld.OFFICIAL_COUNTS.items():
    for index in range(count if split == 'valid_unseen' else 1):
      kind = household.KINDS[index % len(household.KINDS)]
      path = root / split / f'{kind}-X-None-Y-1' / f'trial_{index:04d}'
      path.mkdir(parents=True)
      (path / 'game.tw-pddl').write_text(json.dumps(game))
  return root


@pytest.mark.parametrize('slots', [5, 16])
def test_the_134_unseen_games_are_each_played_once(
    policy, one_device, folder, tmp_path, slots
):
  log = tmp_path / 'log'
  bindings = [
      f'PolicySource.folder = {str(policy)!r}',
      f'OfficialGames.folder = {str(folder)!r}',
      f'Workers.slots = {slots}',
      'AlfworldEnv.max_steps = 1',
      "Evaluation.split = 'valid_unseen'",
  ]
  spec = config.load([str(_GIN)], bindings)
  games = logged_games.LoggedGames(str(folder), True, str(log))
  env = dataclasses.replace(spec.env, games=games)
  spec = dataclasses.replace(spec, env=env)
  _, _, result = saved_policy.evaluate(spec, None)
  # A worker keeps the games that it has loaded: no line is no episode, and
  # a game on two lines was played in both workers.
  found = logged_games.loaded(log)
  split = spec.env.split('valid_unseen')
  assert sorted(found) == [split[index].task_id for index in range(134)]
  assert result.overall.games == 134 and result.split == 'valid_unseen'
  assert {k: rate.games for k, rate in result.by_kind.items()} == {
      kind: len(range(index, 134, 6))
      for index, kind in enumerate(household.KINDS)
  }
