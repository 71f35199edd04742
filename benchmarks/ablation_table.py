"""The table of the ablation: what finished trainings measured, and pairs."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math
import pathlib

import numpy as np

from benchmarks import quickstart
from hgpo_jax.io import metrics


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What a finished training measured; shares, not percent.

  Attributes:
    before: held-out success before the first iteration; nan where that was not
      evaluated.
    after: held-out success after the last.
    training: mean success of the episodes trained on, all iterations alike.
    failed: share of groups without a success, in the first iteration; nan if
      the estimator does not report it.
    updates: optimizer updates in all.
    minutes: of play, learning and evaluation.
  """

  before: float
  after: float
  training: float
  failed: float
  updates: float
  minutes: float


# What the table calls a method -> seed -> its training.
Methods = Mapping[str, Mapping[int, Outcome]]


def read(run_dir: pathlib.Path) -> Outcome:
  """What a finished training measured."""
  lines = metrics.read(run_dir)
  played = [line for line in lines if 'rollout/success_rate' in line]
  return Outcome(
      before=lines[0].get('eval/success_rate', math.nan),
      after=lines[-1]['eval/success_rate'],
      training=float(np.mean([x['rollout/success_rate'] for x in played])),
      failed=played[0].get('advantage/frac_failed_groups', math.nan),
      updates=sum(x['update/count'] for x in played),
      minutes=quickstart.minutes(lines),
  )


def table(found: Methods, baseline: str) -> str:
  """The Markdown table of a setting: a row a method, in the order of `found`."""
  lines = [
      '| estimator | seeds | held-out success before, % | after, % | sd over'
      f' seeds | minus {baseline}, points (95 %) | success in training, % |'
      f' minus {baseline}, points (95 %) | groups failed at first, % | updates |'
      ' minutes |',
      '|' + '---|' * 11,
  ]
  theirs = found.get(baseline, {})
  for name, mine in found.items():
    cells = _cells(mine, {} if name == baseline else theirs)
    shown = name.replace('|', '&#124;')  # It may be the name of a file.
    lines.append(f'| {shown} | ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines)


def _cells(
    mine: Mapping[int, Outcome], theirs: Mapping[int, Outcome]
) -> list[str]:
  values = {
      field.name: [getattr(outcome, field.name) for outcome in mine.values()]
      for field in dataclasses.fields(Outcome)
  }
  mean = {name: float(np.mean(x)) for name, x in values.items()}
  spread = 100 * np.std(values['after'], ddof=1) if len(mine) > 1 else np.nan
  gap = lambda field: paired(mine, theirs, field)
  return [
      str(len(mine)),
      _percent(mean['before'], 1),
      f'{100 * mean["after"]:.1f}',
      f'{spread:.1f}' if len(mine) > 1 else '',
      gap('after'),
      f'{100 * mean["training"]:.1f}',
      gap('training'),
      _percent(mean['failed'], 0),
      f'{mean["updates"]:.0f}',
      f'{mean["minutes"]:.1f}',
  ]


def _percent(share: float, digits: int) -> str:
  return '' if math.isnan(share) else f'{100 * share:.{digits}f}'


def paired(
    mine: Mapping[int, Outcome], theirs: Mapping[int, Outcome], field: str
) -> str:
  """Mean difference over the seeds that both have, with its t-interval.

  A pair shares the seed, so the tasks, their order and the seed of sampling;
  what differs between seeds is not in the interval.
  """
  both = sorted(set(mine) & set(theirs))
  if not both:
    return ''
  gaps = [
      100 * (getattr(mine[s], field) - getattr(theirs[s], field)) for s in both
  ]
  mean, low, high = quickstart.over_seeds(gaps)
  if len(both) < 2:
    return f'{mean:+.1f}'
  pairs = '' if len(both) == len(mine) else f', {len(both)} pairs'
  return f'{mean:+.1f} ({low:+.1f} to {high:+.1f}{pairs})'
