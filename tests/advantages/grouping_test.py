"""Ids of groups and histories, similar states, refused rows."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hgpo_jax.advantages import grouping
from tests.advantages import rows


def test_history_ids_are_the_tuples():
  inputs = rows.random_inputs(0, groups=2, members=6, states=3)
  table = grouping.index_steps(inputs)
  group, state = inputs.group_N[table.row_U], inputs.state_N[table.row_U]
  keys = grouping.history_ids(group, state, table.step_U, 4)
  for k, ids in enumerate(keys, start=1):
    tuples = [
        (group[row], *state[row - k + 1 : row + 1])
        if table.step_U[row] >= k - 1
        else None
        for row in range(len(ids))
    ]
    absent = [row for row, key in enumerate(tuples) if key is None]
    assert (ids[absent] == -1).all()
    present = {(key, i) for key, i in zip(tuples, ids) if key is not None}
    assert len(present) == len({key for key, _ in present})
    assert len(present) == len({i for _, i in present})


def test_pair_ids_do_not_collide():
  rng = np.random.default_rng(0)
  columns = rng.integers(-1, 40, (3, 2000))
  ids = grouping.pair_ids(*columns)
  present = (columns >= 0).all(0)
  assert ((ids >= 0) == present).all() and ids.max() < 2000
  pairs = set(zip(map(tuple, columns.T[present]), ids[present]))
  assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


@pytest.mark.parametrize('largest', [5, 10**6, 2**31 - 1])
def test_pair_ids_are_ranks_however_large_the_ids(largest):
  rng = np.random.default_rng(1)
  columns = rng.integers(0, 6, (4, 500)) * (largest // 5)
  _, ranks = np.unique(columns, axis=1, return_inverse=True)
  np.testing.assert_array_equal(grouping.pair_ids(*columns), ranks.ravel())


def test_pair_ids_ignore_what_stands_beside_an_absent_id():
  ids = grouping.pair_ids(np.array([3, -1, 0, 3]), np.array([-1, 9, 1, 2]))
  np.testing.assert_array_equal(ids < 0, [True, True, False, False])
  assert ids[2] != ids[3] and ids.max() < 4


@pytest.mark.parametrize('with_actions', [True, False])
def test_prefix_ids_are_the_tuples(with_actions):
  inputs = rows.random_inputs(2, groups=2, members=9, states=2)
  inputs = dataclasses.replace(inputs, action_N=inputs.action_N % 2)
  action = inputs.action_N * with_actions
  ids = grouping.prefix_ids(
      inputs.group_N,
      inputs.state_N,
      inputs.action_N if with_actions else None,
      inputs.step_N,
  )
  keys = []
  for row, step in enumerate(inputs.step_N):
    past = range(row - step, row)
    steps = [(inputs.state_N[i], action[i]) for i in past]
    keys.append((inputs.group_N[row], *steps, inputs.state_N[row]))
  pairs = set(zip(keys, ids))
  assert len(pairs) == len(set(keys)) == len(set(ids)) < len(keys)


def test_steps_are_found_in_any_order_and_once():
  inputs = rows.random_inputs(1)
  num = len(inputs.step_N)
  order = np.random.default_rng(0).permutation(np.r_[0:num, 0:num:3])
  table = grouping.index_steps(rows.take(inputs, order))
  plain = grouping.index_steps(inputs)
  np.testing.assert_array_equal(order[table.row_U], plain.row_U)
  np.testing.assert_array_equal(table.trajectory_U, plain.trajectory_U)
  np.testing.assert_array_equal(table.inverse_N, plain.inverse_N[order])


def test_a_missing_step_is_refused():
  inputs = rows.random_inputs(1)
  longest = np.argmax(inputs.step_N)
  kept = np.delete(np.arange(len(inputs.step_N)), longest - 1)
  with pytest.raises(ValueError, match=r'has step 7 where step 6 was expected'):
    grouping.index_steps(rows.take(inputs, kept))


def test_copies_that_differ_are_refused():
  inputs = rows.simple_inputs([[1.0, 2.0]])
  inputs = dataclasses.replace(inputs, trajectory_N=np.zeros(2, np.int32))
  with pytest.raises(ValueError, match='rows 0 and 1 are both step 0 of traj'):
    grouping.index_steps(inputs)


def test_similar_states():
  texts = ('you are in room 1', 'you are in room 2', 'quite another place')
  group = np.array([0, 0, 0, 0, 1])
  state = np.array([1, 0, 2, 1, 0])
  joined = grouping.similar_states(group, state, np.arange(5), texts, 0.9)
  # Group 0 meets room 2 first; group 1 knows nothing of group 0.
  assert joined.tolist() == [1, 1, 2, 1, 0]
  exact = grouping.similar_states(group, state, np.arange(5), texts, 1.0)
  assert exact.tolist() == state.tolist()


def test_similar_states_need_texts():
  ids = np.array([0, 1])
  with pytest.raises(ValueError, match='got 1 state texts for state ids up'):
    grouping.similar_states(ids, ids, ids, ('a',), 0.9)
