"""Bindings, and which of them go when a part takes the place of another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
from typing import Any

import gin

# (scope, complete selector, parameter); for a macro (name, 'gin.macro',
# 'value').
Key = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class Binding:
  """A bound value and where it was bound: 'file:line' or the flag."""

  value: Any
  where: str


def references(value: Any) -> set[str]:
  """Full names of the configurables that a bound value refers to."""
  return {
      ref.configurable.selector for ref in gin.config.iterate_references(value)
  }


def drop_replaced(
    bound: dict[Key, Binding],
    replaced: Sequence[tuple[Key, Binding]],
) -> Iterator[tuple[str, int, Binding]]:
  """Removes what was bound of parts that nothing refers to any more.

  So a file that names another estimator can follow one that sets up HGPO.
  Bindings that come after the replacement stay, and are refused later.

  Args:
    bound: the last binding of each key, in the order in which they were made.
    replaced: keys that were bound again, with what they were bound to before.

  Yields:
    (full name of the part, number of its bindings that were removed, the
    binding that replaced the reference to it).
  """
  order = {key: number for number, key in enumerate(bound)}
  gone = [
      (part, key) for key, old in replaced for part in references(old.value)
  ]
  while gone:
    part, by = gone.pop()
    if any(part in references(b.value) for b in bound.values()):
      continue
    keys = [k for k in bound if k[1] == part and order[k] < order[by]]
    for key in keys:
      gone += [(inner, by) for inner in references(bound.pop(key).value)]
    if keys:
      yield part, len(keys), bound[by]
