"""Bindings that a benchmark would override, or never read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def refuse(bindings: Sequence[str], instead: Mapping[str, str]) -> None:
  """Refuses bindings of what the benchmark sets itself.

  Args:
    bindings: lines such as 'Experiment.seed = 1'.
    instead: what to do, by 'Part.field' or, for all fields, by 'Part'.

  Raises:
    ValueError: naming the first such binding.
  """
  for binding in bindings:
    part, _, field = binding.partition('=')[0].strip().rpartition('.')
    part = part.rsplit('/')[-1].rsplit('.')[-1]  # No scope, no module.
    for name in (f'{part}.{field}', part):
      if name in instead:
        raise ValueError(
            f'--gin_bindings {binding!r}: {name} is not taken from there;'
            f' {instead[name]}'
        )
