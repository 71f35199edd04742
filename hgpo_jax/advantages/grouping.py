"""Which steps are compared with which: ids for groups, on the host.

Every id is an integer made from pairs of integers, so no tuple of texts is
ever built or hashed; the cost is a few sorts of N integers.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import difflib

import numpy as np

from hgpo_jax import types

# States of a history that are told apart; a level each, whatever is played.
LONGEST_HISTORY = 256
_LARGEST = np.iinfo(np.int64).max
_TABLE_SHARE = 16  # Entries of a table of codes, for each code looked up.


@dataclasses.dataclass(frozen=True)
class StepTable:
  """The distinct steps behind the rows, sorted (group, trajectory, step).

  The same step may stand in several rows; here it stands once.

  Attributes:
    row_U: a row that holds each distinct step.
    inverse_N: the distinct step of each row.
    trajectory_U: the trajectory, numbered 0.. in that order.
    step_U: 0-based index in the trajectory.
  """

  row_U: np.ndarray
  inverse_N: np.ndarray
  trajectory_U: np.ndarray
  step_U: np.ndarray


def index_steps(inputs: types.AdvantageInputs) -> StepTable:
  """Finds the distinct steps, whatever the order of the rows.

  Raises:
    ValueError: two rows of one step differ, or a trajectory lacks a step.
      Either would corrupt returns and histories without a sign.
  """
  keys = (inputs.step_N, inputs.trajectory_N, inputs.group_N)
  order = np.lexsort(keys)
  sorted_keys = np.stack([key[order] for key in keys])
  fresh = np.ones(len(order), bool)
  fresh[1:] = (np.diff(sorted_keys, axis=1) != 0).any(0)
  row_U = order[fresh]
  inverse_N = np.empty(len(order), int)
  inverse_N[order] = np.cumsum(fresh) - 1
  _check_copies(inputs, row_U[inverse_N])
  step_U = inputs.step_N[row_U]
  opens_U = np.ones(len(row_U), bool)
  opens_U[1:] = (np.diff(sorted_keys[1:, fresh], axis=1) != 0).any(0)
  _check_complete(inputs, row_U, step_U, opens_U)
  return StepTable(row_U, inverse_N, np.cumsum(opens_U) - 1, step_U)


def pair_ids(*ids: np.ndarray) -> np.ndarray:
  """Ids in [0, N) of the tuples across arrays; -1 anywhere gives -1.

  Numbered in the order of the tuples, and dense where no entry is absent.
  """
  absent = np.zeros(len(ids[0]), bool)
  for column in ids:
    absent |= column < 0
  result = np.where(absent, 0, ids[0]).astype(np.int64)
  for other in ids[1:]:
    width = int(other.max(initial=0)) + 1
    if int(result.max(initial=0)) >= _LARGEST // width:
      result = _dense(result)
    result = result * width + np.where(absent, 0, other)
  return np.where(absent, -1, _dense(result))


def _dense(code_N: np.ndarray) -> np.ndarray:
  """The rank of each code among the distinct ones."""
  size = int(code_N.max(initial=-1)) + 1
  if size > _TABLE_SHARE * len(code_N):
    return np.unique(code_N, return_inverse=True)[1]
  met = np.zeros(size, bool)  # A table takes no sort.
  met[code_N] = True
  return (np.cumsum(met) - 1)[code_N]


def history_ids(
    group_U: np.ndarray, state_U: np.ndarray, step_U: np.ndarray, levels: int
) -> list[np.ndarray]:
  """Ids of the keys (group, last k states) for k = 1..levels.

  key_k(t) is the pair (key_{k-1}(t - 1), state_t), so a level costs one sort.
  Steps with fewer than k - 1 predecessors have no key: -1.

  Args:
    group_U: group of each distinct step, sorted as in `StepTable`.
    state_U: state before acting.
    step_U: 0-based index in the trajectory.
    levels: how many levels to make.
  """
  result = [pair_ids(group_U, state_U)]
  while len(result) < levels:
    shorter_U = np.full_like(result[-1], -1)
    shorter_U[1:] = result[-1][:-1]
    shorter_U[step_U < len(result)] = -1
    result.append(pair_ids(shorter_U, state_U))
  return result


def prefix_ids(
    group_U: np.ndarray,
    state_U: np.ndarray,
    action_U: np.ndarray | None,
    step_U: np.ndarray,
) -> np.ndarray:
  """Ids of the keys (group, first state, first action, ..., state).

  The key of step t is the pair (key of step t - 1, (action_{t-1}, state_t)).
  Each step takes part in one sort, that of the steps with its index.

  Args:
    group_U: group of each distinct step, sorted as in `StepTable`.
    state_U: state before acting.
    action_U: the action taken; None for keys of states alone.
    step_U: 0-based index in the trajectory.
  """
  result_U = np.zeros(len(step_U), int)
  if not len(step_U):
    return result_U
  link_U = pair_ids(state_U)
  if action_U is not None:
    link_U = pair_ids(np.roll(action_U, 1) * (step_U > 0), state_U)
  order = np.argsort(step_U, kind='stable')
  starts = np.searchsorted(step_U[order], np.arange(1, step_U.max() + 1))
  used = 0
  for row_L in np.split(order, starts):
    shorter_L = group_U[row_L] if used == 0 else result_U[row_L - 1]
    ids_L = pair_ids(shorter_L, link_U[row_L])
    result_U[row_L] = used + ids_L
    used += int(ids_L.max()) + 1
  return result_U


def similar_states(
    group_N: np.ndarray,
    state_N: np.ndarray,
    visit_N: np.ndarray,
    texts: Sequence[str],
    threshold: float,
) -> np.ndarray:
  """Replaces each state by the first similar state of its group.

  States of a group are visited in a fixed order; each joins the first
  cluster whose opening text matches it with `SequenceMatcher.ratio()` at
  least `threshold`, or opens a cluster. Equal texts always share a cluster.

  Args:
    group_N: group ids.
    state_N: state ids, indices into `texts`.
    visit_N: the order in which rows are visited, a permutation of rows.
    texts: text of each state id.
    threshold: smallest ratio to join, in (0, 1].

  Returns:
    The state id of the text that opened the cluster, for each row.
  """
  if len(texts) <= int(state_N.max(initial=-1)):
    raise ValueError(
        f'got {len(texts)} state texts for state ids up to'
        f' {int(state_N.max(initial=-1))}, expected one text a state: fill'
        ' `state_texts`, or set enable_similarity = False'
    )
  leaders: dict[int, list[tuple[int, difflib.SequenceMatcher]]] = {}
  joined: dict[tuple[int, int], int] = {}
  for row in visit_N:
    key = int(group_N[row]), int(state_N[row])
    if key not in joined:
      clusters = leaders.setdefault(key[0], [])
      joined[key] = _join(clusters, key[1], texts[key[1]], threshold)
  pairs = zip(group_N.tolist(), state_N.tolist())
  return np.fromiter((joined[pair] for pair in pairs), int, len(state_N))


def _join(
    clusters: list[tuple[int, difflib.SequenceMatcher]],
    state: int,
    text: str,
    threshold: float,
) -> int:
  """The first cluster that takes the text; a new one if none does."""
  for leader, matcher in clusters:
    matcher.set_seq1(text)
    # The two quick ratios bound the ratio from above, and cost less.
    if (
        matcher.real_quick_ratio() >= threshold
        and matcher.quick_ratio() >= threshold
        and matcher.ratio() >= threshold
    ):
      return leader
  clusters.append((state, difflib.SequenceMatcher(None, '', text)))
  return state


def _check_copies(inputs: types.AdvantageInputs, source_N: np.ndarray) -> None:
  for name in ('reward_N', 'outcome_N', 'state_N', 'valid_N'):
    column = getattr(inputs, name)
    wrong = np.flatnonzero(column != column[source_N])
    if wrong.size:
      row = wrong[0]
      raise ValueError(
          f'rows {source_N[row]} and {row} are both step'
          f' {inputs.step_N[row]} of trajectory {inputs.trajectory_N[row]} of'
          f' group {inputs.group_N[row]}, but {name} is'
          f' {column[source_N[row]]} and {column[row]}: expected copies of'
          ' one step to be equal; give each episode its own trajectory id'
      )


def _check_complete(
    inputs: types.AdvantageInputs,
    row_U: np.ndarray,
    step_U: np.ndarray,
    opens_U: np.ndarray,
) -> None:
  index_U = np.arange(len(row_U))
  start_U = np.maximum.accumulate(np.where(opens_U, index_U, 0))
  wrong = np.flatnonzero(step_U != index_U - start_U)
  if wrong.size:
    row = row_U[wrong[0]]
    raise ValueError(
        f'trajectory {inputs.trajectory_N[row]} of group'
        f' {inputs.group_N[row]} has step {inputs.step_N[row]} where step'
        f' {int((index_U - start_U)[wrong[0]])} was expected: returns and'
        ' histories need every step from 0; compute advantages before any'
        ' row is dropped'
    )
