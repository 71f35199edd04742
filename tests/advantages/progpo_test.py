"""ProGPO: the worked example, a float64 reference, the options."""

from __future__ import annotations

import collections
import dataclasses

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from hgpo_jax.advantages import grouping
from hgpo_jax.advantages import potentials
from hgpo_jax.advantages import progpo
from tests.advantages import rows
from tests.advantages import worked

ProGPO = progpo.ProGPO
some = hypothesis.settings(max_examples=25, deadline=None, derandomize=True)
EXAMPLE = worked.two_successes_and_a_failure()


def _only(term, **settings):
  """The estimator with nothing but one term."""
  weights = {f'{name}_weight': 0.0 for name in ('episode', 'peer')}
  weights |= {'transition_weight': 0.0, f'{term}_weight': 1.0}
  return ProGPO(**weights, **settings)


def test_worked_example():
  advantage, metrics = ProGPO(history_length=1)(EXAMPLE)
  want = [1.4815, 1.7207, 1.9225, -2.6741, -2.2613, -0.5966, -3.6438]
  want += [1.3728, -0.0381, 0.3989, 1.9225]
  np.testing.assert_allclose(advantage, want, atol=1e-3)
  assert metrics['advantage/peer_signal_share'] == pytest.approx(5 / 11)
  assert metrics['advantage/merged_state_share'] == pytest.approx(1 / 5)
  assert metrics['advantage/depth0_weight'] > metrics['advantage/depth1_weight']


@pytest.mark.parametrize(
    'term, want',
    [
        (
            'peer',
            [0.7607, 1.0, 0, -1.4128, -1.0, 0, 0, 0.6521, 0, 0, 0],
        ),
        (
            'transition',
            [-0.1289, 0.2068, 1.2018, -0.1289, -0.5315, 0.6647, -2.3825]
            + [0.9774, -0.7588, -0.3219, 1.2018],
        ),
        ('episode', [0.7207] * 3 + [-1.2613] * 4 + [0.7207] * 4),
    ],
)
def test_terms_of_the_worked_example(term, want):
  estimator = _only(term, history_length=1, combine='add')
  np.testing.assert_allclose(estimator(EXAMPLE)[0], want, atol=1e-3)


def test_potentials_of_the_worked_example():
  discounted = 0.95 ** np.array([2, 1, 0, 0, 0, 0, 0, 3, 2, 1, 0])
  discounted[3:7] = 0.0
  states = np.array([0, 1, 2, 0, 1, 1, 2, 0, 3, 1, 2])
  steps = np.array([0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 3])
  group = np.zeros(11, int)
  found = potentials.fuse(
      discounted,
      group,
      np.cumsum(steps == 0),
      grouping.history_ids(group, states, steps, 2),
      shrinkage=1.0,
      depth_penalty=0.0,
      variance_floor=1e-4,
  )
  want = [0.5866, 0.5776, 0.6667, 0.5866, 0.5776, 0.4498, 0.6667]
  want += [0.5866, 0.9025, 0.7251, 0.6667]
  np.testing.assert_allclose(found.value_U, want, atol=1e-4)
  np.testing.assert_allclose(found.spread_U, 0.2254, atol=1e-4)
  np.testing.assert_allclose(
      found.weight_KU[:, [0, 1, 2, 5]],
      [[1.0, 0.648, 1.0, 0.710], [0.0, 0.352, 0.0, 0.290]],
      atol=1e-3,
  )
  np.testing.assert_array_equal(found.members_KU[:, 1], [3, 2])
  assert found.variance_U[0] == pytest.approx(0.0826, abs=1e-4)


def _reference(inputs, depth, beta, nu, std, add, gamma=0.95, penalty=0.1):
  """ProGPO with classes 'none' in float64, with loops and tuples."""
  num = len(inputs.step_N)
  paths = collections.defaultdict(dict)
  for row in range(num):
    paths[inputs.trajectory_N[row]][int(inputs.step_N[row])] = row
  result = np.zeros(num)
  for group in set(inputs.group_N.tolist()):
    own = [
        [path[step] for step in sorted(path)]
        for path in paths.values()
        if inputs.group_N[path[0]] == group
    ]
    result += _reference_group(inputs, own, depth, beta, nu, std, add, gamma)
  shared = {'std': std, 'penalty': penalty}
  return result + rows.reference(inputs, 'GRPO', **shared)


def _reference_group(inputs, own, depth, beta, nu, std, add, gamma):
  num, outcome = len(inputs.step_N), inputs.outcome_N.astype(np.float64)
  g, prefix, keys = {}, {}, collections.defaultdict(dict)
  for path in own:
    state = [int(inputs.state_N[row]) for row in path]
    action = [int(inputs.action_N[row]) for row in path]
    for t, row in enumerate(path):
      g[row] = gamma ** (len(path) - 1 - t) * outcome[row] / 10.0
      prefix[row] = (*zip(state[:t], action[:t]), state[t])
      for k in range(min(depth, t) + 1):
        keys[k][row] = tuple(state[t - k : t + 1])
  spread = np.var(list(g.values()), ddof=1) if len(g) > 1 else 0.0
  value = {}
  for path in own:
    for row in path:
      total, mass, above = 0.0, 0.0, None
      for k in range(depth + 1):
        if row not in keys[k]:
          continue
        same = {r for r in keys[k] if keys[k][r] == keys[k][row]}
        if same == above:
          continue
        above = same
        visits = [[g[r] for r in p if r in same] for p in own]
        y = [np.mean(v) for v in visits if v]
        n = len(y)
        s2 = np.var(y, ddof=1) if n > 1 else 0.0
        v = ((n - 1) * s2 + nu * spread) / (n - 1 + nu) / n
        weight = 1.0 / (v + beta * spread * (depth - k) / depth + 1e-4)
        total, mass = total + weight * np.mean(y), mass + weight
      value[row] = total / mass
  credit = {}
  for path in own:
    for row, after in zip(path, [*path[1:], None]):
      gain = outcome[row] / 10.0 if after is None else gamma * value[after]
      credit[row] = gain - value[row]
  scale = 1.0 if std else 10.0
  normalise = rows.normalise  # Zero where there is no spread.
  order = list(g)
  p = normalise(
      scale * np.array([g[r] for r in order]),
      [prefix[r] for r in order],
      0,
      std,
  )
  t = normalise(
      scale * np.array([credit[r] for r in order]),
      [len(own) > 1 or None] * len(order),
      0,
      std,
  )
  result = np.zeros(num)
  for i, row in enumerate(order):
    same = [r for r in order if prefix[r] == prefix[row]]
    peer = (
        len({int(inputs.action_N[r]) for r in same}) > 1
        and np.ptp([g[r] for r in same]) > 1e-6
    )
    result[row] = (p[i] if peer else 0.0) + (t[i] if add or not peer else 0.0)
  return result


@some
@hypothesis.given(
    seed=st.integers(0, 10_000),
    depth=st.integers(1, 3),
    beta=st.sampled_from([0.0, 0.5]),
    nu=st.sampled_from([0.5, 1.0]),
    std=st.booleans(),
    add=st.booleans(),
)
def test_float64_reference(seed, depth, beta, nu, std, add):
  inputs = rows.random_inputs(seed, groups=2, members=4, states=3)
  # Few actions, so that prefixes are shared.
  inputs = dataclasses.replace(inputs, action_N=inputs.action_N % 2)
  estimator = ProGPO(
      history_length=depth,
      classes='none',
      mode='mean_std_norm' if std else 'mean_norm',
      combine='add' if add else 'fill',
      depth_penalty=beta,
      shrinkage=nu,
  )
  np.testing.assert_allclose(
      estimator(inputs)[0],
      _reference(inputs, depth, beta, nu, std, add),
      rtol=1e-4,
      atol=1e-4,
  )


@some
@hypothesis.given(seed=st.integers(0, 10_000), gate=st.booleans())
def test_states_met_once_give_no_transition_credit(seed, gate):
  inputs = rows.random_inputs(seed)
  unique = np.arange(len(inputs.step_N), dtype=np.int32)
  inputs = dataclasses.replace(inputs, state_N=unique)
  estimator = _only('transition', classes='none', reliability_gate=gate)
  advantage, metrics = estimator(inputs)
  assert (advantage == 0.0).all()
  assert metrics['advantage/no_signal_share'] == 1.0


def test_one_episode_has_no_transition_credit():
  inputs = worked.episodes([['A-x', 'B-x', 'A-y', 'C-x', 'won']], [10.0])
  assert (_only('transition')(inputs)[0] == 0.0).all()


def test_peers_need_two_actions_and_two_returns():
  same_action = worked.episodes([['A-x', 'B-x', 'C'], ['A-x', 'C']], [10.0, 0])
  other_action = worked.episodes([['A-x', 'B-x', 'C'], ['A-y', 'C']], [10.0, 0])
  same_return = worked.episodes([['A-x', 'C'], ['A-y', 'C']], [10.0, 10.0])
  for inputs, share in (
      (same_action, 0.0),
      (other_action, 2 / 3),
      (same_return, 0.0),
  ):
    advantage, metrics = _only('peer')(inputs)
    assert metrics['advantage/peer_signal_share'] == pytest.approx(share)
    assert np.mean(advantage != 0.0) == pytest.approx(share)


def test_a_prefix_of_states_alone_has_more_peers():
  inputs = worked.episodes(
      [['A-x', 'B-x', 'C'], ['A-y', 'B-y', 'C']], [10.0, 0.0]
  )
  full, _ = _only('peer')(inputs)
  states, _ = _only('peer', prefix='states')(inputs)
  np.testing.assert_array_equal(full != 0.0, [True, False, True, False])
  np.testing.assert_array_equal(states != 0.0, [True] * 4)


def test_add_counts_transitions_of_steps_with_peers_too():
  fill, _ = ProGPO(history_length=1)(EXAMPLE)
  add, _ = ProGPO(history_length=1, combine='add')(EXAMPLE)
  peer = np.array([1, 1, 0, 1, 1, 0, 0, 1, 0, 0, 0], bool)
  np.testing.assert_array_equal(fill[~peer], add[~peer])
  assert (fill[peer] != add[peer]).all()


def test_the_reliability_gate_trusts_pooled_states_more():
  plain, _ = _only('transition', history_length=1)(EXAMPLE)
  gated, _ = _only('transition', history_length=1, reliability_gate=True)(
      EXAMPLE
  )
  share = gated[plain != 0.0] / plain[plain != 0.0]
  assert ((0.4 < share) & (share < 0.8)).all()
  # Third step of the first episode: C is met by three; then the end.
  assert gated[2] / plain[2] == pytest.approx(0.2254 / (0.2254 + 0.0992), 1e-3)


def test_without_classes_the_recovery_is_seen_by_no_one():
  advantage, _ = _only('transition', history_length=1, classes='none')(EXAMPLE)
  pooled, _ = _only('transition', history_length=1)(EXAMPLE)
  assert abs(advantage[5] - pooled[5]) > 0.1


@pytest.mark.parametrize(
    'settings, text',
    [
        ({'history_length': -1}, 'ProGPO.history_length is -1, expected'),
        ({'gamma': 1.1}, 'ProGPO.gamma is 1.1, expected'),
        ({'mode': 'std'}, "ProGPO.mode is 'std', expected one of"),
        ({'classes': 'texts'}, "ProGPO.classes is 'texts', expected one of"),
        ({'prefix': 'obs'}, "ProGPO.prefix is 'obs', expected one of"),
        ({'combine': 'both'}, "ProGPO.combine is 'both', expected one of"),
        ({'max_return': 0.0}, 'ProGPO.max_return is 0.0, expected'),
        ({'variance_floor': 0.0}, 'ProGPO.variance_floor is 0.0, expected'),
        ({'shrinkage': -1.0}, 'ProGPO.shrinkage is -1.0, expected'),
    ],
)
def test_bad_settings_are_refused(settings, text):
  with pytest.raises(ValueError, match=text):
    ProGPO(**settings)


def test_classes_need_texts():
  inputs = dataclasses.replace(EXAMPLE, state_texts=())
  with pytest.raises(ValueError, match="ProGPO.classes = 'none'"):
    ProGPO()(inputs)
  ProGPO(classes='none')(inputs)
