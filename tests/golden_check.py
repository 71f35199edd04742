"""Checks estimators, losses and action parsing against golden files.

  python -m tests.golden_check DIR

DIR holds files ALGORITHM_caseNN.json, plain or gzipped; tests/golden/README.md
describes them. An estimator is found by its gin name, so a new one is checked
as soon as it exists; until then its cases are skipped with a reason. A row
called unstable may differ, which is noted. The last line is `N passed, N
failed` (and `, N skipped`); the exit code is 1 on failure.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
import dataclasses
import gzip
import importlib
import json
import pathlib
import pkgutil
import sys
from typing import Any

import numpy as np

from hgpo_jax import advantages
from hgpo_jax import types
from hgpo_jax.losses import token_returns
from tests import golden_losses

TOLERANCE = 1e-4  # Absolute, and relative to the golden value.
# Names of settings in the files, and in the estimators.
_FIELDS = {
    'invalid_penalty': 'invalid_action_penalty',
    'length_weight_alpha': 'alpha',
    'similarity_thresh': 'similarity_threshold',
    'step_advantage_w': 'step_advantage_weight',
    'episode_advantage_w': 'episode_advantage_weight',
    'value_gamma': 'gamma',
    'success_reward': 'success_value',
}
_FIXED = {'epsilon': 1e-6}  # Constants of the method, not settings.
_BASELINES = {
    'rloo': 'RLOO',
    'passk': 'PassAtK',
    'rf_pp_baseline': 'ReinforcePlusPlus',
}
_TOKEN_LEVEL = ('rf_pp', 'gae', 'remax')
# The originals' readings where the default here is another one.
_ORIGINAL = {
    'visit_order': 'row',
    'goal': 'positive_outcome',
    'similar_step_groups': False,
    'mean_tolerance': 0.0,
    'divide_flat': True,
}


class Skipped(Exception):
  """The case cannot be run, and why."""


def estimators() -> dict[str, type]:
  """Every estimator in `hgpo_jax.advantages`, by its gin name."""
  found = {}
  for module in pkgutil.iter_modules(advantages.__path__):
    members = vars(
        importlib.import_module(f'{advantages.__name__}.{module.name}')
    )
    for name, member in members.items():
      if isinstance(member, type) and dataclasses.is_dataclass(member):
        if '__call__' in vars(member):
          found[name] = member
  return found


def make_estimator(case: dict[str, Any]) -> Any:
  """The estimator a case names, with the case's settings."""
  hyper = dict(case['hyper'])
  name = case['algorithm']
  if name == 'BASELINE':
    kind = hyper.pop('kind')
    if hyper.pop('response_width', 3) != 3:
      raise Skipped('responses are 1, 2 or 3 tokens long here')
    if kind not in _BASELINES:
      raise Skipped(f'no baseline named {kind} yet')
    name = _BASELINES[kind]
    if kind == 'passk':
      over_steps = hyper.pop('stats_over_steps', True)
      hyper['compared'] = 'row' if over_steps else 'first_row'
    if kind == 'rf_pp_baseline':
      hyper['baseline'] = True
  if name not in estimators():
    raise Skipped(f'no estimator named {name} yet')
  cls = estimators()[name]
  fields = {field.name for field in dataclasses.fields(cls)}
  settings = {}
  for key, value in hyper.items():
    if key in _FIXED:
      if value != _FIXED[key]:
        raise Skipped(f'{key} is {value}, fixed at {_FIXED[key]} here')
      continue
    field = _FIELDS.get(key, key)
    if field not in fields:
      raise Skipped(f'{name} has no setting {field} (= {value})')
    if value is None and field != 'invalid_action_penalty':
      raise Skipped(f'{key} is null, expected a value')
    # No penalty step is a penalty of 0.
    settings[field] = 0.0 if value is None else value
  original = {key: _ORIGINAL[key] for key in fields & set(_ORIGINAL)}
  return cls(**settings, **original)


def make_inputs(case: dict[str, Any]) -> types.AdvantageInputs:
  """The rows of a case, in the order the advantages saw them."""
  rows = {
      key: np.asarray(value)
      for key, value in case['rows'].items()
      if not key.endswith('_table')
  }
  order = np.asarray(case.get('adv_row_order') or range(len(rows['uid'])), int)
  texts, text_id = np.unique(
      [*case['rows']['obs_table'], ''], return_inverse=True
  )
  # Sorted names: numbers compare as the names do.
  trajectory_N = _dense(case['rows']['traj_table'])[rows['traj']]
  state_N = text_id[rows['obs']]
  following = text_id[-1] * np.ones_like(state_N)
  if 'next_obs_raw' in rows:
    following = text_id[rows['next_obs_raw']]
  else:
    by_step = np.lexsort((rows['step'], trajectory_N))
    same = np.diff(trajectory_N[by_step]) == 0
    following[by_step[:-1][same]] = state_N[by_step[1:][same]]
  columns = {
      'reward_N': rows['reward'].astype(np.float32),
      'outcome_N': rows['episode_reward'].astype(np.float32),
      'success_N': rows['episode_reward']
      == case['hyper'].get('success_reward', 10.0),
      'group_N': _dense(case['rows']['uid_table'])[rows['uid']],
      'trajectory_N': trajectory_N,
      'step_N': rows['step'],
      'state_N': state_N,
      'next_state_N': following,
      'action_N': np.zeros_like(state_N),
      'valid_N': rows['valid'].astype(bool),
      # The token masks of the files, which are not written in them.
      'response_tokens_N': 1 + np.arange(len(state_N)) % 3,
  }
  for key, column in columns.items():
    if column.dtype.kind == 'i':
      column = column.astype(np.int32)
    columns[key] = column[order]
  return types.AdvantageInputs(**columns, state_texts=tuple(texts.tolist()))


def _dense(names: list[str]) -> np.ndarray:
  return np.unique(names, return_inverse=True)[1]


def check_advantages(
    case: dict[str, Any],
) -> tuple[list[str], list[str]]:
  """What is wrong on a case, and the unstable rows that differ.

  A row is unstable where the originals in float32 and in float64 do not agree
  themselves. There either may be met; or neither, as long as the number is one
  that could be trained on.
  """
  got_N, _ = make_estimator(case)(make_inputs(case))
  want_N = np.array(case['expected']['advantage'], np.float64)
  if not want_N.size:
    return ['no rows'], []
  if np.isnan(want_N).any():
    # The original's std of one number. Without peers the step terms are 0,
    # and the episode's is left.
    alone_N = np.array(case['expected']['episode_advantage'], np.float64)
    want_N = np.where(np.isnan(want_N), alone_N, want_N)
  if got_N.shape != want_N.shape or got_N.dtype != np.float32:
    return [f'{got_N.dtype} {got_N.shape}, expected float32 {want_N.shape}'], []
  good_N = _near(got_N, want_N)
  unstable_N = np.zeros(len(got_N), bool)
  unstable_N[np.array(case.get('unstable_rows') or (), int)] = True
  if unstable_N.any():
    float32_N = case['expected'].get('advantage_ref_float32', want_N)
    good_N |= unstable_N & _near(got_N, np.array(float32_N, np.float64))
    unstable_N &= np.abs(got_N) <= 1e2
  lines_N = {
      row: f'row {row}: advantage {got_N[row]:.7g}, expected {want_N[row]:.7g}'
      for row in np.flatnonzero(~good_N)
  }
  if len(lines_N) == len(got_N):
    unstable_N[:] = False  # Nothing else was compared.
  return (
      [line for row, line in lines_N.items() if not unstable_N[row]],
      [line for row, line in lines_N.items() if unstable_N[row]],
  )


def _near(got_N: np.ndarray, want_N: np.ndarray) -> np.ndarray:
  error_N = np.abs(got_N - want_N)
  # Everything is near to an infinite number.
  return np.isfinite(want_N) & (error_N <= TOLERANCE * (1.0 + np.abs(want_N)))


def check_tokens(case: dict[str, Any]) -> list[str]:
  """What is wrong with token-level advantages and returns; [] if nothing."""
  inputs = {
      name: np.asarray(matrix, np.float32)
      for name, matrix in case['extra_inputs'].items()
  }
  reward, mask = inputs['token_reward'], inputs['response_mask']
  hyper, expected = case['hyper'], case['expected']
  if hyper['kind'] == 'rf_pp':
    got = token_returns.reinforce_pp(reward, mask, hyper['gamma'])
  elif hyper['kind'] == 'gae':
    got = token_returns.gae(
        reward, inputs['values'], mask, hyper['gamma'], hyper['lam']
    )
  else:
    got = token_returns.remax(reward, inputs['baseline'], mask)
  wrong = []
  for name, got_BR in zip(('token_advantage', 'token_return'), got):
    want_BR = np.array(expected[name], np.float64)
    if got_BR.shape != want_BR.shape or not want_BR.size:
      wrong.append(f'{name}: shape {got_BR.shape}, expected {want_BR.shape}')
      continue
    error_BR = np.abs(got_BR - want_BR) / (1.0 + np.abs(want_BR))
    wrong += [
        f'{name}[{row}, {col}]: {got_BR[row, col]:.7g}, expected'
        f' {want_BR[row, col]:.7g}'
        for row, col in np.argwhere(~(error_BR <= TOLERANCE))
    ]
  return wrong


def check_projection(case: dict[str, Any]) -> list[str]:
  """What is wrong with the parsing of actions; [] if nothing."""
  from hgpo_jax.rollout import parse  # pylint: disable=g-import-not-at-top

  parsers = {
      'alfworld': parse.parse_tagged_action,
      'webshop': parse.parse_webshop,
      'appworld': parse.parse_appworld,
  }
  wrong = []
  if not case['texts'] or not case['expected']:
    return ['nothing to compare']
  for env, expected in case['expected'].items():
    pairs = zip(expected['action'], expected['valid'], strict=True)
    for text, want in zip(case['texts'], pairs, strict=True):
      action, valid = parsers[env](text)
      if (action, int(valid)) != (want[0], int(want[1])):
        wrong.append(f'{env} {text!r}: {(action, valid)}, expected {want}')
  return wrong


def check_case(
    case: dict[str, Any], notes: list[str] | None = None
) -> list[str]:
  """What is wrong on a case; [] if nothing. Raises Skipped.

  Args:
    case: contents of a file.
    notes: unstable rows that differ are added to it.
  """
  if case['algorithm'] == 'LOSS':
    return golden_losses.check(case)
  if case['algorithm'] == 'PROJECTION':
    return check_projection(case)
  is_baseline = case['algorithm'] == 'BASELINE'
  if is_baseline and case['hyper']['kind'] in _TOKEN_LEVEL:
    return check_tokens(case)
  wrong, unstable = check_advantages(case)
  if notes is not None:
    notes += unstable
  return wrong


def read_cases(folder: pathlib.Path) -> Iterator[tuple[str, dict[str, Any]]]:
  """(name, case) of each file, plain or gzipped, by name."""
  for path in _files(folder):
    yield path.name.split('.')[0], _read(path)


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
  return sorted(folder.glob('*.json*'))


def _read(path: pathlib.Path) -> dict[str, Any]:
  opener = gzip.open if path.suffix == '.gz' else open
  with opener(path, 'rt', encoding='utf-8') as file:
    return json.load(file)


def main(argv: list[str] | None = None) -> int:
  """Runs a folder; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('folder', type=pathlib.Path)
  folder = parser.parse_args(argv).folder
  passed = failed = skipped = 0
  for path in _files(folder):
    name = path.name.split('.')[0]
    notes: list[str] = []
    try:
      wrong = check_case(_read(path), notes)
    except Skipped as reason:
      skipped += 1
      print(f'SKIP {name}: {reason}')
      continue
    except Exception as error:  # pylint: disable=broad-exception-caught
      wrong = [f'{type(error).__name__}: {error}']
    for line in notes[:1]:
      print(f'NOTE {name}: {len(notes)} unstable rows differ, as {line}')
    passed, failed = passed + (not wrong), failed + bool(wrong)
    if wrong:
      print(f'FAIL {name}: {len(wrong)} wrong')
      print(*(f'  {line}' for line in wrong[:5]), sep='\n')
  if not passed + failed + skipped:
    there = '' if folder.is_dir() else ', which is no folder'
    print(f'no golden files (*.json, *.json.gz) in {folder}{there}')
    failed = 1
  tail = f', {skipped} skipped' if skipped else ''
  print(f'{passed} passed, {failed} failed{tail}')
  return int(failed > 0)


if __name__ == '__main__':
  sys.exit(main())
