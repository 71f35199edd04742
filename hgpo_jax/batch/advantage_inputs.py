"""Trajectories as the integer columns that advantage estimators read."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from hgpo_jax import types

# Squares of larger ones, summed over a batch, do not fit float32.
_LARGEST_REWARD = 1e15


def build(
    trajectories: Sequence[types.Trajectory],
) -> tuple[types.AdvantageInputs, list[types.Step]]:
  """Returns (inputs, steps): entry i of every column is `steps[i]`.

  Steps come trajectory by trajectory, in order. Texts and ids are interned to
  dense ids in the order of first appearance, so that equal texts have equal
  ids; states before and after acting share one numbering. Aborted
  trajectories are left out; `counts` counts them.

  Raises:
    ValueError: a reward that is not finite, a trajectory id used twice, or a
      step that does not name the trajectory and position where it stands.
  """
  kept = [t for t in trajectories if not t.aborted]
  _check_unique(kept)
  for trajectory in kept:
    _check(trajectory)
  played = [t for t in kept if t.steps]
  steps = [step for t in played for step in t.steps]
  lengths = [len(t.steps) for t in played]
  states, actions, groups, members = ({}, {}, {}, {})
  spread = lambda column: np.repeat(column, lengths)
  columns = dict(
      reward_N=np.array([s.reward for s in steps], np.float32),
      outcome_N=spread(np.array([t.outcome for t in played], np.float32)),
      success_N=spread(np.array([t.success for t in played], bool)),
      group_N=spread(_intern(groups, (t.group for t in played))),
      trajectory_N=spread(_intern(members, (t.trajectory for t in played))),
      step_N=np.array([s.step for s in steps], np.int32),
      state_N=_intern(states, (s.state_key for s in steps)),
      next_state_N=_intern(states, (s.next_state_key for s in steps)),
      action_N=_intern(actions, (s.action for s in steps)),
      valid_N=np.array([s.action_valid for s in steps], bool),
      response_tokens_N=np.array(
          [len(s.response_ids) for s in steps], np.int32
      ),
  )
  for column in columns.values():
    column.flags.writeable = False
  inputs = types.AdvantageInputs(**columns, state_texts=tuple(states))
  return inputs, steps


def counts(trajectories: Sequence[types.Trajectory]) -> types.Metrics:
  """What `build` keeps and leaves out."""
  kept = [t for t in trajectories if not t.aborted]
  return {
      'batch/trajectories': float(len(kept)),
      'batch/aborted_trajectories': float(len(trajectories) - len(kept)),
      'batch/steps': float(sum(len(t.steps) for t in kept)),
      'batch/aborted_steps': float(
          sum(len(t.steps) for t in trajectories if t.aborted)
      ),
      'batch/response_tokens': float(
          sum(len(s.response_ids) for t in kept for s in t.steps)
      ),
  }


def _intern(table: dict[Hashable, int], keys: Iterable[Hashable]) -> np.ndarray:
  """Dense ids of `keys`; `table` (key -> id) grows by the new ones."""
  return np.array([table.setdefault(k, len(table)) for k in keys], np.int32)


def _check_unique(trajectories: Sequence[types.Trajectory]) -> None:
  seen = set()
  for trajectory in trajectories:
    if trajectory.trajectory in seen:
      raise ValueError(
          f'trajectory id {trajectory.trajectory} appears twice (task '
          f'{trajectory.task.task_id!r}); expected ids that are unique in the '
          'iteration.'
      )
    seen.add(trajectory.trajectory)


def _check(trajectory: types.Trajectory) -> None:
  task = trajectory.task.task_id
  for index, step in enumerate(trajectory.steps):
    if (
        step.step != index
        or step.trajectory != trajectory.trajectory
        or step.group != trajectory.group
    ):
      found = (step.group, step.trajectory, step.step)
      expected = (trajectory.group, trajectory.trajectory, index)
      raise ValueError(
          f'task {task!r}: step {index} says (group, trajectory, step)='
          f'{found}, expected {expected}.'
      )
    if not abs(step.reward) <= _LARGEST_REWARD:  # NaN too.
      raise ValueError(
          f'task {task!r}, trajectory {trajectory.trajectory}, step {index}: '
          f'reward is {step.reward}, expected a finite number of size '
          f'{_LARGEST_REWARD:g} at most; correct the reward of the environment.'
      )
