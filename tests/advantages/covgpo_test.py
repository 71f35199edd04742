"""CovGPO: the worked example, the gate, what it leaves alone."""

from __future__ import annotations

import dataclasses

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from hgpo_jax import config
from hgpo_jax.advantages import base
from hgpo_jax.advantages import covgpo
from hgpo_jax.advantages import gigpo
from hgpo_jax.advantages import grpo
from hgpo_jax.advantages import hgpo
from hgpo_jax.losses import ppo
from tests.advantages import rows
from tests.advantages import worked

CovGPO, GRPO, GiGPO, HGPO = covgpo.CovGPO, grpo.GRPO, gigpo.GiGPO, hgpo.HGPO
some = hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
EXAMPLE = worked.three_failures()
BASES = (GRPO(), GiGPO(), HGPO())
TRAJ = np.repeat([-0.0401, -0.1604, 0.2004], 5)
NEW = np.array([1, 0, 0, 1, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1, 0], bool)
STEP = np.where(NEW, 0.1604, -0.1403)


@pytest.mark.parametrize(
    'level, want',
    [('traj', TRAJ), ('step', STEP), ('both', (TRAJ + STEP) / 2)],
)
@pytest.mark.parametrize('base', BASES, ids=repr)
def test_worked_example(base, level, want):
  advantage, metrics = CovGPO(base=base, level=level)(EXAMPLE)
  np.testing.assert_allclose(advantage[:15], want, atol=1e-3)
  np.testing.assert_array_equal(advantage[15:], base(EXAMPLE)[0][15:])
  assert metrics['advantage/coverage_weight'] == pytest.approx(0.15)
  assert metrics['advantage/coverage_gated_share'] == 0.5
  assert metrics['advantage/coverage_fired_share'] == 0.5
  assert metrics['advantage/coverage_flat_share'] == 0.0
  assert metrics['advantage/frac_failed_groups'] == 0.5
  assert metrics['advantage/coverage_mean'] == pytest.approx(
      (0.4 + 0.2 + 0.8 + 1.0 + 1.0) / 5
  )


def test_a_success_in_the_group_leaves_everything_as_it_was():
  reward = EXAMPLE.reward_N.copy()
  reward[14] = 10.0
  solved = dataclasses.replace(
      EXAMPLE,
      reward_N=reward,
      outcome_N=np.where(EXAMPLE.trajectory_N == 2, 10.0, EXAMPLE.outcome_N),
      success_N=EXAMPLE.success_N | (EXAMPLE.trajectory_N == 2),
  )
  for level in ('traj', 'step', 'both'):
    advantage, metrics = CovGPO(base=GRPO(), level=level)(solved)
    assert advantage.tobytes() == GRPO()(solved)[0].tobytes()
    assert metrics['advantage/coverage_fired_share'] == 0.0
    assert metrics['advantage/coverage_weight'] == 0.0


def test_the_case_of_the_reimplementations():
  """P = (0.1, 0.3), one of three groups failed: -0.1 and +0.1."""
  inputs = worked.episodes(
      [
          ['A', 'B', *'AAAAAAAAA'],
          ['A', 'B', 'C', 'D', *'AAAAAAA'],
          *[['A', 'B']] * 4,
      ],
      [0.0, 0.0, 10.0, 0.0, 10.0, 10.0],
      groups=[0, 0, 1, 1, 2, 2],
  )
  advantage, _ = CovGPO(base=GRPO())(inputs)
  np.testing.assert_allclose(advantage[:10], -0.1, atol=1e-5)
  np.testing.assert_allclose(advantage[10:20], 0.1, atol=1e-5)


def test_a_fixed_weight_does_not_decay():
  _, metrics = CovGPO(base=GRPO(), fixed=True, coverage_weight=0.5)(EXAMPLE)
  assert metrics['advantage/coverage_weight'] == 0.5


def test_equal_coverage_and_groups_of_one_do_not_fire():
  equal = worked.episodes([['A', 'B', 'B'], ['A', 'C', 'A']], [0.0, 0.0])
  advantage, metrics = CovGPO(base=GRPO())(equal)
  assert (advantage == 0.0).all()
  assert metrics['advantage/coverage_flat_share'] == 1.0
  # Their steps still differ.
  assert (CovGPO(base=GRPO(), level='step')(equal)[0] != 0.0).all()
  alone = worked.episodes([['A', 'B', 'B', 'C']], [0.0])
  for level in ('traj', 'step', 'both'):
    advantage, metrics = CovGPO(base=GRPO(), level=level)(alone)
    assert (advantage == 0.0).all()
    assert metrics['advantage/coverage_gated_share'] == 0.0


def test_the_gate_looks_at_success_or_at_the_score():
  inputs = worked.episodes(
      [['A', 'B', 'C'], ['A', 'A', 'A']],
      [0.5, 0.5],
      success=[False, False],
  )
  by_success, _ = CovGPO(base=GRPO(), gate='success')(inputs)
  by_score, _ = CovGPO(base=GRPO(), gate='score')(inputs)
  by_high_score, _ = CovGPO(base=GRPO(), gate='score', score_threshold=1.0)(
      inputs
  )
  np.testing.assert_allclose(by_success, [0.3, 0.3, -0.3, -0.3], atol=1e-5)
  assert (by_score == 0.0).all()
  np.testing.assert_array_equal(by_high_score, by_success)


def test_the_penalty_neither_opens_nor_closes_the_gate():
  valid = EXAMPLE.valid_N.copy()
  valid[3] = False
  inputs = dataclasses.replace(EXAMPLE, valid_N=valid)
  added = CovGPO(base=GRPO())(inputs)[0] - GRPO()(inputs)[0]
  np.testing.assert_allclose(added[:15], TRAJ, atol=1e-3)
  assert GRPO()(inputs)[0][3] < 0.0


def test_states_that_others_reached_earlier_count_as_seen():
  inputs = worked.episodes(
      [['A', 'B', 'C', 'D'], ['A', 'C', 'B', 'E']], [0.0, 0.0]
  )
  estimator = CovGPO(base=GRPO(), level='step', visited='group_timestep')
  advantage, _ = estimator(inputs)
  new = np.array([1, 0, 1, 1, 0, 1], bool)
  np.testing.assert_array_equal(advantage > 0.0, new)
  own, metrics = CovGPO(base=GRPO(), level='step')(inputs)
  assert (own == 0.0).all()
  assert metrics['advantage/coverage_mean'] == 1.0


@pytest.mark.parametrize('base', [GiGPO(), HGPO(history_length=0)], ids=repr)
def test_steps_are_compared_at_the_base_estimators_own_states(base):
  inputs = worked.episodes(
      [['A', 'B', 'A'], ['A', 'A', 'C'], ['A', 'A', 'A']], [0.0] * 3
  )
  level = CovGPO(base=base, level='step_anchor', coverage_weight=1.0)
  advantage, _ = level(inputs)
  # From A: 1, 0, 1, 0, 0; from B, met once: nothing to compare with.
  x = np.array([1.0, 0.0, 1.0, 0.0, 0.0])
  z = (x - x.mean()) / x.std(ddof=1 if isinstance(base, GiGPO) else 0)
  np.testing.assert_allclose(advantage, np.insert(z, 1, 0.0), atol=1e-4)


@some
@hypothesis.given(
    seed=st.integers(0, 10_000),
    base=st.sampled_from(BASES),
    level=st.sampled_from(covgpo.LEVELS),
)
def test_groups_with_a_success_keep_every_bit(seed, base, level):
  if level == 'step_anchor' and isinstance(base, GRPO):
    return
  inputs = rows.random_inputs(seed, groups=6, members=2)
  advantage, metrics = CovGPO(base=base, level=level)(inputs)
  plain, _ = base(inputs)
  solved = np.bincount(inputs.group_N, inputs.success_N)[inputs.group_N] > 0
  assert advantage[solved].tobytes() == plain[solved].tobytes()
  assert advantage.dtype == np.float32
  failed = metrics['advantage/frac_failed_groups']
  assert metrics['advantage/coverage_weight'] == pytest.approx(0.3 * failed)


def test_rank_correlation_of_coverage_and_length():
  inputs = worked.episodes(
      [['A', 'B'], ['A', 'B', 'A'], ['A', 'B', 'A', 'A']], [0.0] * 3
  )
  _, metrics = CovGPO(base=GRPO())(inputs)
  assert metrics['advantage/coverage_length_rank_corr'] == pytest.approx(-1.0)


@pytest.mark.parametrize(
    'settings, text',
    [
        ({'level': 'anchor'}, "CovGPO.level is 'anchor', expected one of"),
        ({'gate': 'won'}, "CovGPO.gate is 'won', expected one of"),
        ({'visited': 'group'}, "CovGPO.visited is 'group', expected one of"),
        ({'coverage_weight': -1.0}, 'CovGPO.coverage_weight is -1.0, expect'),
        ({'smallest_std': 0.0}, 'CovGPO.smallest_std is 0.0, expected'),
        ({'level': 'step_anchor'}, "'step_anchor' with GRPO as base, expected"),
    ],
)
def test_bad_settings_are_refused(settings, text):
  with pytest.raises(ValueError, match=text):
    CovGPO(base=GRPO(), **settings)


def test_a_base_that_is_no_estimator_is_named():
  with pytest.raises(
      ValueError, match='CovGPO.base is @PPOLoss.., which is no'
  ):
    CovGPO(base=ppo.PPOLoss())

  def one_number(inputs):
    del inputs
    return np.zeros(1, np.float32), {}

  inputs = worked.episodes([['A', 'B'], ['A', 'A']], [0.0] * 2)
  with pytest.raises(base.EstimatorError, match=r'function returned .* \(1,\)'):
    CovGPO(base=one_number)(inputs)


def test_the_base_is_an_instance():
  with pytest.raises(config.ConfigError, match='write @GRPO'):
    CovGPO(base=GRPO)
  with pytest.raises(config.ConfigError, match='CovGPO.base is required'):
    CovGPO()
