"""What holds for every estimator; a new one is one line in the lists below."""

from __future__ import annotations

import dataclasses

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from hgpo_jax.advantages import covgpo
from hgpo_jax.advantages import g2po
from hgpo_jax.advantages import gigpo
from hgpo_jax.advantages import graphgpo
from hgpo_jax.advantages import grpo
from hgpo_jax.advantages import hgpo
from hgpo_jax.advantages import pass_at_k
from hgpo_jax.advantages import progpo
from hgpo_jax.advantages import reinforce_pp
from hgpo_jax.advantages import rloo
from hgpo_jax.advantages import segments
from tests.advantages import rows

CovGPO, GRPO, GiGPO = covgpo.CovGPO, grpo.GRPO, gigpo.GiGPO
HGPO, ProGPO = hgpo.HGPO, progpo.ProGPO

# A group's advantages depend on that group alone; no spread, no advantage.
GROUPWISE = (
    GRPO(),
    GRPO(norm_by_std=False, stats_over_steps=False),
    GiGPO(),
    GiGPO(mode='mean_norm', step_advantage_weight=0.5),
    GiGPO(enable_similarity=True, similarity_threshold=0.8),
    HGPO(),
    HGPO(weighting='inverse_variance'),
    HGPO(history_length=4, base_group=True, mode='mean_norm', alpha=2.0),
    rloo.RLOO(),
    pass_at_k.PassAtK(),
    g2po.G2PO(),
    g2po.G2PO(mode='mean_norm', shrinkage=1.0),
    graphgpo.GraphGPO(),
    ProGPO(),
    ProGPO(combine='add', mode='mean_norm', prefix='states', depth_penalty=0.5),
    ProGPO(classes='hash', similarity_threshold=0.6, reliability_gate=True),
    ProGPO(classes='difflib', similarity_threshold=0.8, history_length=0),
    ProGPO(classes='embed', similarity_threshold=0.5),
)
# Like those, but with advantages where all rewards are the same.
EXPLORING = (
    CovGPO(base=GRPO(), fixed=True),
    CovGPO(base=HGPO(), level='step', fixed=True),
    CovGPO(base=GiGPO(), level='step_anchor', gate='score', fixed=True),
    CovGPO(base=ProGPO(), level='both', visited='group_timestep', fixed=True),
)
# The other groups of the update count too.
BATCHWIDE = (
    CovGPO(base=GRPO()),
    reinforce_pp.ReinforcePlusPlus(),
    reinforce_pp.ReinforcePlusPlus(baseline=True),
)
EVERY = (*GROUPWISE, *EXPLORING, *BATCHWIDE)
# However many rows repeat a step, it counts once.
COUNTS_STEPS = (HGPO(), ProGPO(), CovGPO(base=HGPO(), level='both'))
# Nothing but rewards with a unit: scaling them scales 'mean_norm' alone.
STD = ({'norm_by_std': True}, {'norm_by_std': False})
MODE = ({'mode': 'mean_std_norm'}, {'mode': 'mean_norm'})
SHIFTED = (
    (GRPO, *STD),
    (pass_at_k.PassAtK, *STD),
    (rloo.RLOO, None, {}),
    (GiGPO, *MODE),
    (HGPO, *MODE),
    (ProGPO, *MODE),
)
# A solved task has a value of its own, which a bonus does not move.
SCALED = (*SHIFTED, (g2po.G2PO, *MODE))
UNITS = {ProGPO: 'max_return', g2po.G2PO: 'success_value'}

some = hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
seeds = st.integers(0, 10_000)
alphas = st.floats(0.0, 3.0, width=32, allow_subnormal=False)


def each(estimators):
  return pytest.mark.parametrize('estimator', estimators, ids=repr)


def _advantage(estimator, inputs):
  return estimator(inputs)[0]


@each(EVERY)
@some
@hypothesis.given(seed=seeds)
def test_order_of_rows_changes_nothing(estimator, seed):
  inputs = rows.random_inputs(seed)
  order = np.random.default_rng(seed).permutation(len(inputs.step_N))
  np.testing.assert_array_equal(
      _advantage(estimator, rows.take(inputs, order)),
      _advantage(estimator, inputs)[order],
  )


@each(EVERY)
@some
@hypothesis.given(seed=seeds)
def test_names_of_things_change_nothing(estimator, seed):
  inputs = rows.random_inputs(seed)
  rng = np.random.default_rng(seed)
  new = {
      name: rng.permutation(int(getattr(inputs, name).max()) + 1)
      for name in ('group_N', 'trajectory_N', 'action_N')
  }
  states = rng.permutation(len(inputs.state_texts))
  renamed = dataclasses.replace(
      inputs,
      state_N=states[inputs.state_N],
      next_state_N=states[inputs.next_state_N],
      state_texts=tuple(inputs.state_texts[i] for i in np.argsort(states)),
      **{name: ids[getattr(inputs, name)] for name, ids in new.items()},
  )
  np.testing.assert_allclose(
      _advantage(estimator, renamed), _advantage(estimator, inputs), atol=2e-6
  )


@each((*GROUPWISE, *EXPLORING))
@some
@hypothesis.given(seed=seeds)
def test_an_unrelated_group_changes_nothing(estimator, seed):
  inputs = rows.random_inputs(seed, groups=2)
  both = rows.join(inputs, rows.random_inputs(seed + 1, groups=1))
  np.testing.assert_allclose(
      _advantage(estimator, both)[: len(inputs.step_N)],
      _advantage(estimator, inputs),
      atol=2e-6,
  )


@each(GROUPWISE)
@some
@hypothesis.given(seed=seeds, value=st.sampled_from([0.0, 0.1, 10 * 0.95**7]))
def test_equal_rewards_give_exactly_zero(estimator, seed, value):
  inputs = rows.random_inputs(seed)
  inputs = rows.take(inputs, np.flatnonzero(inputs.step_N == 0))
  inputs = _rewarded(inputs, np.full(len(inputs.step_N), value, np.float32))
  solved_N = np.full(len(inputs.step_N), value > 0.0)
  inputs = dataclasses.replace(inputs, success_N=solved_N)
  advantage, metrics = estimator(inputs)
  assert (advantage == 0.0).all()
  assert metrics['advantage/no_signal_share'] == 1.0
  assert metrics['advantage/frac_zero_std_groups'] == 1.0


@each(GROUPWISE)
@some
@hypothesis.given(seed=seeds)
def test_groups_of_failures_give_exactly_zero(estimator, seed):
  inputs = _failed(rows.random_inputs(seed))
  advantage, metrics = estimator(inputs)
  assert (advantage == 0.0).all()
  assert metrics['advantage/frac_failed_groups'] == 1.0


@each((*GROUPWISE, ProGPO(classes='none')))
@some
@hypothesis.given(seed=seeds)
def test_a_group_of_failures_among_others_gives_exactly_zero(estimator, seed):
  inputs = rows.random_inputs(seed, groups=2)
  both = rows.join(inputs, _failed(rows.random_inputs(seed + 1, groups=1)))
  advantage = _advantage(estimator, both)
  assert (advantage[len(inputs.step_N) :] == 0.0).all()
  assert advantage.any() == _advantage(estimator, inputs).any()


@each(EVERY)
def test_padding_to_a_larger_shape_changes_nothing(estimator, monkeypatch):
  inputs = rows.random_inputs(5)
  want = _advantage(estimator, inputs)
  monkeypatch.setattr(segments, '_SMALLEST_BUCKET', 1024)
  got = _advantage(estimator, inputs)
  np.testing.assert_allclose(got, want, rtol=0.0, atol=2e-6)
  np.testing.assert_array_equal(got == 0.0, want == 0.0)


@each(EXPLORING)
def test_coverage_tells_failures_apart(estimator):
  inputs = _failed(rows.random_inputs(1))
  advantage, metrics = estimator(inputs)
  assert np.mean(advantage != 0.0) > 0.5
  assert metrics['advantage/coverage_fired_share'] == 1.0


@each(EVERY)
@some
@hypothesis.given(seed=seeds)
def test_advantages_and_metrics_are_finite(estimator, seed):
  inputs = rows.random_inputs(seed, groups=5, members=1 + seed % 3)
  advantage, metrics = estimator(inputs)
  assert advantage.dtype == np.float32
  assert advantage.shape == inputs.step_N.shape
  assert np.isfinite(advantage).all()
  assert all(
      isinstance(value, float) and np.isfinite(value)
      for value in metrics.values()
  )


@each(COUNTS_STEPS)
@some
@hypothesis.given(seed=seeds)
def test_rows_that_repeat_a_step_change_nothing(estimator, seed):
  inputs = rows.random_inputs(seed)
  num = len(inputs.step_N)
  twice = np.r_[0:num, 0, 0, np.random.default_rng(seed).integers(0, num, 5)]
  np.testing.assert_array_equal(
      _advantage(estimator, rows.take(inputs, twice)),
      _advantage(estimator, inputs)[twice],
  )


def test_grpo_counts_the_rows_it_is_given():
  inputs = rows.random_inputs(3)
  num = len(inputs.step_N)
  copied = rows.take(inputs, np.r_[0:num, 0, 0, 5])
  assert not np.allclose(
      _advantage(GRPO(), copied)[:num], _advantage(GRPO(), inputs)
  )


@pytest.mark.parametrize('kind, divided, centred', SCALED)
@some
@hypothesis.given(seed=seeds, factor=st.sampled_from([0.25, 2.0, 8.0]))
def test_scaling_the_rewards(kind, divided, centred, seed, factor):
  inputs = _whole_outcomes(seed)
  larger = _rewarded(inputs, inputs.reward_N * np.float32(factor))
  for settings, by in ((divided, 1.0), (centred, factor)):
    if settings is None:
      continue
    unit = {UNITS[kind]: 10.0 * factor} if kind in UNITS else {}
    got = _advantage(kind(**settings, **unit), larger)
    want = by * _advantage(kind(**settings), inputs)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * by)


@pytest.mark.parametrize('kind, divided, centred', SHIFTED)
@some
@hypothesis.given(seed=seeds, bonus=st.sampled_from([-5.0, 0.5, 3.0]))
def test_a_bonus_for_everyone_at_the_end(kind, divided, centred, seed, bonus):
  """Without a discount it moves all returns alike, and no advantage."""
  inputs = _whole_outcomes(seed)
  ends = np.append(inputs.step_N[1:] == 0, True)
  shifted = _rewarded(inputs, inputs.reward_N + np.float32(bonus) * ends)
  for settings in (divided, centred):
    if settings is None:
      continue
    gamma = {'gamma': 1.0} if hasattr(kind, 'gamma') else {}
    estimator = kind(**settings, **gamma)
    np.testing.assert_allclose(
        _advantage(estimator, shifted),
        _advantage(estimator, inputs),
        rtol=1e-4,
        atol=1e-4,
    )


@some
@hypothesis.given(seed=seeds, std=st.booleans(), alpha=alphas)
def test_hgpo_without_history_normalises_by_state(seed, std, alpha):
  inputs = rows.random_inputs(seed)
  mode = 'mean_std_norm' if std else 'mean_norm'
  got = _advantage(HGPO(history_length=0, alpha=alpha, mode=mode), inputs)
  weight = 2.0**alpha
  want = rows.reference(inputs, 'HGPO', std=std, levels=1, alpha=0.0)
  np.testing.assert_allclose(
      got, want * (1.0 + 1e-6) * weight / (weight + 1e-6), rtol=1e-4, atol=1e-4
  )


@some
@hypothesis.given(seed=seeds)
def test_hgpo_without_history_is_grpo_among_the_steps_of_a_state(seed):
  """One row a step, its return as outcome, its (task, state) as group."""
  inputs = rows.random_inputs(seed)
  got = _advantage(HGPO(history_length=0, gamma=0.0, mode='mean_norm'), inputs)
  num = len(inputs.step_N)
  by_state = dataclasses.replace(
      inputs,
      outcome_N=inputs.reward_N,
      group_N=inputs.group_N * len(inputs.state_texts) + inputs.state_N,
      trajectory_N=np.arange(num),
      step_N=np.zeros(num, int),
  )
  want = _advantage(GRPO(norm_by_std=False), by_state)
  met = np.bincount(by_state.group_N)[by_state.group_N]
  np.testing.assert_allclose(got, np.where(met > 1, want, 0.0), atol=1e-5)


@each(EVERY)
def test_no_rows(estimator):
  empty = rows.take(rows.random_inputs(0), np.zeros(0, int))
  advantage, metrics = estimator(empty)
  assert advantage.shape == (0,) and np.isfinite(list(metrics.values())).all()


@each(EVERY)
@pytest.mark.parametrize('name', ['reward_N', 'outcome_N'])
@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_rewards_that_are_not_finite_are_refused(estimator, name, value):
  inputs = rows.random_inputs(0)
  column = getattr(inputs, name).copy()
  row = int(np.flatnonzero(inputs.step_N == 2)[0])
  column[row] = value
  trajectory = inputs.trajectory_N[row]
  with pytest.raises(
      ValueError,
      match=f'{name} is {value} for group 0, trajectory {trajectory}, step 2',
  ):
    estimator(dataclasses.replace(inputs, **{name: column}))


def _rewarded(inputs, reward_N):
  """The same steps with other rewards, every action well formed."""
  outcome = np.bincount(inputs.trajectory_N, reward_N)
  return dataclasses.replace(
      inputs,
      reward_N=reward_N.astype(np.float32),
      outcome_N=outcome[inputs.trajectory_N].astype(np.float32),
      valid_N=np.ones(len(reward_N), bool),
  )


def _failed(inputs):
  no = np.zeros(len(inputs.step_N), bool)
  return dataclasses.replace(
      _rewarded(inputs, no.astype(np.float32)), success_N=no
  )


def _whole_outcomes(seed):
  """Rewards 0 or 10 at the end: no rounding, no spread near the tolerance."""
  inputs = rows.random_inputs(seed)
  ends = np.append(inputs.step_N[1:] == 0, True)
  return _rewarded(inputs, ends * np.float32(10.0) * inputs.success_N)
