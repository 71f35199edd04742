"""A game that is solved with pencil and paper, and a policy that plays it.

Three times the player goes up (probability UP) or stays. Who is at height 2 or
more in the end has solved the task, which pays 10.
"""

from __future__ import annotations

from collections.abc import Sequence
import math

import numpy as np

from hgpo_jax import types
from hgpo_jax.credit import continuations

UP, STEPS, GOAL, REWARD = 0.6, 3, 2, 10.0


def value(height: int, step: int) -> float:
  """V: the chance of the missing steps up, by the binomial formula."""
  left, missing = STEPS - step, max(GOAL - height, 0)
  return REWARD * sum(
      math.comb(left, k) * UP**k * (1 - UP) ** (left - k)
      for k in range(missing, left + 1)
  )


def step_value(step: types.Step) -> float:
  """Q of a recorded step."""
  return value(_height(step.next_state_key), step.step + 1)


def advantage(step: types.Step) -> float:
  """A of a recorded step."""
  return step_value(step) - value(_height(step.state_key), step.step)


def tasks(count: int) -> list[types.Task]:
  return [
      types.Task('train', i, f'climb/{i}', i, 'climb') for i in range(count)
  ]


class Play:
  """Plays, and counts what it was asked to."""

  def __init__(self, fail_at: int = -1):
    self.calls: list[int] = []
    self._fail_at = fail_at

  def __call__(
      self,
      tasks: Sequence[types.Task],
      openings: Sequence[continuations.Opening],
      episodes: int,
      key: int,
  ) -> list[types.Trajectory]:
    if len(self.calls) == self._fail_at:
      raise KeyboardInterrupt
    self.calls.append(key)
    return [
        _episode(task, opening, group * episodes + member, group, key)
        for group, (task, opening) in enumerate(zip(tasks, openings))
        for member in range(episodes)
    ]


def _height(key: str) -> int:
  return int(key.split()[1])


def _episode(
    task: types.Task,
    opening: continuations.Opening,
    trajectory: int,
    group: int,
    key: int,
) -> types.Trajectory:
  rng = np.random.default_rng([task.index, trajectory, key])
  steps, height = [], 0
  for index in range(STEPS):
    up = bool(rng.random() < UP)
    if index < len(opening):
      up = opening[index].action == 'up'
    before, height = height, height + up
    solved = index == STEPS - 1 and height >= GOAL
    ids = np.ones(1, np.int32)
    steps.append(
        types.Step(
            group=group,
            trajectory=trajectory,
            step=index,
            prompt_ids=ids,
            response_ids=ids,
            sampler_logprobs=np.zeros(1, np.float32),
            finish_reason=types.STOP,
            action='up' if up else 'stay',
            action_valid=True,
            action_admissible=True,
            observation=f'height {before} at {index}',
            state_key=f'height {before} at {index}',
            next_state_key=f'height {height} at {index + 1}',
            reward=REWARD * solved,
        )
    )
  solved = height >= GOAL
  reason = types.SOLVED if solved else types.FAILED
  return types.Trajectory(
      task, group, trajectory, tuple(steps), solved, float(solved), reason
  )
