"""The loops that estimators are measured against, and the measurement."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from benchmarks import advantages as benchmark
from benchmarks import reference_advantages as reference
from tests import golden_check

GIVEN = pathlib.Path(__file__).parent / 'golden' / 'given'
CASES = {
    name: case
    for name, case in golden_check.read_cases(GIVEN)
    if not name.startswith(('LOSS', 'PROJECTION'))
}
LOOPS = {
    'GRPO': reference.grpo,
    'GiGPO': reference.gigpo,
    'HGPO': reference.hgpo,
    'G2PO': reference.g2po,
    'GraphGPO': reference.graphgpo,
    'rloo': reference.rloo,
    'rf_pp_baseline': reference.reinforce_pp,
    'passk': reference.pass_at_k,
}
KEYS = {
    'step_advantage_w': 'weight',
    'length_weight_alpha': 'alpha',
    'invalid_penalty': 'penalty',
    'episode_advantage_w': 'episode_weight',
}
SAME = ('gamma', 'norm_by_std', 'history_length', 'base_group')


def _name(case):
  return case['hyper'].get('kind', case['algorithm'])


def _covered(case):
  """Loops take rows in order, statistics over steps, equal observations."""
  hyper = case['hyper']
  return (
      _name(case) in LOOPS
      and 'adv_row_order' not in case
      and hyper.get('stats_over_steps', True)
      and not hyper.get('enable_similarity')
      and len(case['rows']['uid']) < 300
      and None not in case['expected']['advantage']
  )


def _arguments(case):
  hyper = case['hyper']
  found = {key: hyper[key] for key in SAME if key in hyper}
  found |= {KEYS[key]: value for key, value in hyper.items() if key in KEYS}
  found['penalty'] = found['penalty'] or 0.0
  if 'mode' in hyper:
    found['norm_by_std'] = hyper['mode'] == 'mean_std_norm'
  if _name(case) == 'GraphGPO':
    found['normalize_distance'] = hyper['normalize_distance']
    found['step_weight'] = found.pop('weight')
  return found


def _rows(case):
  rows = case['rows']
  table = lambda name, key: np.array(rows[name], object)[rows[key]]
  following = 'next_obs_raw' if 'next_obs_raw' in rows else 'obs'
  outcome = np.array(rows['episode_reward'], np.float32)
  return reference.Rows(
      group=table('uid_table', 'uid'),
      trajectory=table('traj_table', 'traj'),
      obs=table('obs_table', 'obs'),
      next_obs=table('obs_table', following),
      reward=np.array(rows['reward'], np.float32),
      outcome=outcome,
      success=outcome == 10.0,
      valid=np.array(rows['valid'], bool),
      mask=np.arange(3) <= np.arange(len(outcome))[:, None] % 3,
  )


def test_every_algorithm_is_covered():
  assert {_name(c) for c in CASES.values() if _covered(c)} == set(LOOPS)


@pytest.mark.parametrize('name', [n for n, c in CASES.items() if _covered(c)])
def test_loops_give_the_golden_values(name):
  case = CASES[name]
  got = LOOPS[_name(case)](_rows(case), **_arguments(case))
  want = np.array(case['expected']['advantage'])
  stable = np.ones(len(want), bool)
  stable[case.get('unstable_rows') or []] = False
  np.testing.assert_allclose(got[stable], want[stable], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('name', benchmark.ESTIMATORS)
def test_estimators_agree_with_their_loops(name):
  timing = benchmark.measure(
      name, benchmark.make_trajectories(2), repeats=1, with_loops=True
  )
  assert timing.rows == 2 * benchmark.MEMBERS * benchmark.STEPS
  assert (timing.ratio is None) == (benchmark.ESTIMATORS[name][1] is None)


def test_a_disagreement_is_told(monkeypatch):
  wrong = benchmark.ESTIMATORS['GRPO'][0], reference.rloo
  monkeypatch.setitem(benchmark.ESTIMATORS, 'GRPO', wrong)
  with pytest.raises(AssertionError, match='GRPO: the loops give'):
    benchmark.measure('GRPO', benchmark.make_trajectories(1), 1, True)


def test_table():
  timings = {
      'A': [benchmark.Timing(100, 0.001, 0.1), benchmark.Timing(1000, 0.01, 5)],
      'GRPO': [benchmark.Timing(100, 0.001), benchmark.Timing(1000, 0.1)],
  }
  lines = benchmark.table(timings).splitlines()
  assert lines[2] == '| A | 1.0 | 10.0 | 1.00 | 5.00 | 100x | 500x | - |'
  assert lines[3] == '| GRPO | 1.0 | 100.0 | 2.00 | - | - | - | 79x |'
