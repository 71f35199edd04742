"""Episodes made by hand: two tasks, some states met again, one success each."""

from __future__ import annotations

import numpy as np

from hgpo_jax import types

# A text that would end the page's element of data, were it not escaped.
NASTY = 'You see </script><b>a mug</b> & a "cup".'


def episode(
    group: int,
    trajectory: int,
    path: list[str],
    success: bool,
    end_reason: str = '',
) -> types.Trajectory:
  """States in order, the last being where the last step led."""
  task = types.Task('train', group, f'game/{group}', group, 'pick_and_place')
  ids = np.zeros(1, np.int32)
  steps = tuple(
      types.Step(
          group=group,
          trajectory=trajectory,
          step=index,
          prompt_ids=ids,
          response_ids=ids,
          sampler_logprobs=ids.astype(np.float32),
          finish_reason=types.STOP,
          action=f'go to {after}',
          action_valid=after != 'nowhere',
          action_admissible=after not in ('nowhere', 'hall'),
          observation=before,
          state_key=before,
          next_state_key=after,
          reward=10.0 if success and index == len(path) - 2 else 0.0,
      )
      for index, (before, after) in enumerate(zip(path, path[1:]))
  )
  end_reason = end_reason or (types.SOLVED if success else types.MAX_STEPS)
  return types.Trajectory(
      task, group, trajectory, steps, success, float(success), end_reason
  )


def two_tasks() -> list[types.Trajectory]:
  """Seven episodes, 17 steps in the six that were not aborted."""
  return [
      episode(0, 0, ['room', 'shelf', 'sink', 'end'], True),
      episode(0, 1, ['room', 'sink', 'room', 'shelf', 'end'], False),
      episode(0, 2, ['room', 'shelf', 'nowhere'], False),
      episode(3, 7, [NASTY, 'desk', 'lamp'], True),
      episode(3, 8, [NASTY, 'hall', 'desk', 'lamp'], False),
      episode(3, 9, [NASTY, 'bed', NASTY, 'desk'], False),
      episode(3, 6, [NASTY, 'bed'], False, types.ENV_ERROR),
  ]
