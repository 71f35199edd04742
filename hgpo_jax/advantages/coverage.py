"""How much of its surroundings an episode explored."""

from __future__ import annotations

import dataclasses

import numpy as np

from hgpo_jax import types
from hgpo_jax.advantages import grouping

VISITED = ('trajectory', 'group_timestep')


@dataclasses.dataclass(frozen=True)
class Coverage:
  """What was new, step by step and episode by episode.

  Attributes:
    new_U: 1.0 where the distinct step led to a state not seen before.
    share_J: of each trajectory's steps, the share that did.
    length_J: steps of each trajectory.
  """

  new_U: np.ndarray
  share_J: np.ndarray
  length_J: np.ndarray


def measure(
    inputs: types.AdvantageInputs,
    table: grouping.StepTable,
    group_U: np.ndarray,
    visited: str,
) -> Coverage:
  """Counts the states that are new when a step reaches them.

  Args:
    inputs: the rows; equal state ids are equal texts.
    table: their distinct steps.
    group_U: group of each distinct step.
    visited: 'trajectory', states seen before are those of the step's own
      trajectory, its first one included; 'group_timestep', those that any
      trajectory of the group reached at an earlier step index.
  """
  first_U = table.step_U == 0
  owner_U = table.trajectory_U if visited == 'trajectory' else group_U
  # Initial states are at time 0, the state after step t at time t + 1.
  owner = np.concatenate([owner_U[first_U], owner_U])
  state = np.concatenate(
      [
          inputs.state_N[table.row_U[first_U]],
          inputs.next_state_N[table.row_U],
      ]
  )
  time = np.concatenate([np.zeros(first_U.sum(), int), table.step_U + 1])
  place = grouping.pair_ids(owner, state)
  order = np.lexsort((time, place))
  _, opens = np.unique(place[order], return_index=True)
  earliest = time[order][opens]
  new_U = (time == earliest[place])[first_U.sum() :].astype(np.float64)
  length_J = np.bincount(table.trajectory_U)
  share_J = np.bincount(table.trajectory_U, new_U) / length_J
  return Coverage(new_U, share_J, length_J)


def standardise(
    value_I: np.ndarray,
    group_I: np.ndarray,
    smallest_std: float,
    epsilon: float,
) -> tuple[np.ndarray, np.ndarray]:
  """((x - mean) / (std + epsilon) in the group, std of each group), ddof 0.

  Float64 on the host; exactly 0 where the std is below `smallest_std`.
  """
  size_S = np.bincount(group_I)
  centred_I = value_I - (np.bincount(group_I, value_I) / size_S)[group_I]
  std_S = np.sqrt(np.bincount(group_I, centred_I**2) / size_S)
  scale_S = np.where(std_S >= smallest_std, std_S + epsilon, np.inf)
  return centred_I / scale_S[group_I], std_S


def rank_correlation(x_J: np.ndarray, y_J: np.ndarray) -> float:
  """Spearman's rho, ties at their mean rank; 0 where one is constant."""
  x_J, y_J = _centred_ranks(x_J), _centred_ranks(y_J)
  scale = np.sqrt((x_J**2).sum() * (y_J**2).sum())
  return float((x_J * y_J).sum() / scale) if scale > 0.0 else 0.0


def _centred_ranks(value_J: np.ndarray) -> np.ndarray:
  _, place_J, count = np.unique(
      value_J, return_inverse=True, return_counts=True
  )
  rank = np.cumsum(count) - 0.5 * count
  return rank[place_J] - 0.5 * len(value_J)
