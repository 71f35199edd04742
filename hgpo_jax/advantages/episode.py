"""What the group estimators share: checks, scores, the episode-level term."""

from __future__ import annotations

import math

import numpy as np

from hgpo_jax import types
from hgpo_jax.advantages import base
from hgpo_jax.advantages import grouping
from hgpo_jax.advantages import segments

MODES = ('mean_std_norm', 'mean_norm')
VISIT_ORDERS = ('step', 'row')


def check_inputs(inputs: types.AdvantageInputs) -> None:
  """Refuses rewards that are not finite, columns of different lengths."""
  lengths = {
      name: len(getattr(inputs, name))
      for name in inputs.__dataclass_fields__
      if name.endswith('_N') and getattr(inputs, name) is not None
  }
  if len(set(lengths.values())) > 1:
    raise ValueError(f'columns must have one entry a row, got {lengths}')
  for name in ('reward_N', 'outcome_N'):
    wrong = np.flatnonzero(~np.isfinite(getattr(inputs, name)))
    if wrong.size:
      row = wrong[0]
      raise ValueError(
          f'{name} is {getattr(inputs, name)[row]} for group'
          f' {inputs.group_N[row]}, trajectory {inputs.trajectory_N[row]},'
          f' step {inputs.step_N[row]} (row {row}; {wrong.size} such rows):'
          ' expected finite rewards; mark the episode as aborted in the'
          ' environment'
      )


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
  """Refuses a value that is not among the choices."""
  if value not in choices:
    raise ValueError(f'{name} is {value!r}, expected one of {choices}')


def check_range(
    name: str, value: float, low: float, high: float = math.inf
) -> None:
  """Refuses a number outside [low, high], infinities and NaN."""
  if not (math.isfinite(value) and low <= value <= high):
    raise ValueError(
        f'{name} is {value}, expected a finite number in [{low}, {high}]'
    )


def check_score_fields(estimator: base.Estimator) -> None:
  """Refuses values of the fields that GRPO and its kin have in common."""
  name = type(estimator).__name__
  check_range(
      f'{name}.invalid_action_penalty', estimator.invalid_action_penalty, 0.0
  )
  check_choice(f'{name}.visit_order', estimator.visit_order, VISIT_ORDERS)


def penalty(inputs: types.AdvantageInputs, weight: float) -> np.ndarray:
  """What a row loses for an action of the wrong format; not discounted."""
  return np.float32(weight) * ~inputs.valid_N.astype(bool)


def scores(inputs: types.AdvantageInputs, weight: float) -> np.ndarray:
  """s_i = R_i - c (1 - v_i): the outcome, less the row's own `penalty`."""
  return inputs.outcome_N - penalty(inputs, weight)


def step_returns(
    inputs: types.AdvantageInputs, table: grouping.StepTable, gamma: float
) -> np.ndarray:
  """Discounted return of each distinct step [U], before any penalty."""
  return segments.discounted_returns(
      inputs.reward_N[table.row_U], table.trajectory_U, table.step_U, gamma
  )


def return_sizes(
    inputs: types.AdvantageInputs, table: grouping.StepTable, gamma: float
) -> np.ndarray:
  """Discounted sum of |reward| [U]: rounding noise of a return is a share."""
  size_N = np.abs(inputs.reward_N)
  return segments.discounted_returns(
      size_N[table.row_U], table.trajectory_U, table.step_U, gamma
  )


def normalise_scores(
    score_N: np.ndarray,
    group_N: np.ndarray,
    *,
    divide_by_std: bool,
    counted_N: np.ndarray | None = None,
    mean_tolerance: float = segments.SPREAD_TOLERANCE,
    divide_flat: bool = False,
) -> segments.Normalised:
  """The episode-level term: (s - mean) [/ (std + eps)] in the task group.

  std has ddof 1. A group of one row keeps its raw score: there is nothing to
  compare it with, and its score still says whether it did well.
  """
  return segments.normalise(
      score_N,
      grouping.pair_ids(group_N),
      ddof=1,
      divide_by_std=divide_by_std,
      keep_singletons=True,
      counted_N=counted_N,
      mean_tolerance=mean_tolerance,
      divide_flat=divide_flat,
  )


def visit_order(inputs: types.AdvantageInputs, order_by: str) -> np.ndarray:
  """Rows in the order in which definitions that say 'first' see them.

  'step': by step index, ties by the texts of the states before and after (by
  their ids without texts): the order of the rows does not matter. 'row': as
  the rows come.
  """
  if order_by == 'row':
    return np.arange(len(inputs.step_N))
  pair = inputs.state_N, inputs.next_state_N
  rank_S = np.arange(max(int(ids.max(initial=-1)) for ids in pair) + 1)
  if inputs.state_texts:
    by_text = sorted(rank_S, key=lambda state: inputs.state_texts[state])
    rank_S[by_text] = np.arange(len(rank_S))
  before_N, after_N = (rank_S[ids] for ids in pair)
  return np.lexsort((after_N, before_N, inputs.step_N))


def first_rows(
    inputs: types.AdvantageInputs, visit_N: np.ndarray
) -> np.ndarray:
  """bool [N]: the first row visited of each (group, trajectory)."""
  pairs = grouping.pair_ids(inputs.group_N, inputs.trajectory_N)
  _, first = np.unique(pairs[visit_N], return_index=True)
  result = np.zeros(len(pairs), bool)
  result[visit_N[first]] = True
  return result


def counted_rows(
    inputs: types.AdvantageInputs, over_steps: bool, order_by: str
) -> np.ndarray | None:
  """Rows that enter a task's mean and std: all (None), or each first row."""
  if over_steps:
    return None
  return first_rows(inputs, visit_order(inputs, order_by))
