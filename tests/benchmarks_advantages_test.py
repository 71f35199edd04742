"""The loops that estimators are measured against, and the measurement."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from benchmarks import advantages as benchmark
from benchmarks import reference_advantages as reference
from benchmarks import reference_potentials
from hgpo_jax.advantages import semantic
from tests import golden_check
from tests.advantages import worked

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


def _from_inputs(inputs):
  names = lambda ids: np.array([str(i) for i in ids], object)
  texts = np.array(inputs.state_texts, object)
  return reference.Rows(
      group=names(inputs.group_N),
      trajectory=names(inputs.trajectory_N),
      obs=texts[inputs.state_N],
      next_obs=texts[inputs.next_state_N],
      reward=inputs.reward_N,
      outcome=inputs.outcome_N,
      success=inputs.success_N,
      valid=inputs.valid_N,
      mask=np.ones((len(inputs.step_N), 1), bool),
      action=names(inputs.action_N),
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
  lines = benchmark.table(timings, iteration_s=20.0).splitlines()
  assert 'growth (n log n: 1.18)' in lines[0]
  assert len({line.count('|') for line in lines}) == 1
  assert (
      lines[2] == '| A | 1.0 | 10.0 | 1.00 | 0.01% | 5.00 | 100x | 500x | - |'
  )
  assert lines[3] == '| GRPO | 1.0 | 100.0 | 2.00 | 0.01% | - | - | - | 79x |'
  assert '| 1.00 | - | 5.00 |' in benchmark.table(timings).splitlines()[2]


def test_seconds_of_an_iteration_are_read_from_a_run(tmp_path):
  seconds = [(60.0, 90.0), (5.0, 15.0), (6.0, 16.0)]  # The first compiles.
  lines = [
      {'iteration': i, 'time/rollout_s': play, 'time/learn_s': learn}
      for i, (play, learn) in enumerate(seconds)
  ]
  lines.append({'iteration': 3, 'time/evaluate_s': 9.0})
  text = ''.join(json.dumps(line) + '\n' for line in lines)
  (tmp_path / 'metrics.jsonl').write_text(text)
  assert benchmark.iteration_seconds(tmp_path) == 22.0
  (tmp_path / 'metrics.jsonl').write_text('{"iteration": 0}\n')
  with pytest.raises(ValueError, match='run_dir=.* has no iteration yet'):
    benchmark.iteration_seconds(tmp_path)


def test_every_estimator_can_be_picked_by_name():
  assert not [name for name in benchmark.ESTIMATORS if ',' in name]


def test_loops_of_progpo_give_the_worked_example():
  rows = _from_inputs(worked.two_successes_and_a_failure())
  got = reference_potentials.progpo(rows, history_length=1)
  want = [1.4815, 1.7207, 1.9225, -2.6741, -2.2613, -0.5966, -3.6438]
  want += [1.3728, -0.0381, 0.3989, 1.9225]
  np.testing.assert_allclose(got, want, atol=1e-3)


@pytest.mark.parametrize('level', ['traj', 'step'])
def test_loops_of_covgpo_give_the_worked_example(level):
  rows = _from_inputs(worked.three_failures())
  added = reference_potentials.covgpo(rows, level=level) - reference.grpo(rows)
  new = np.array([1, 0, 0, 1, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1, 0], bool)
  want = {
      'traj': np.repeat([-0.0401, -0.1604, 0.2004], 5),
      'step': np.where(new, 0.1604, -0.1403),
  }[level]
  np.testing.assert_allclose(added, [*want, 0.0, 0.0], atol=1e-3)


def test_loops_and_estimators_agree_on_what_texts_mean():
  texts = [
      'On the SHELF 1, you see a mug 2, and an apple 1.',
      'step 3 of 50: You see nothing',
      '[Step 3/50] You  see a pan 1 and a cup 2; it is hot!',
      'A room. ',
  ]
  for text in texts:
    assert reference_potentials.canonical(text) == semantic.canonical(text)
