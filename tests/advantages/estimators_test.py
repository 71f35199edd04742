"""Estimators: float64 references, edge cases, metrics, refusals."""

from __future__ import annotations

import dataclasses

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from hgpo_jax import config
from hgpo_jax.advantages import gigpo
from hgpo_jax.advantages import grpo
from hgpo_jax.advantages import hgpo
from hgpo_jax.advantages import metrics as metrics_lib
from tests.advantages import rows

GRPO, GiGPO, HGPO = grpo.GRPO, gigpo.GiGPO, hgpo.HGPO
_SIZES = ('min', 'mean', 'max')
some = hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
seeds = st.integers(0, 10_000)


def _advantage(estimator, inputs):
  return estimator(inputs)[0]


@some
@hypothesis.given(
    seed=seeds,
    std=st.booleans(),
    penalty=st.sampled_from([0.0, 0.1]),
    base=st.booleans(),
    alpha=st.sampled_from([0.0, 1.0, 2.0]),
    history=st.integers(0, 3),
)
def test_float64_references(seed, std, penalty, base, alpha, history):
  inputs = rows.random_inputs(seed)
  mode = 'mean_std_norm' if std else 'mean_norm'
  shared = {'std': std, 'penalty': penalty}
  for estimator, want in (
      (
          GRPO(norm_by_std=std, invalid_action_penalty=penalty),
          rows.reference(inputs, 'GRPO', **shared),
      ),
      (
          GiGPO(
              gamma=0.9,
              mode=mode,
              step_advantage_weight=2.0,
              invalid_action_penalty=penalty,
          ),
          rows.reference(inputs, 'GiGPO', gamma=0.9, weight=2.0, **shared),
      ),
      (
          HGPO(history, alpha, base, mode, 0.95, penalty),
          rows.reference(
              inputs,
              'HGPO',
              levels=history + 1,
              alpha=alpha,
              base=base,
              **shared,
          ),
      ),
  ):
    got = _advantage(estimator, inputs)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_groups_of_unequal_size_are_centred_each():
  inputs = rows.simple_inputs([[0.0, 0.0, 1.0], [10.0, 11.0]])
  got = _advantage(GRPO(norm_by_std=False), inputs)
  np.testing.assert_allclose(got, [-1 / 3, -1 / 3, 2 / 3, -0.5, 0.5], rtol=1e-6)


def test_a_group_of_one():
  inputs = rows.simple_inputs([[10.0]])
  np.testing.assert_allclose(_advantage(GRPO(), inputs), 10.0, rtol=2e-6)
  np.testing.assert_allclose(_advantage(GiGPO(), inputs), 10.0, rtol=2e-6)
  assert _advantage(HGPO(), inputs) == 0.0
  _, metrics = HGPO()(inputs)
  assert metrics['advantage/level1_singleton_share'] == 1.0
  assert metrics['advantage/frac_zero_std_groups'] == 0.0


@pytest.mark.parametrize('kind', [GiGPO, HGPO])
def test_far_ends_count_under_a_strong_discount(kind):
  # Two episodes of 30 steps from one state, one solved: 10 * 0.5^29 or 0.
  reward = np.zeros(60)
  reward[29] = 10.0
  inputs = rows.simple_inputs([np.repeat([10.0, 0.0], 30).tolist()])
  inputs = dataclasses.replace(
      inputs,
      reward_N=reward.astype(np.float32),
      trajectory_N=np.repeat([0, 1], 30),
      step_N=np.tile(np.arange(30), 2),
      state_N=np.tile(np.arange(30), 2),
  )
  got = _advantage(kind(gamma=0.5, invalid_action_penalty=0.0), inputs)
  if kind is GiGPO:
    got = got - _advantage(GRPO(invalid_action_penalty=0.0), inputs)
    spread = 0.5**0.5
  else:
    spread = 0.5
  value = 10.0 * 0.5**29
  want = 0.5 * value / (spread * value + 1e-6)
  assert got[0] == pytest.approx(want, rel=1e-3, abs=1e-6) and want > 0.009
  assert got[30] == pytest.approx(-want, rel=1e-3, abs=1e-6)


def test_a_step_near_the_mean_of_its_group():
  inputs = rows.simple_inputs([[0.1, 0.2, 0.3, 0.5]])
  inputs = dataclasses.replace(inputs, state_N=np.array([0, 0, 0, 1]))
  options = {'mode': 'mean_norm', 'base_group': True, 'alpha': 0.0}
  # 0.2 has the level of the task only, or that and a zero beside it.
  assert _advantage(HGPO(**options), inputs)[1] == pytest.approx(-0.075)
  exactly = HGPO(**options, mean_tolerance=0.0)
  assert _advantage(exactly, inputs)[1] == pytest.approx(-0.0375)
  with pytest.raises(ValueError, match='HGPO.mean_tolerance is 1.0, expected'):
    HGPO(mean_tolerance=1.0)


def test_degenerate_groups_are_told_by_their_own_spread():
  inputs = rows.simple_inputs([[1.0] * 4, [0.0, 1.0, 0.0, 1.0]])
  advantage, metrics = GRPO()(inputs)
  assert (advantage[:4] == 0.0).all() and (advantage[4:] != 0.0).all()
  assert metrics['advantage/frac_zero_std_groups'] == 0.5
  assert metrics['advantage/episode_frac_zero_std_groups'] == 0.5
  assert metrics['advantage/outcome_std_group'] == 0.25


def test_batch_spread_without_group_spread():
  _, metrics = GRPO()(rows.simple_inputs([[1.0] * 3, [0.0] * 3]))
  assert metrics['advantage/outcome_std_batch'] == 0.5
  assert metrics['advantage/outcome_std_group'] == 0.0
  assert metrics['advantage/no_signal_share'] == 1.0


def test_metrics_of_levels():
  inputs = rows.random_inputs(0)
  _, metrics = HGPO(history_length=2, base_group=True)(inputs)
  assert metrics['advantage/episode_groups'] == 3
  num = len(inputs.step_N)
  assert metrics['advantage/episode_mean_group_size'] == pytest.approx(num / 3)
  shares = [metrics[f'advantage/level{k}_singleton_share'] for k in (1, 2, 3)]
  assert shares == sorted(shares) and shares[0] < shares[2]
  assert all(isinstance(value, float) for value in metrics.values())


def test_sizes_and_strength_of_a_level():
  inputs = rows.simple_inputs([[0.0, 0.0, 1.0], [10.0, 12.0], [5.0]])
  _, metrics = GRPO(norm_by_std=False)(inputs)
  sizes = [metrics[f'advantage/episode_{what}_group_size'] for what in _SIZES]
  assert sizes == [1.0, 2.0, 3.0]
  mean = np.mean([1 / 3, 1 / 3, 2 / 3, 1.0, 1.0, 5.0])
  assert metrics['advantage/episode_mean_abs'] == pytest.approx(mean)
  assert metrics['advantage/frac_failed_groups'] == 0.0
  _, metrics = GRPO()(rows.simple_inputs([[0.0, 0.0], [0.0, 1.0]]))
  assert metrics['advantage/frac_failed_groups'] == 0.5


def test_entropy_of_weights():
  weights = np.array([[1.0, 2.0, 0.0, 3.0], [0.0, 2.0, 0.0, 1.0]])
  thirds = -0.75 * np.log(0.75) - 0.25 * np.log(0.25)
  got = metrics_lib.weight_entropy(weights)
  assert got == pytest.approx((0.0 + np.log(2.0) + thirds) / 3)
  assert metrics_lib.weight_entropy(np.zeros((2, 5))) == 0.0


def test_first_step_by_index_or_by_row():
  inputs = dataclasses.replace(
      rows.simple_inputs([[10.0, 10.0, 0.0]]),
      trajectory_N=np.array([0, 0, 1]),
      step_N=np.array([1, 0, 0]),
      valid_N=np.array([False, True, True]),
  )
  for order, mean in (('step', 5.0), ('row', 4.95)):
    estimator = GRPO(False, False, visit_order=order)
    np.testing.assert_allclose(
        _advantage(estimator, inputs),
        np.array([9.9, 10.0, 0.0]) - mean,
        rtol=1e-6,
    )


def test_columns_of_different_lengths_are_refused():
  inputs = rows.random_inputs(0)
  with pytest.raises(ValueError, match='one entry a row, got'):
    GRPO()(dataclasses.replace(inputs, valid_N=inputs.valid_N[1:]))


@pytest.mark.parametrize(
    'make, text',
    [
        (lambda: GRPO(invalid_action_penalty=-1.0), 'GRPO.invalid_action_pe'),
        (lambda: GRPO(visit_order='x'), "visit_order is 'x', expected one of"),
        (lambda: GiGPO(mode='std'), "GiGPO.mode is 'std', expected one of"),
        (lambda: GiGPO(gamma=1.5), r'gamma is 1.5, expected a finite number'),
        (lambda: GiGPO(similarity_threshold=0.0), 'similarity_threshold is 0'),
        (lambda: GiGPO(step_advantage_weight=np.nan), 'weight: got nan'),
        (lambda: HGPO(history_length=-1), 'HGPO.history_length is -1, expect'),
        (lambda: HGPO(alpha=np.inf), 'HGPO.alpha: got inf'),
        (lambda: HGPO(alpha=2000.0), 'HGPO.alpha is 2000.0, expected a finite'),
        (lambda: HGPO(alpha=-40.0), r'HGPO.alpha is -40.0, .* in \[-5.0, 49.8'),
        (lambda: HGPO(history_length=10**8), r'expected .* in \[0, 256\]'),
        (lambda: HGPO(mode=''), "HGPO.mode is '', expected one of"),
    ],
)
def test_bad_settings_are_refused(make, text):
  with pytest.raises(ValueError, match=text):
    make()


def test_a_string_is_not_a_number():
  with pytest.raises(config.ConfigError, match='HGPO.gamma'):
    HGPO(gamma='0.95')
