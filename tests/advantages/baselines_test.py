"""RLOO, REINFORCE++ and pass@k by hand, and what they refuse."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hgpo_jax.advantages import pass_at_k
from hgpo_jax.advantages import reinforce_pp
from hgpo_jax.advantages import rloo
from tests.advantages import rows

RLOO = rloo.RLOO
PassAtK = pass_at_k.PassAtK
ReinforcePlusPlus = reinforce_pp.ReinforcePlusPlus


def _with_tokens(inputs, tokens):
  return dataclasses.replace(inputs, response_tokens_N=np.array(tokens))


def _random_with_tokens(seed):
  inputs = rows.random_inputs(seed)
  tokens = np.random.default_rng(seed).integers(1, 9, len(inputs.step_N))
  return _with_tokens(inputs, tokens)


def test_rloo_compares_with_the_mean_of_the_others():
  inputs = rows.simple_inputs([[1.0, 2.0, 6.0], [5.0], [3.0, 3.0]])
  got, _ = RLOO()(inputs)
  np.testing.assert_allclose(got, [-3.0, -1.5, 4.5, 5.0, 0.0, 0.0], atol=1e-6)


def test_rloo_over_first_steps():
  inputs = dataclasses.replace(
      rows.simple_inputs([[10.0, 10.0, 0.0]]),
      trajectory_N=np.array([0, 0, 1]),
      step_N=np.array([1, 0, 0]),
      valid_N=np.array([False, True, True]),
  )
  got, _ = RLOO(stats_over_steps=False)(inputs)
  # 2 episodes with mean 5; the malformed step itself is 0.1 lower.
  np.testing.assert_allclose(got, [2 * 4.9, 10.0, -10.0], rtol=1e-6)


@pytest.mark.parametrize('baseline', [False, True])
def test_reinforce_pp_has_unit_variance_over_tokens(baseline):
  inputs = _random_with_tokens(0)
  got, _ = ReinforcePlusPlus(baseline=baseline)(inputs)
  per_token = np.repeat(got.astype(float), inputs.response_tokens_N)
  assert abs(per_token.mean()) < 1e-6
  assert per_token.var(ddof=1) == pytest.approx(1.0, abs=1e-5)


def test_reinforce_pp_weighs_steps_by_tokens():
  inputs = _with_tokens(rows.simple_inputs([[0.0, 1.0]]), [3, 1])
  got, _ = ReinforcePlusPlus()(inputs)
  # Mean 1/4, variance (3/16 + 9/16) / 3 = 1/4.
  np.testing.assert_allclose(got, [-0.5, 1.5], rtol=1e-6)


def test_reinforce_pp_baseline_takes_the_tasks_mean_off():
  inputs = _with_tokens(rows.simple_inputs([[0.0, 2.0], [10.0, 12.0]]), [1] * 4)
  got, _ = ReinforcePlusPlus(baseline=True)(inputs)
  np.testing.assert_allclose(got, np.sqrt(3 / 4) * np.array([-1, 1] * 2))


@pytest.mark.parametrize('tokens', [[1], [5]])
def test_reinforce_pp_without_spread(tokens):
  got, _ = ReinforcePlusPlus()(_with_tokens(rows.simple_inputs([[7]]), tokens))
  assert got == 0.0


def test_reinforce_pp_needs_tokens():
  with pytest.raises(ValueError, match='response_tokens_N is None, expected'):
    ReinforcePlusPlus()(rows.simple_inputs([[1.0, 0.0]]))
  short = _with_tokens(rows.random_inputs(0), [1])
  with pytest.raises(ValueError, match='one entry a row, got'):
    ReinforcePlusPlus()(short)


def test_pass_at_k_credits_every_step_of_the_best_episode():
  inputs = rows.make_inputs(
      {
          'reward_N': [0.0, 9.0, 5.0, 1.0],
          'outcome_N': [9.0, 9.0, 5.0, 1.0],
          'success_N': [True, True, False, False],
          'group_N': [0] * 4,
          'trajectory_N': [0, 0, 1, 2],
          'step_N': [0, 1, 0, 0],
          'state_N': [0] * 4,
          'next_state_N': [0] * 4,
          'action_N': [0] * 4,
          'valid_N': [True] * 4,
      }
  )
  got, _ = PassAtK()(inputs)
  np.testing.assert_allclose(got, [1.0, 1.0, 0.0, 0.0], rtol=1e-5)
  got, _ = PassAtK(norm_by_std=False)(inputs)
  np.testing.assert_allclose(got, [4.0, 4.0, 0.0, 0.0])
  # Row by row, only one of the winner's rows gets it, or they tie.
  got, _ = PassAtK(norm_by_std=False, compared='first_row')(inputs)
  np.testing.assert_allclose(got, [4.0, 0.0, 0.0, 0.0])
  got, _ = PassAtK(norm_by_std=False, compared='row')(inputs)
  assert (got == 0.0).all()


def test_pass_at_k_charges_an_episode_its_share_of_malformed_steps():
  inputs = rows.random_inputs(1)
  _, first = np.unique(inputs.trajectory_N, return_index=True)
  scores = [
      inputs.outcome_N[row]
      - 0.1 * (~inputs.valid_N[inputs.trajectory_N == trajectory]).mean()
      for trajectory, row in enumerate(first)
  ]
  got, _ = PassAtK(norm_by_std=False)(inputs)
  for group in range(3):
    ranked = sorted(scores[4 * group : 4 * group + 4])
    best = got[inputs.group_N == group].max()
    assert best == pytest.approx(ranked[-1] - ranked[-2], abs=1e-5)


def test_pass_at_k_without_a_second_or_with_a_tie():
  got, metrics = PassAtK()(rows.simple_inputs([[10.0], [5.0, 5.0, 1.0]]))
  assert (got == 0.0).all()
  assert metrics['advantage/episode_singleton_share'] == 0.25


@pytest.mark.parametrize(
    'estimator',
    [
        RLOO(),
        RLOO(stats_over_steps=False),
        ReinforcePlusPlus(),
        ReinforcePlusPlus(baseline=True, stats_over_steps=False),
        PassAtK(),
        PassAtK(compared='row'),
        PassAtK(compared='first_row'),
    ],
    ids=repr,
)
def test_order_of_rows_and_no_rows(estimator):
  inputs = _random_with_tokens(2)
  order = np.random.default_rng(0).permutation(len(inputs.step_N))
  moved = dataclasses.replace(
      rows.take(inputs, order),
      response_tokens_N=inputs.response_tokens_N[order],
  )
  np.testing.assert_array_equal(
      estimator(moved)[0], estimator(inputs)[0][order]
  )
  nothing = np.zeros(0, int)
  empty = _with_tokens(rows.take(inputs, nothing), nothing)
  got, metrics = estimator(empty)
  assert got.shape == (0,) and got.dtype == np.float32
  assert np.isfinite(list(metrics.values())).all()


@pytest.mark.parametrize(
    'make, text',
    [
        (lambda: RLOO(invalid_action_penalty=-1.0), 'RLOO.invalid_action_pen'),
        (lambda: RLOO(visit_order='x'), "RLOO.visit_order is 'x', expected"),
        (lambda: ReinforcePlusPlus(visit_order='x'), 'PlusPlus.visit_order is'),
        (
            lambda: ReinforcePlusPlus(invalid_action_penalty=np.inf),
            'PlusPlus.invalid_action_penalty: got inf',
        ),
        (lambda: PassAtK(compared='best'), "PassAtK.compared is 'best', exp"),
        (lambda: PassAtK(visit_order=''), "PassAtK.visit_order is '', expect"),
        (lambda: PassAtK(invalid_action_penalty=-1.0), 'PassAtK.invalid_act'),
    ],
)
def test_bad_settings_are_refused(make, text):
  with pytest.raises(ValueError, match=text):
    make()
