"""How much a state promises: pooled returns, fused over history depths.

Computed in float64 on the host. Differences of potentials are divided by
their spread later, so rounding noise here would be read as credit.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import numpy as np

from hgpo_jax.advantages import grouping


@dataclasses.dataclass(frozen=True)
class Potentials:
  """The fused potential of each step's state, and where it comes from.

  Attributes:
    value_U: expected return, in the unit of the returns.
    variance_U: of that estimate.
    weight_KU: share of depth k in it; 0 where a depth took no part.
    members_KU: trajectories pooled at depth k; 0 where the key is undefined.
    spread_U: variance of the returns of the step's task group.
  """

  value_U: np.ndarray
  variance_U: np.ndarray
  weight_KU: np.ndarray
  members_KU: np.ndarray
  spread_U: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Pool:
  """Steps that share a key: the statistics of their trajectories."""

  mean_U: np.ndarray
  variance_U: np.ndarray
  members_U: np.ndarray
  steps_U: np.ndarray


def fuse(
    return_U: np.ndarray,
    group_U: np.ndarray,
    trajectory_U: np.ndarray,
    keys: Sequence[np.ndarray],
    *,
    shrinkage: float,
    depth_penalty: float,
    variance_floor: float,
) -> Potentials:
  """Potentials from the returns of all steps that share a step's keys.

  At depth k a trajectory counts once, with the mean of its visits; mu is the
  mean of the n trajectories and s2 their sample variance. With s02 the sample
  variance of all returns of the group,

    v_k = ((n - 1) s2 + nu s02) / (n - 1 + nu) / n    (n = 1: v_k = s02)
    w_k ~ 1 / (v_k + beta s02 (K - k) / K + floor)
    potential = sum_k w_k mu_k,  variance = 1 / sum_k 1 / (v_k + floor)

  over the depths that are defined. A depth that pools the same steps as the
  one above it is left out: it says the same thing again.

  Args:
    return_U: return of each distinct step.
    group_U: its task group.
    trajectory_U: its trajectory.
    keys: key ids for k = 0..K, as `grouping.history_ids` makes them.
    shrinkage: nu, pseudo-trajectories that have the group's variance.
    depth_penalty: beta, extra variance of shallow keys.
    variance_floor: keeps the weights finite.
  """
  return_U = np.asarray(return_U, np.float64)
  ones_U = np.ones(len(return_U))
  spread_U = _sample_variance(return_U, grouping.pair_ids(group_U))
  deepest = max(len(keys) - 1, 1)
  precisions, weights, means, members = [], [], [], []
  above_U = np.zeros(len(return_U))
  for k, key_U in enumerate(keys):
    pool = _pool(return_U, trajectory_U, key_U)
    used_U = (pool.members_U > 0) & (pool.steps_U != above_U)
    above_U = pool.steps_U
    variance_U = _shrunk(pool, spread_U, shrinkage)
    penalty_U = depth_penalty * spread_U * (len(keys) - 1 - k) / deepest
    precisions.append(used_U / (variance_U + variance_floor))
    weights.append(used_U / (variance_U + penalty_U + variance_floor))
    means.append(pool.mean_U)
    members.append(pool.members_U)
  weight_KU = np.stack(weights)
  weight_KU /= weight_KU.sum(0)  # Depth 0 is always there.
  return Potentials(
      (weight_KU * np.stack(means)).sum(0),
      ones_U / np.stack(precisions).sum(0),
      weight_KU,
      np.stack(members),
      spread_U,
  )


def _pool(
    return_U: np.ndarray, trajectory_U: np.ndarray, key_U: np.ndarray
) -> _Pool:
  """Statistics of each step's key; 0 for steps without one."""
  inside_U = key_U >= 0
  key_I = grouping.pair_ids(key_U[inside_U])
  pair_I = grouping.pair_ids(key_I, trajectory_U[inside_U])
  visits_J = np.bincount(pair_I)
  mean_J = np.bincount(pair_I, return_U[inside_U]) / visits_J
  key_J = np.zeros(len(visits_J), int)
  key_J[pair_I] = key_I
  members = np.bincount(key_J)
  mean = np.bincount(key_J, mean_J) / members
  square = np.bincount(key_J, (mean_J - mean[key_J]) ** 2)
  variance = square / np.maximum(members - 1, 1)
  result = np.zeros((4, len(return_U)))
  columns = mean, variance, members, np.bincount(key_I)
  result[:, inside_U] = [column[key_I] for column in columns]
  return _Pool(*result)


def _shrunk(pool: _Pool, spread_U: np.ndarray, shrinkage: float) -> np.ndarray:
  """Variance of the mean of a key's trajectories, drawn to the group's."""
  members_U = np.maximum(pool.members_U, 1.0)
  known_U = members_U - 1.0
  total_U = known_U * pool.variance_U + shrinkage * spread_U
  weight_U = np.maximum(known_U + shrinkage, 1e-12)
  return np.where(known_U > 0.0, total_U / weight_U / members_U, spread_U)


def _sample_variance(value_U: np.ndarray, group_U: np.ndarray) -> np.ndarray:
  """Variance (ddof 1) of each entry's group; 0 for a group of one."""
  size_S = np.bincount(group_U)
  mean_S = np.bincount(group_U, value_U) / size_S
  square_S = np.bincount(group_U, (value_U - mean_S[group_U]) ** 2)
  return (square_S / np.maximum(size_S - 1, 1))[group_U]
