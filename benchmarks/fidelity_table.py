"""The tables of the fidelity study: a policy's figures, and differences."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math

from hgpo_jax.credit import fidelity
from hgpo_jax.credit import probes

HEADS = {
    'bias': 'bias²',
    'variance': 'variance',
    'rank': 'rank correlation',
    'sign': 'right sign',
    'cosine': 'gradient cosine',
}


@dataclasses.dataclass(frozen=True)
class Result:
  """What the study found of one policy.

  Attributes:
    success: share of the pool's episodes that succeed.
    probes: number of steps.
    seconds: of play and comparison in the last run.
    noise: see `Truth.noise`.
    comparison: the figures.
  """

  success: float
  probes: int
  seconds: float
  noise: float
  comparison: fidelity.Comparison


def markdown(
    results: Mapping[str, Result],
    design: probes.Design,
    settings: fidelity.Study,
) -> str:
  """The tables, one a policy, with what they were made from."""
  lines = [
      f'{design.tasks} tasks, {design.probes} steps of each,'
      f' {design.continuations} episodes from before and from after each step,'
      f' groups made {settings.replicates} times from {design.pool} free'
      ' episodes a task. 95 % intervals: bootstrap over tasks.'
  ]
  for name, result in results.items():
    lines += [
        '',
        f'## {name}',
        '',
        f'Success {100 * result.success:.0f} %,'
        f' {result.probes} steps, {result.seconds / 60:.0f} minutes.'
        f' {_noise(result.noise)}',
        '',
        *_table(result.comparison.figures, ''),
    ]
    if result.comparison.gaps:
      lines += [
          '',
          f'### {name}, minus {settings.baseline} in the same groups',
          '',
          *_table(result.comparison.gaps, '+'),
      ]
  return '\n'.join(lines) + '\n'


def _noise(noise: float) -> str:
  if math.isnan(noise):
    return 'All measured advantages are 0: there is nothing to compare with.'
  return (
      f'The exact advantages would have a bias² of {noise:.2f}: the chance in'
      ' measuring them.'
  )


def _table(table: fidelity.Table, sign: str) -> list[str]:
  """Lines of Markdown; `sign` is '+' for numbers that are differences."""
  lines = [
      '| estimator | group | ' + ' | '.join(HEADS.values()) + ' |',
      '|---|---|' + '---|' * len(HEADS),
  ]
  for estimator, sizes in table.items():
    for size, row in sizes.items():
      cells = ' | '.join(
          ''
          if not size and key in ('bias', 'variance')
          else _cell(row[key], sign)
          for key in HEADS
      )
      shown = estimator.replace('|', '&#124;')  # It may be the name of a file.
      lines.append(f'| {shown} | {size or ""} | {cells} |')
  return lines


def _cell(found: fidelity.Interval, sign: str) -> str:
  if math.isnan(found.value):
    return '–'
  value, low, high = (
      f'{number:{sign}.2f}' for number in (found.value, found.low, found.high)
  )
  return f'{value} ({low} to {high})'
