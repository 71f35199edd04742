"""When what happens in a run: functions of its spec and an iteration alone."""

from __future__ import annotations

from hgpo_jax import types
from hgpo_jax.experiment import spec as spec_lib
from hgpo_jax.experiment import task_order


def evaluation_due(spec: spec_lib.Experiment, iteration: int) -> bool:
  """Whether the policy is evaluated before an iteration."""
  evaluation = spec.evaluation
  if iteration == 0:
    return evaluation.before_training
  return bool(evaluation.every and iteration % evaluation.every == 0)


def save_due(spec: spec_lib.Experiment, done: int) -> bool:
  """Whether a checkpoint is saved when so many iterations are done."""
  return done == spec.iterations or done % spec.save_every == 0


def lag(spec: spec_lib.Experiment, iteration: int) -> int:
  """Iterations that the policy which plays `iteration` is behind.

  0 behind a checkpoint, whatever `Experiment.rollout_lag` is: nothing is under
  way while one is saved, so a run that goes on from it plays what an
  uninterrupted one does. Evaluations make no difference.
  """
  if save_due(spec, iteration):  # The start of a run counts as one.
    return 0
  return spec.rollout_lag


def tasks(spec: spec_lib.Experiment, iteration: int) -> list[types.Task]:
  """The tasks of an iteration; resampling may add others."""
  return task_order.choose(
      spec.env.split(spec.split),
      spec.tasks_per_iteration,
      spec.seed,
      iteration,
  )


def upcoming(spec: spec_lib.Experiment, played: int) -> list[types.Task]:
  """The tasks that the pool gets first once iteration `played` is played.

  An evaluation comes before the episodes that are played with its policy, and
  behind those that were played ahead.
  """
  following = played + 1
  evaluated = played if lag(spec, played) else following
  if following < spec.iterations and not evaluation_due(spec, evaluated):
    return tasks(spec, following)
  heldout = spec.env.split(spec.evaluation.split)
  count = min(spec.evaluation.games or len(heldout), spec.episodes)
  return [heldout[index] for index in range(count)]
