"""True advantages by brute force, and what estimators make of groups."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import math

import numpy as np

from hgpo_jax import types
from hgpo_jax.advantages import base
from hgpo_jax.batch import advantage_inputs
from hgpo_jax.credit import probes as probes_lib


@dataclasses.dataclass(frozen=True)
class Truth:
  """A(s, a) = Q(s, a) - V(s) of each of P probes, by mean outcomes.

  Q and V are of the undiscounted outcome. Continuations are dealt into two
  halves, h = 0 and 1. Groups made of one half are held against the other, so
  that no noise is on both sides.

  Attributes:
    other_HP: Q of the half 1 - h, less V of all: what estimates from half h
      are compared with.
    error_HP: its standard error.
    half_HP: Q less V of the half h alone: two independent measurements.
  """

  other_HP: np.ndarray
  error_HP: np.ndarray
  half_HP: np.ndarray

  @property
  def mean_P(self) -> np.ndarray:
    """From all continuations."""
    return self.other_HP.mean(0)

  @property
  def noise(self) -> float:
    """Share of the mean of A^2 that is chance: the bias of the exact A.

    NaN where every measured A is 0.
    """
    square = (self.mean_P**2).mean()
    # The mean of two measurements has a quarter of their squared difference.
    noise = 0.25 * (np.diff(self.half_HP, axis=0) ** 2).mean()
    return share(noise, square)


def share(error: float, square: float) -> float:
  """Of the mean square of the true advantages; NaN where that is 0."""
  return float(error / square) if square > 0.0 else math.nan


def measure(sample: probes_lib.Sample) -> Truth:
  """The truth about the probes of `sample`, in units of reward."""
  after_PM, before_PM = _outcomes(sample.after), _outcomes(sample.before)
  value_P, value_error_P = _mean(before_PM)
  other, errors, halves = [], [], []
  for half in (0, 1):
    mine_P, _ = _mean(after_PM[:, half::2])
    other_P, other_error_P = _mean(after_PM[:, 1 - half :: 2])
    other.append(other_P - value_P)
    errors.append(np.hypot(other_error_P, value_error_P))
    halves.append(mine_P - _mean(before_PM[:, half::2])[0])
  return Truth(np.stack(other), np.stack(errors), np.stack(halves))


def _outcomes(
    episodes: Sequence[Sequence[types.Trajectory]],
) -> np.ndarray:
  return np.array([[t.outcome for t in some] for some in episodes])


def _mean(outcome_PM: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Mean and its standard error.

  Outcomes that are all the same have no spread to go by; one more, as far
  away as outcomes are from each other anywhere, keeps the error above 0.
  """
  size = outcome_PM.shape[1]
  span = np.ptp(outcome_PM) if outcome_PM.size else 0.0
  variance_P = outcome_PM.var(1, ddof=1) + (span / (size + 1)) ** 2 / size
  return outcome_PM.mean(1), np.sqrt(variance_P / size)


class Groups:
  """Groups around each probe, made again and again from the same episodes.

  The group of a probe has one episode through the probe, from `after`, and
  the rest from the task's pool, as if the policy had played it.
  """

  def __init__(self, sample: probes_lib.Sample):
    pool = [t for some in sample.pool for t in some]
    after = [t for some in sample.after for t in some]
    renumbered = [_renumber(t, i) for i, t in enumerate(pool + after)]
    self._inputs, _ = advantage_inputs.build(renumbered)
    self._length_J = np.array([len(t.steps) for t in renumbered])
    self._first_J = np.cumsum(self._length_J) - self._length_J
    self._sample = sample
    self._pool_size = len(sample.pool[0])
    self._after = len(pool)

  def batch(
      self, size: int, half: int, rng: np.random.Generator
  ) -> tuple[types.AdvantageInputs, np.ndarray]:
    """One group a probe, as one batch; and the row of each probe.

    Raises:
      ValueError: the pool has too few episodes for groups of `size`.
    """
    if self._pool_size < size - 1:
      raise ValueError(
          f'groups of {size} need a pool of at least {size - 1} episodes a'
          f' task, got {self._pool_size}; raise --pool'
      )
    members, probes = [], self._sample.probes
    for place, probe in enumerate(probes):
      through = len(self._sample.after[place])
      chosen = half + 2 * rng.integers(through // 2)
      members.append(self._after + place * through + chosen)
      free = rng.choice(self._pool_size, size - 1, replace=False)
      members += (probe.task * self._pool_size + free).tolist()
    member_J = np.array(members)
    length_J = self._length_J[member_J]
    first_J = np.cumsum(length_J) - length_J
    row_N = np.repeat(self._first_J[member_J] - first_J, length_J)
    row_N += np.arange(length_J.sum())
    episode_N = np.repeat(np.arange(len(member_J)), length_J)
    probe_P = first_J[::size] + [len(probe.opening) for probe in probes]
    return self._take(row_N, episode_N, size), probe_P

  def _take(
      self, row_N: np.ndarray, episode_N: np.ndarray, size: int
  ) -> types.AdvantageInputs:
    columns = {
        field.name: getattr(self._inputs, field.name)[row_N]
        for field in dataclasses.fields(self._inputs)
        if field.name.endswith('_N')
    }
    columns['trajectory_N'] = episode_N.astype(np.int32)
    columns['group_N'] = (episode_N // size).astype(np.int32)
    return dataclasses.replace(self._inputs, **columns)


def estimates(
    sample: probes_lib.Sample,
    estimators: dict[str, base.Estimator],
    size: int,
    replicates: int,
    seed: int,
) -> dict[str, np.ndarray]:
  """What each estimator gives each probe, [replicates, P] by name.

  Replicate r takes its episodes through the probes from half r % 2. All
  estimators see the same groups.
  """
  groups = Groups(sample)
  rng = np.random.default_rng([seed, size])
  found = {name: [] for name in estimators}
  for replicate in range(replicates):
    inputs, row_P = groups.batch(size, replicate % 2, rng)
    for name, estimator in estimators.items():
      found[name].append(base.estimate(estimator, inputs)[0][row_P])
  return {name: np.stack(rows) for name, rows in found.items()}


def _renumber(trajectory: types.Trajectory, place: int) -> types.Trajectory:
  steps = tuple(
      dataclasses.replace(step, group=0, trajectory=place)
      for step in trajectory.steps
  )
  return dataclasses.replace(trajectory, group=0, trajectory=place, steps=steps)
