"""Graphs of states: shortest paths of all tasks at once, on the host."""

from __future__ import annotations

import numpy as np


def distances_to(
    goal_G: np.ndarray, source_E: np.ndarray, target_E: np.ndarray, nodes: int
) -> np.ndarray:
  """Edges on the shortest path from each node to any goal; -1 without one.

  A breadth-first search backwards from all goals together; each edge is
  looked at once, so the cost is that of sorting the edges.

  Args:
    goal_G: node ids of the goals.
    source_E: where each edge starts; edges may repeat.
    target_E: where each edge ends.
    nodes: how many nodes there are.
  """
  order = np.argsort(target_E, kind='stable')
  source_E = source_E[order]
  first = np.searchsorted(target_E[order], np.arange(nodes + 1))
  distance = np.full(nodes, -1)
  frontier, reached = goal_G, 0
  while len(frontier):
    distance[frontier] = reached
    begin, count = first[frontier], first[frontier + 1] - first[frontier]
    offset = np.repeat(begin - np.cumsum(count) + count, count)
    before = np.unique(source_E[offset + np.arange(count.sum())])
    frontier = before[distance[before] < 0]
    reached += 1
  return distance
