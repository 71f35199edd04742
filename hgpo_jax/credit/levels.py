"""What an estimator gives each step, level by level, and among how many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from hgpo_jax import types
from hgpo_jax.advantages import base
from hgpo_jax.advantages import covgpo
from hgpo_jax.advantages import metrics
from hgpo_jax.advantages import segments
from hgpo_jax.batch import advantage_inputs


@dataclasses.dataclass(frozen=True)
class Level:
  """One comparison of an estimator.

  Attributes:
    value_N: float32, what the step gets from it, before any weight; 0 where
      it says nothing.
    size_N: int, how many rows the step is compared with, itself among them;
      0 where it takes no part.
    degenerate_N: bool, those rows are all the same.
  """

  value_N: np.ndarray
  size_N: np.ndarray
  degenerate_N: np.ndarray


@dataclasses.dataclass(frozen=True)
class Credit:
  """What an estimator gives each step: float32 [N], and its levels by name."""

  advantage_N: np.ndarray
  levels: Mapping[str, Level]


def in_order(
    trajectories: Sequence[types.Trajectory],
) -> tuple[types.AdvantageInputs, list[types.Step]]:
  """`advantage_inputs.build` with rows sorted by (group, trajectory, step)."""
  order = sorted(trajectories, key=lambda t: (t.group, t.trajectory))
  return advantage_inputs.build(order)


def measure(estimator: base.Estimator, inputs: types.AdvantageInputs) -> Credit:
  """Runs the estimator and keeps what it reports of its levels.

  CovGPO also gets the level 'coverage': what it added to its base.

  Args:
    estimator: any estimator.
    inputs: from `in_order`: levels over distinct steps are rows only then.

  Raises:
    EstimatorError: it returned no advantages.
  """
  with metrics.levels_of() as reported:
    advantage_N, _ = base.estimate(estimator, inputs)
  levels = {name: _rows(found, inputs) for name, found in reported.items()}
  if isinstance(estimator, covgpo.CovGPO):
    base_N, _ = estimator.base(inputs)
    levels['coverage'] = _coverage(advantage_N - base_N, inputs)
  return Credit(advantage_N, levels)


def _rows(found: segments.Normalised, inputs: types.AdvantageInputs) -> Level:
  """A level of rows, or of episodes, as one of rows."""
  place_N = (
      np.arange(len(inputs.step_N))
      if len(found.value_N) == len(inputs.step_N)
      else inputs.trajectory_N
  )
  return Level(
      found.value_N[place_N],
      np.where(found.segment_N >= 0, found.size_N, 0)[place_N],
      found.degenerate_N[place_N],
  )


def _coverage(added_N: np.ndarray, inputs: types.AdvantageInputs) -> Level:
  """The coverage term, compared over the steps of a task where it fired."""
  task_N = inputs.group_N
  fired_N = (np.bincount(task_N, added_N != 0.0) > 0)[task_N]
  size_N = np.where(fired_N, np.bincount(task_N)[task_N], 0)
  return Level(added_N, size_N, np.zeros(len(task_N), bool))
