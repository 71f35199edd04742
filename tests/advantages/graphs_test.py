"""G2PO and GraphGPO: worked examples, golden intermediates, edge cases."""

from __future__ import annotations

import dataclasses

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from hgpo_jax.advantages import episode
from hgpo_jax.advantages import g2po
from hgpo_jax.advantages import graph
from hgpo_jax.advantages import graphgpo
from hgpo_jax.advantages import grouping
from hgpo_jax.advantages import grpo
from tests import golden_check
from tests.advantages import golden_test
from tests.advantages import rows

G2PO, GraphGPO = g2po.G2PO, graphgpo.GraphGPO
ESTIMATORS = (
    G2PO(),
    G2PO(mode='mean_norm', shrinkage=2.0),
    GraphGPO(),
    GraphGPO(gamma=0.5, mode='mean_norm', normalize_distance=True),
    GraphGPO(enable_similarity=True, similarity_threshold=0.8),
    GraphGPO(goal='positive_outcome', episode_advantage_weight=0.0),
)
every_estimator = pytest.mark.parametrize('estimator', ESTIMATORS, ids=repr)
some = hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
seeds = st.integers(0, 10_000)
A, B, C, D, SMALL_B, END = range(6)


def _episodes(paths, wins):
  """One task; each path is a list of states, ended by another state."""
  columns = {name: [] for name in rows.random_inputs(0).__dict__}
  for trajectory, (path, won) in enumerate(zip(paths, wins)):
    length = len(path)
    columns['reward_N'] += [0.0] * (length - 1) + [10.0 * won]
    columns['outcome_N'] += [10.0 * won] * length
    columns['success_N'] += [won] * length
    columns['group_N'] += [0] * length
    columns['trajectory_N'] += [trajectory] * length
    columns['step_N'] += list(range(length))
    columns['state_N'] += path
    columns['next_state_N'] += [*path[1:], END]
    columns['action_N'] += [0] * length
    columns['valid_N'] += [True] * length
  return rows.make_inputs(columns)


WORKED = _episodes(
    [[A, B, C], [A, B, SMALL_B, C], [A, D, B, C]], [True, False, True]
)


def _values(estimator, inputs):
  return estimator.node_values(inputs, grouping.index_steps(inputs))


def test_g2po_worked_example():
  values = dict(zip(WORKED.state_N.tolist(), _values(G2PO(), WORKED)))
  want = {A: 5.5729, B: 6.0167, C: 6.3333, D: 8.5737, SMALL_B: 0.0}
  assert values == pytest.approx(want, abs=1e-3)
  got, _ = G2PO()(WORKED)
  want = [0.1799, 1.3027, 2.1442, -1.8021, -4.0024, 0.2547, -4.0819]
  want += [2.5543, 0.0035, 1.3027, 2.1442]
  np.testing.assert_allclose(got, want, atol=1e-3)


def _golden(name):
  return [n for n in golden_test.CASES if n.startswith(name)]


@pytest.mark.parametrize('name', _golden('G2PO'))
def test_golden_node_values(name):
  case = golden_test.CASES[name]
  plain = golden_check.make_inputs(
      {k: v for k, v in case.items() if k != 'adv_row_order'}
  )
  table = grouping.index_steps(plain)
  got = G2PO().node_values(plain, table)[table.inverse_N]
  np.testing.assert_allclose(got, case['expected']['node_value'], atol=1e-5)


@pytest.mark.parametrize('name', _golden('GraphGPO'))
def test_golden_distances(name):
  case = golden_test.CASES[name]
  inputs = golden_check.make_inputs(case)
  table = grouping.index_steps(inputs)
  estimator = golden_check.make_estimator(case)
  states = estimator._states(inputs, table)
  got = estimator.distances(inputs, table, *states)
  for distance_U, side in zip(got, ('anchor', 'next')):
    want = case['expected'][f'distance_from_{side}']
    np.testing.assert_array_equal(distance_U[table.inverse_N], want)


def test_a_task_with_one_row_keeps_the_episodes_term():
  inputs = rows.simple_inputs([[10.0], [0.0]])
  for estimator in (G2PO(), G2PO(mode='mean_norm'), GraphGPO()):
    np.testing.assert_allclose(estimator(inputs)[0], [10.0, 0.0], rtol=2e-6)


def test_success_is_the_flag_not_the_reward():
  # An intermediate reward, so that the outcome is not the reward of success.
  inputs = _episodes([[A, B], [A, C]], [True, False])
  reward_N = inputs.reward_N + np.float32([0.5, 0, 0, 0])
  outcome_N = inputs.outcome_N + np.float32([0.5, 0.5, 0, 0])
  richer = dataclasses.replace(inputs, reward_N=reward_N, outcome_N=outcome_N)
  plain, _ = G2PO()(inputs)
  got, _ = G2PO()(richer)
  assert np.sign(got).tolist() == np.sign(plain).tolist()
  lost = dataclasses.replace(richer, success_N=np.zeros(4, bool))
  assert G2PO()(lost)[0][1] < got[1]


def test_shrinkage_by_hand():
  inputs = _episodes([[A, A], [B], [B]], [True, False, True])
  visits = {A: [9.5 * 0.95, 9.5], B: [0.0, 9.5]}
  prior = np.mean(visits[A] + visits[B])
  # Two visits to A, but of one episode.
  want_a = (np.mean(visits[A]) + 3.0 * prior) / 4.0
  want_b = (2.0 * np.mean(visits[B]) + 3.0 * prior) / 5.0
  got = _values(G2PO(shrinkage=3.0), inputs)
  np.testing.assert_allclose(got, [want_a, want_a, want_b, want_b])


def test_much_shrinkage_leaves_only_the_ends():
  got = _values(G2PO(shrinkage=1e9), WORKED)
  assert np.ptp(got) < 1e-6


def test_graphgpo_rates_a_step_by_where_it_leads():
  # From A, through B to the goal in two steps, or through D in three.
  estimator = GraphGPO(gamma=0.5, mode='mean_norm', episode_advantage_weight=0)
  inputs = _episodes([[A, B], [A, D, B], [A, C]], [True, True, False])
  got, _ = estimator(inputs)
  # d: B 1, A and D 2, C 3 (no path), and so is what follows C.
  lead = 10.0 * np.array([0.5, 0.25, 0.125])
  np.testing.assert_allclose(got[[0, 2, 5]], lead - lead.mean(), rtol=1e-5)
  np.testing.assert_allclose(got[[1, 3, 4, 6]], 0.0)


def test_far_states_are_told_apart():
  # gamma^d is tiny there; without a common scale the difference still counts.
  paths = [[A, *range(10, 19)], [A, 30, *range(10, 19)]]
  inputs = _episodes(paths, [True, True])
  got, _ = GraphGPO(gamma=0.1, episode_advantage_weight=0.0)(inputs)
  assert got[0] > 0.0 > got[len(paths[0])]


def test_a_task_that_nobody_solved_gives_nothing():
  inputs = dataclasses.replace(
      _episodes([[A, B, A], [A, C]], [False, False]),
      state_texts=('start', 'shelf', 'door', '', '', 'end of it'),
  )
  for estimator in ESTIMATORS:
    got, metrics = estimator(inputs)
    assert (got == 0.0).all()
    assert metrics['advantage/no_signal_share'] == 1.0


def test_copies_count_once_in_graphgpo_and_leave_node_values_alone():
  inputs = rows.random_inputs(3)
  num = len(inputs.step_N)
  index = np.r_[0:num, 0, 0, 5]
  copied = rows.take(inputs, index)
  np.testing.assert_array_equal(
      GraphGPO()(copied)[0], GraphGPO()(inputs)[0][index]
  )
  np.testing.assert_array_equal(
      _values(G2PO(), copied), _values(G2PO(), inputs)
  )


def test_without_steps_g2po_is_grpo():
  inputs = rows.random_inputs(4)
  np.testing.assert_array_equal(
      G2PO(step_advantage_weight=0.0)(inputs)[0], grpo.GRPO()(inputs)[0]
  )


def test_similar_states_are_one_node():
  inputs = dataclasses.replace(
      _episodes([[A, B], [A, C]], [True, False]),
      state_texts=('start', 'shelf 1 with a mug', 'shelf 2 with a mug')
      + ('', '', 'the very end of it'),
  )
  alone, _ = GraphGPO(episode_advantage_weight=0.0)(inputs)
  merged, _ = GraphGPO(
      episode_advantage_weight=0.0,
      enable_similarity=True,
      similarity_threshold=0.9,
  )(inputs)
  assert alone[0] > 0.0 and alone[1] == 0.0
  # B and C are one: no choice at A, but at the shelf one step is better.
  assert merged[0] == 0.0 and merged[1] > 0.0 > merged[3]
  exact, _ = GraphGPO(
      episode_advantage_weight=0.0,
      enable_similarity=True,
      similarity_threshold=0.9,
      similar_step_groups=False,
  )(inputs)
  assert (exact == 0.0).all()


def test_distances():
  # 0 <- 1 <- 2 <- 3 -> 4, and a loop at 2; 5 is a second goal.
  source, target = np.array([[1, 0], [2, 1], [3, 2], [3, 4], [2, 2], [4, 5]]).T
  got = graph.distances_to(np.array([0, 5]), source, target, 7)
  np.testing.assert_array_equal(got, [0, 1, 2, 2, 1, 0, -1])


@every_estimator
@some
@hypothesis.given(seed=seeds)
def test_order_of_rows_changes_nothing(estimator, seed):
  inputs = rows.random_inputs(seed)
  order = np.random.default_rng(seed).permutation(len(inputs.step_N))
  np.testing.assert_array_equal(
      estimator(rows.take(inputs, order))[0], estimator(inputs)[0][order]
  )


@every_estimator
@some
@hypothesis.given(seed=seeds)
def test_an_unrelated_group_changes_nothing(estimator, seed):
  inputs = rows.random_inputs(seed, groups=2)
  both = rows.join(inputs, rows.random_inputs(seed + 1, groups=1))
  np.testing.assert_allclose(
      estimator(both)[0][: len(inputs.step_N)], estimator(inputs)[0], atol=1e-5
  )


@every_estimator
def test_no_rows(estimator):
  got, metrics = estimator(rows.take(rows.random_inputs(0), np.zeros(0, int)))
  assert got.shape == (0,) and np.isfinite(list(metrics.values())).all()


def test_visits_are_ordered_by_the_states_after_too():
  inputs = _episodes([[A], [A]], [False, False])
  inputs = dataclasses.replace(inputs, next_state_N=np.array([C, B]))
  assert episode.visit_order(inputs, 'step').tolist() == [1, 0]


@pytest.mark.parametrize(
    'make, text',
    [
        (lambda: G2PO(gamma=1.5), 'G2PO.gamma is 1.5, expected a finite'),
        (lambda: G2PO(mode='std'), "G2PO.mode is 'std', expected one of"),
        (lambda: G2PO(shrinkage=-1.0), 'G2PO.shrinkage is -1.0, expected'),
        (lambda: G2PO(success_value=np.inf), 'success_value: got inf'),
        (lambda: GraphGPO(gamma=0.0), 'GraphGPO.gamma is 0.0, expected a fin'),
        (lambda: GraphGPO(goal='won'), "GraphGPO.goal is 'won', expected one"),
        (lambda: GraphGPO(mode=''), "GraphGPO.mode is '', expected one of"),
        (lambda: GraphGPO(visit_order='x'), "GraphGPO.visit_order is 'x'"),
        (
            lambda: GraphGPO(similarity_threshold=2.0),
            'GraphGPO.similarity_threshold is 2.0',
        ),
        (
            lambda: GraphGPO(episode_advantage_weight=-1.0),
            'GraphGPO.episode_advantage_weight is -1.0',
        ),
    ],
)
def test_bad_settings_are_refused(make, text):
  with pytest.raises(ValueError, match=text):
    make()
