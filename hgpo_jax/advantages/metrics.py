"""Metrics of estimators: who had peers to be compared with, who got signal.

Names are `advantage/<what>`, and `advantage/<level>_<what>` for one level of
comparison: episode, step, level1, level2, ..., peer, transition; what CovGPO
adds is `advantage/coverage_<what>`.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import contextvars

import numpy as np

from hgpo_jax import types
from hgpo_jax.advantages import grouping
from hgpo_jax.advantages import segments

_tap: contextvars.ContextVar[dict[str, segments.Normalised] | None] = (
    contextvars.ContextVar('tap', default=None)
)


@contextlib.contextmanager
def levels_of() -> Iterator[dict[str, segments.Normalised]]:
  """Collects the levels that estimators report inside the block, by name.

  For looking at what an estimator did, row by row; the first report of a name
  is kept.
  """
  found: dict[str, segments.Normalised] = {}
  token = _tap.set(found)
  try:
    yield found
  finally:
    _tap.reset(token)


def level(name: str, result: segments.Normalised) -> dict[str, float]:
  """Groups of one level.

  groups: how many. mean_group_size, min_group_size, max_group_size: rows a
  group. singleton_share: of the rows with a group, those alone in it.
  frac_zero_std_groups: of the groups with two rows or more, those whose rows
  are all the same. mean_abs: of the values of the rows with a group.
  """
  if (tap := _tap.get()) is not None:
    tap.setdefault(name, result)
  inside_N = (result.segment_N >= 0) & (result.size_N > 0)
  _, row_S = np.unique(result.segment_N[inside_N], return_index=True)
  size_S = result.size_N[inside_N][row_S]
  flat_S = result.degenerate_N[inside_N][row_S]
  values = {
      'groups': float(len(size_S)),
      'mean_group_size': mean(size_S),
      'min_group_size': float(size_S.min()) if len(size_S) else 0.0,
      'max_group_size': float(size_S.max(initial=0)),
      'singleton_share': mean(result.size_N[inside_N] == 1),
      'frac_zero_std_groups': mean(flat_S[size_S > 1]),
      'mean_abs': mean(np.abs(result.value_N[inside_N])),
  }
  return {f'advantage/{name}_{key}': value for key, value in values.items()}


def depths(weight_KN: np.ndarray, members_KN: np.ndarray) -> dict[str, float]:
  """History depths that were fused, and how evenly.

  depth<k>_weight: mean over steps of the depth's share of the weight.
  depth<k>_members: of the steps where the depth took part, the mean number of
  trajectories behind it. weight_entropy: see `weight_entropy`.
  """
  values = {'advantage/weight_entropy': weight_entropy(weight_KN)}
  for k, (weight_N, members_N) in enumerate(zip(weight_KN, members_KN)):
    values[f'advantage/depth{k}_weight'] = mean(weight_N)
    values[f'advantage/depth{k}_members'] = mean(members_N[weight_N > 0.0])
  return values


def weight_entropy(weight_KN: np.ndarray) -> float:
  """Mean entropy, in nats, of each step's weights over levels or depths.

  0 says that every step listens to one level, log K that it weighs all alike.
  Weights need not sum to 1; steps without any weight are left out.
  """
  total_N = weight_KN.sum(0)
  share_KN = weight_KN[:, total_N > 0.0] / total_N[total_N > 0.0]
  log_KN = np.log(np.where(share_KN > 0.0, share_KN, 1.0))
  return mean(-(share_KN * log_KN).sum(0))


def overall(
    inputs: types.AdvantageInputs, advantage_N: np.ndarray
) -> dict[str, float]:
  """The advantages, and the spread of raw outcomes behind them.

  no_signal_share is the share of steps with advantage exactly 0. Outcomes
  count once a trajectory, unpenalised: outcome_std_group is the mean over
  groups of the population std inside a group, outcome_std_batch the std over
  everything (it may be large while every group is degenerate), and
  frac_zero_std_groups the share of groups (two trajectories or more) whose
  outcomes are all the same. frac_failed_groups is the share of groups without
  a success.
  """
  pairs = grouping.pair_ids(inputs.group_N, inputs.trajectory_N)
  _, row_J = np.unique(pairs, return_index=True)
  outcome_J = inputs.outcome_N[row_J].astype(np.float64)
  group_J = grouping.pair_ids(inputs.group_N[row_J])
  result = segments.normalise(
      outcome_J, group_J, ddof=0, divide_by_std=False, keep_singletons=False
  )
  size_S = np.bincount(group_J)
  square_S = np.bincount(group_J, result.value_N.astype(np.float64) ** 2)
  flat_S = np.bincount(group_J, result.degenerate_N) > 0
  return {
      'advantage/mean_abs': mean(np.abs(advantage_N)),
      'advantage/no_signal_share': mean(advantage_N == 0.0),
      'advantage/frac_zero_std_groups': mean(flat_S[size_S > 1]),
      'advantage/frac_failed_groups': mean(
          np.bincount(group_J, inputs.success_N[row_J]) == 0
      ),
      'advantage/outcome_std_group': mean(
          np.sqrt(square_S / np.maximum(size_S, 1))
      ),
      'advantage/outcome_std_batch': (
          float(outcome_J.std()) if len(outcome_J) else 0.0
      ),
  }


def mean(values: np.ndarray) -> float:
  """The mean; 0 of nothing."""
  return float(np.mean(values)) if len(values) else 0.0
