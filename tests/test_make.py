"""The commands of the Makefile, without running an installation."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time

import pytest

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_TOOLS = ('gcc', 'g++', 'cmake', 'make')


def _preflight(folder, tools, python='python3'):
  """Runs the preflight where only `tools` and Python exist."""
  for tool in tools:
    (folder / tool).write_text('#!/bin/sh\n')
    (folder / tool).chmod(0o755)
  if not (folder / 'python3').exists():
    (folder / 'python3').write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
  (folder / 'python3').chmod(0o755)
  return subprocess.run(
      ['/bin/sh', str(_ROOT / 'scripts/preflight.sh'), python],
      env={'PATH': str(folder)},
      capture_output=True,
      text=True,
      check=False,
  )


def test_preflight_is_silent_when_nothing_is_missing(tmp_path):
  result = _preflight(tmp_path, _TOOLS)
  assert (result.returncode, result.stderr) == (0, '')


@pytest.mark.parametrize('missing', _TOOLS)
def test_preflight_names_a_missing_tool(tmp_path, missing):
  result = _preflight(tmp_path, [tool for tool in _TOOLS if tool != missing])
  assert result.returncode == 1
  assert result.stderr == (
      f'preflight: missing: {missing}\n'
      f'preflight: on Debian or Ubuntu: sudo apt-get install {missing}\n'
  )


def test_preflight_names_a_missing_python(tmp_path):
  result = _preflight(tmp_path, _TOOLS, python='python9')
  assert result.returncode == 1
  assert 'missing: python9' in result.stderr
  assert 'apt-get install python3 python3-venv' in result.stderr


def test_preflight_refuses_an_old_python(tmp_path):
  (tmp_path / 'python3').write_text(
      '#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2\nexit 1\n'
  )
  result = _preflight(tmp_path, _TOOLS)
  assert result.returncode == 1
  assert 'got Python 3.9.2, expected Python 3.11 or newer' in result.stderr
  assert 'make PYTHON=python3.11' in result.stderr


def _dry(target, venv):
  return subprocess.run(
      ['make', '-n', target, f'VENV={venv}'],
      cwd=_ROOT,
      env={**os.environ, 'MAKEFLAGS': ''},
      capture_output=True,
      text=True,
      check=True,
  ).stdout


def test_a_half_made_environment_is_made_anew(tmp_path):
  (tmp_path / 'bin').mkdir()
  assert f'rm -rf {tmp_path}' in _dry('test', tmp_path)


def test_a_finished_environment_is_used_as_it_is(tmp_path):
  stamp = tmp_path / '.installed'
  stamp.touch()
  os.utime(stamp, (time.time() + 60,) * 2)
  commands = _dry('test', tmp_path)
  assert 'pip' not in commands and '-m pytest' in commands


def test_the_comparison_takes_arguments(tmp_path):
  (tmp_path / '.installed').touch()
  os.utime(tmp_path / '.installed', (time.time() + 60,) * 2)
  command = _dry('ablation', tmp_path)
  assert 'benchmarks.ablation --out=runs/ablation' in command


def test_an_environment_older_than_its_constraints_is_made_anew(tmp_path):
  stamp = tmp_path / '.installed'
  stamp.touch()
  os.utime(stamp, (0, 0))
  assert f'rm -rf {tmp_path}' in _dry('venv', tmp_path)
