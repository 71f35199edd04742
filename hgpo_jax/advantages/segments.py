"""Segment reductions over groups of rows, jitted, at bucketed shapes.

A group (segment) is named by an integer id on each of its rows. Statistics
are float32-safe: rows are sorted by (group, value) first, and the mean is
taken off in float64. Identical values therefore give exactly 0, and the
result does not depend on the order of the rows or on how groups are numbered.

A group is *degenerate* when max - min <= 1e-6 * scale: its differences are
rounding noise, so every member is exactly 0. The scale is the size of the
numbers that the values were made of, by default max(1, |max|, |min|).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

EPSILON = 1e-6  # Added to the standard deviation before dividing by it.
SPREAD_TOLERANCE = 1e-6
_SMALLEST_BUCKET = 64


@dataclasses.dataclass(frozen=True)
class Normalised:
  """Group-normalised values, and the group each row was compared with.

  Attributes:
    value_N: float32; exactly 0 where a row got no signal.
    segment_N: int, the group id; -1 for rows outside any group.
    size_N: int, rows of the group that entered its statistics; 0 outside.
    degenerate_N: bool, the group has two or more rows, all the same.
    variance_N: float32, of the group with its ddof; 0 where that is undefined.
  """

  value_N: np.ndarray
  segment_N: np.ndarray
  size_N: np.ndarray
  degenerate_N: np.ndarray
  variance_N: np.ndarray


def bucket(size: int) -> int:
  """The next power of two, at least 64: few shapes, few compilations."""
  return max(_SMALLEST_BUCKET, 1 << max(size - 1, 0).bit_length())


def normalise(
    value_N: np.ndarray,
    segment_N: np.ndarray,
    *,
    ddof: int,
    divide_by_std: bool,
    keep_singletons: bool,
    counted_N: np.ndarray | None = None,
    scale_N: np.ndarray | None = None,
    mean_tolerance: float = SPREAD_TOLERANCE,
    divide_flat: bool = False,
) -> Normalised:
  """(x - mean) [/ (std + 1e-6)] of each row within its group.

  Args:
    value_N: what to normalise.
    segment_N: group id of each row, in [0, N); -1 takes no part and gets 0.
    ddof: the variance is the sum of squares over (n - ddof).
    divide_by_std: whether to divide.
    keep_singletons: a group of one keeps its raw value (mean := 0, std := 1)
      if True, else gets 0.
    counted_N: rows that enter the statistics; all by default. Rows left out
      are still normalised. A degenerate sample has no scale to divide by, so
      they only have its mean taken off (std := 1).
    scale_N: size of the numbers each value was made of, whose largest is the
      group's scale in the definition of degenerate; max(1, |value|) by
      default. For values whose small differences count, such as discounted
      returns.
    mean_tolerance: rows this near to the mean, as a share of the spread, are
      exactly 0.
    divide_flat: divide by a degenerate sample's std all the same, that is by
      1e-6, which only rows left out of it show.
  """
  num = len(value_N)
  value_N = np.asarray(value_N, np.float32)
  segment_N = np.asarray(segment_N)
  counted_N = np.ones(num, bool) if counted_N is None else counted_N
  counted_N = counted_N & (segment_N >= 0)
  if scale_N is None:
    scale_N = np.maximum(np.abs(value_N), np.float32(1.0))
  order = np.lexsort((value_N, segment_N))
  columns = value_N[order], segment_N[order], counted_N[order]
  value, size, degenerate, variance = _normalise(
      *(
          _pad(array, fill)
          for array, fill in (
              (columns[0], 0.0),
              (_centred(*columns), 0.0),
              (np.asarray(scale_N, np.float32)[order], 0.0),
              (columns[1].astype(np.int32), -1),
              (columns[2], False),
          )
      ),
      mean_tolerance,
      0.0 if divide_flat else 1.0,
      ddof=ddof,
      divide_by_std=divide_by_std,
      keep_singletons=keep_singletons,
  )
  return Normalised(
      _unsorted(value, order),
      segment_N,
      _unsorted(size, order).astype(int),
      _unsorted(degenerate, order),
      _unsorted(variance, order),
  )


def discounted_returns(
    reward_N: np.ndarray,
    trajectory_N: np.ndarray,
    step_N: np.ndarray,
    gamma: float,
) -> np.ndarray:
  """G_t = r_t + gamma * G_{t+1} along each trajectory, float32.

  Equal trajectories get equal bits, wherever they stand.

  Args:
    reward_N: rewards, one row a step.
    trajectory_N: 0.. dense.
    step_N: 0.. dense in each trajectory.
    gamma: discount a step.
  """
  shape = (
      bucket(int(trajectory_N.max(initial=0)) + 1),
      bucket(int(step_N.max(initial=0)) + 1),
  )
  reward_JT = np.zeros(shape, np.float32)
  reward_JT[trajectory_N, step_N] = reward_N
  return np.asarray(_returns(reward_JT, gamma))[trajectory_N, step_N]


def weighted_mean(value_KN: np.ndarray, weight: np.ndarray) -> np.ndarray:
  """Mean over K of the entries that are not exactly 0; 0 if all are.

  sum_k w_k x_k / (sum_k w_k + 1e-6), both sums over the non-zero entries.

  Args:
    value_KN: what to average.
    weight: of each k, [K], or of each entry, [K, N].
  """
  num = value_KN.shape[1]
  weight_KN = weight if weight.ndim == 2 else weight[:, None]
  weight_KN = np.broadcast_to(weight_KN, value_KN.shape).astype(np.float32)
  pad = lambda array_KN: np.stack([_pad(row_N, 0.0) for row_N in array_KN])
  return np.asarray(_weighted_mean(pad(value_KN), pad(weight_KN)))[:num]


def above_lowest(value_N: np.ndarray, segment_N: np.ndarray) -> np.ndarray:
  """Values less the lowest of their group, in float64.

  Centred statistics stay the same, and float32 keeps small differences.

  Args:
    value_N: float64.
    segment_N: group ids, 0.. dense.
  """
  low_S = np.full(int(segment_N.max(initial=-1)) + 1, np.inf)
  np.minimum.at(low_S, segment_N, value_N)
  return value_N - low_S[segment_N]


def _centred(
    value_N: np.ndarray, segment_N: np.ndarray, counted_N: np.ndarray
) -> np.ndarray:
  """Values less the mean of their group's counted rows; float32.

  Sums of float32 numbers are exact in float64, nearly always: what is on the
  mean is exactly 0, and nothing else is.
  """
  slot_N = np.where(segment_N >= 0, segment_N, 0)
  total_S = np.bincount(slot_N, counted_N * value_N.astype(np.float64))
  mean_S = total_S / np.maximum(np.bincount(slot_N, counted_N), 1.0)
  return (value_N - mean_S[slot_N]).astype(np.float32)


def _unsorted(sorted_: jax.Array, order: np.ndarray) -> np.ndarray:
  """Padded results of the rows `order`, back at the rows; padding is gone."""
  result = np.empty(len(order), sorted_.dtype)
  result[order] = np.asarray(sorted_)[: len(order)]
  return result


def _pad(array: np.ndarray, fill: float) -> np.ndarray:
  extra = bucket(len(array)) - len(array)
  return np.pad(array, (0, extra), constant_values=fill)


@functools.partial(
    jax.jit, static_argnames=('ddof', 'divide_by_std', 'keep_singletons')
)
def _normalise(
    value_N: jax.Array,
    centred_N: jax.Array,
    scale_N: jax.Array,
    segment_N: jax.Array,
    counted_N: jax.Array,
    mean_tolerance: jax.Array,
    flat_std: jax.Array,
    *,
    ddof: int,
    divide_by_std: bool,
    keep_singletons: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """`normalise` on padded arrays; a group id is its slot, -1 has none."""
  num = value_N.shape[0]
  present_N = segment_N >= 0
  slot_N = jnp.where(present_N, segment_N, 0)

  def reduce(kernel, x_N, neutral):
    x_N = jnp.where(counted_N, x_N, neutral)
    return kernel(x_N, slot_N, num_segments=num)[slot_N]

  def total(x_N):
    return reduce(jax.ops.segment_sum, x_N, 0.0)

  size_N = total(jnp.ones_like(value_N)) * present_N
  low_N = reduce(jax.ops.segment_min, value_N, jnp.inf)
  high_N = reduce(jax.ops.segment_max, value_N, -jnp.inf)
  noise_N = SPREAD_TOLERANCE * reduce(jax.ops.segment_max, scale_N, 0.0)
  spread_N = high_N - low_N
  flat_N = spread_N <= noise_N
  near_N = jnp.where(flat_N, noise_N, mean_tolerance * spread_N)
  centred_N = jnp.where(abs(centred_N) <= near_N, 0.0, centred_N)
  variance_N = total(centred_N**2) / jnp.maximum(size_N - ddof, 1.0)
  std_N = jnp.where(flat_N, flat_std, jnp.sqrt(variance_N))

  single_N = size_N == 1.0
  alone_N = value_N if keep_singletons else jnp.zeros_like(value_N)
  result_N = jnp.where(single_N, alone_N, centred_N)
  if divide_by_std:
    result_N /= jnp.where(single_N, 1.0, std_N) + EPSILON
  result_N = jnp.where(present_N & (size_N > 0.0), result_N, 0.0)
  variance_N = jnp.where(present_N & (size_N > ddof), variance_N, 0.0)
  return result_N, size_N, flat_N & (size_N > 1.0), variance_N


@jax.jit
def _returns(reward_JT: jax.Array, gamma: jax.Array) -> jax.Array:
  """Returns of trajectories padded with zero rewards on the right."""

  def back(later_J, reward_J):
    return_J = reward_J + gamma * later_J
    return return_J, return_J

  start_J = jnp.zeros(reward_JT.shape[0], jnp.float32)
  _, return_TJ = jax.lax.scan(back, start_J, reward_JT.T, reverse=True)
  return return_TJ.T


@jax.jit
def _weighted_mean(value_KN: jax.Array, weight_KN: jax.Array) -> jax.Array:
  weight_KN = weight_KN * (value_KN != 0.0)
  return (weight_KN * value_KN).sum(0) / (weight_KN.sum(0) + EPSILON)
