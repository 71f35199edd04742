"""Events that environments count in their worker, on their way to the metrics.

An environment calls `add` wherever it runs; the worker sends what was counted
along with its next answer, and the pool's metrics show the sum over workers
as `env/<name>`.
"""

from __future__ import annotations

import collections

_counts: collections.Counter[str] = collections.Counter()


def add(name: str, amount: int = 1) -> None:
  """Counts `amount` more of the event `name` in this process."""
  _counts[name] += amount


def take() -> dict[str, int]:
  """What was counted since the last call."""
  taken = dict(_counts)
  _counts.clear()
  return taken
