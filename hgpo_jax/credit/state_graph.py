"""The states of one task as a graph that can be drawn: G2PO's view of it."""

from __future__ import annotations

import collections
from collections.abc import Mapping
import dataclasses

import numpy as np

from hgpo_jax import types
from hgpo_jax.advantages import g2po
from hgpo_jax.advantages import grouping

# Nodes for how episodes end; states have their ids.
SOLVED, UNSOLVED = -1, -2
_SWEEPS = 8


@dataclasses.dataclass(frozen=True)
class Node:
  """A state that some step started from, or an end.

  Attributes:
    state: id of the state, or `SOLVED` or `UNSOLVED`.
    value: G2PO's V, in units of reward.
    visits: steps that start here; for an end, episodes that came to it.
    episodes: different episodes among them.
    solved: share of these that solved the task.
    label: the action that most often led here; 'start' where episodes begin.
    column: fewest steps after which an episode was here.
    row: place in the column, may be fractional; columns are centred on 0.
  """

  state: int
  value: float
  visits: int
  episodes: int
  solved: float
  label: str
  column: int
  row: float


@dataclasses.dataclass(frozen=True)
class Edge:
  """What was done between two nodes.

  Attributes:
    source: index of the node.
    target: index of the node.
    rows: the rows of the steps, by index in the inputs.
    credit: mean of each of G2PO's terms over them, by name.
  """

  source: int
  target: int
  rows: tuple[int, ...]
  credit: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Graph:
  """Nodes by column and row, and the edges between them."""

  nodes: tuple[Node, ...]
  edges: tuple[Edge, ...]


def build(
    inputs: types.AdvantageInputs,
    group: int,
    actions: list[str],
    credit: Mapping[str, np.ndarray],
    estimator: g2po.G2PO,
) -> Graph:
  """The graph of the task `group`.

  Args:
    inputs: rows in order, from `levels.in_order`.
    group: the task, as in `inputs.group_N`.
    actions: text of the action of each row.
    credit: values [N] to average over edges, by name.
    estimator: whose node values are shown.
  """
  value_N = estimator.node_values(inputs, grouping.index_steps(inputs))
  row_M = np.flatnonzero(inputs.group_N == group)
  source_M = inputs.state_N[row_M]
  last_M = np.append(np.diff(inputs.trajectory_N[row_M]) != 0, True)
  end_M = np.where(inputs.success_N[row_M], SOLVED, UNSOLVED)
  target_M = np.where(last_M, end_M, np.roll(source_M, -1))
  places = _places(inputs, row_M, source_M, target_M, last_M)
  nodes = [
      _node(inputs, actions, state, row_M, source_M, target_M)
      for state in places
  ]
  values = {SOLVED: estimator.success_value, UNSOLVED: 0.0}
  values |= dict(zip(source_M.tolist(), value_N[row_M].tolist()))
  placed = tuple(
      dataclasses.replace(
          node, value=values[node.state], column=column, row=row
      )
      for node, (column, row) in zip(nodes, places.values())
  )
  index = {node.state: i for i, node in enumerate(placed)}
  rows = collections.defaultdict(list)
  for row, source, target in zip(row_M, source_M, target_M):
    rows[index[int(source)], index[int(target)]].append(int(row))
  edges = tuple(
      Edge(
          *pair,
          tuple(found),
          {name: float(x_N[found].mean()) for name, x_N in credit.items()},
      )
      for pair, found in sorted(rows.items())
  )
  return Graph(placed, edges)


def _node(
    inputs: types.AdvantageInputs,
    actions: list[str],
    state: int,
    row_M: np.ndarray,
    source_M: np.ndarray,
    target_M: np.ndarray,
) -> Node:
  """A node without its value and place."""
  here = row_M[(target_M if state < 0 else source_M) == state]
  _, first = np.unique(inputs.trajectory_N[here], return_index=True)
  leading = collections.Counter(actions[r] for r in row_M[target_M == state])
  label = leading.most_common(1)[0][0] if leading else ''
  if state < 0:
    label = 'solved' if state == SOLVED else 'not solved'
  elif (inputs.step_N[here] == 0).any():
    label = 'start'
  return Node(
      state=state,
      value=0.0,
      visits=len(here),
      episodes=len(first),
      solved=float(inputs.success_N[here[first]].mean()),
      label=label,
      column=0,
      row=0.0,
  )


def _places(
    inputs: types.AdvantageInputs,
    row_M: np.ndarray,
    source_M: np.ndarray,
    target_M: np.ndarray,
    last_M: np.ndarray,
) -> dict[int, tuple[int, float]]:
  """(column, row) of each node; rows in the order of their neighbours' mean.

  The barycentre heuristic (Sugiyama et al. 1981): sweeps over the columns put
  each node where its neighbours are on average.
  """
  column: dict[int, int] = {}
  for state, step in zip(source_M.tolist(), inputs.step_N[row_M].tolist()):
    column[state] = min(step, column.get(state, step))
  end = max(column.values()) + 1
  column |= {int(state): end for state in np.unique(target_M[last_M])}
  near = collections.defaultdict(list)
  for source, target in zip(source_M.tolist(), target_M.tolist()):
    near[source].append(target)
    near[target].append(source)
  stacks = [
      sorted((s for s in column if column[s] == c), reverse=True)
      for c in range(end + 1)
  ]
  row: dict[int, float] = {}
  for stack in stacks:
    row |= _centred(stack)
  for _ in range(_SWEEPS):
    for stack in stacks:
      goal = {s: float(np.mean([row[n] for n in near[s]])) for s in stack}
      stack.sort(key=goal.get)
      row |= _centred(stack)
  return {s: (column[s], row[s]) for stack in stacks for s in stack}


def _centred(stack: list[int]) -> dict[int, float]:
  middle = 0.5 * (len(stack) - 1)
  return {state: place - middle for place, state in enumerate(stack)}
