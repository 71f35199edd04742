"""Evaluation: every game of a split exactly once a seed, with an interval.

Published numbers of the GiGPO family come from drawing 128 games with
replacement instead; `Evaluation.draws` does the same for comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import json
import math
import os
import pathlib
import statistics

import numpy as np

from hgpo_jax import types
from hgpo_jax import whole_file
from hgpo_jax.envs import base as envs
from hgpo_jax.experiment import spec as spec_lib
from hgpo_jax.models import base as models
from hgpo_jax.rollout import collector as collector_lib
from hgpo_jax.rollout import metrics as rollout_metrics

_Z95 = 1.959963984540054


@dataclasses.dataclass(frozen=True)
class Rate:
  """A success rate over `games` games, with its 95 % Wilson interval."""

  games: int
  mean: float
  low: float
  high: float


@dataclasses.dataclass(frozen=True)
class Result:
  """What an evaluation found.

  Attributes:
    split: the split enumerated.
    temperature: of sampling.
    seeds: sampling seeds; each played every game once, or its own draws.
    overall: over all games.
    by_kind: by task kind.
    by_seed: success rate of each seed.
    steps: mean steps of an episode.
    invalid: share of responses without the required format.
    inadmissible: share of actions that were not admissible; a response
      without the required format is nearly always one of these too.
    aborted: share of episodes that the environment broke off; they count as
      not solved.
    spread: standard deviation of the seeds' success rates (ddof 1); 0 with
      one seed.
    draws: games that each seed drew with replacement; 0 if it played every
      game once.
  """

  split: str
  temperature: float
  seeds: tuple[int, ...]
  overall: Rate
  by_kind: Mapping[str, Rate]
  by_seed: Mapping[str, float]
  steps: float
  invalid: float
  inadmissible: float
  aborted: float
  spread: float = 0.0
  draws: int = 0

  def metrics(self) -> types.Metrics:
    """Flat metrics under 'eval/'."""
    named = {
        'success_rate': self.overall.mean,
        'success_rate_low': self.overall.low,
        'success_rate_high': self.overall.high,
        'steps_per_trajectory': self.steps,
        'invalid': self.invalid,
        'inadmissible': self.inadmissible,
        'aborted': self.aborted,
        'games': float(self.overall.games),
        'success_rate_spread': self.spread,
    }
    for kind, rate in self.by_kind.items():
      named[f'success_rate_{kind}'] = rate.mean
    return {f'eval/{name}': value for name, value in named.items()}


def wilson(successes: float, games: int) -> tuple[float, float]:
  """95 % Wilson score interval of a share (Wilson, 1927).

  `successes` may be fractional, the sum of per-game means over seeds: then
  games count once each, which is conservative, since seeds add some evidence.
  """
  if games == 0:
    return 0.0, 1.0
  share, z2 = successes / games, _Z95**2 / games
  centre = (share + z2 / 2) / (1 + z2)
  half = _Z95 * math.sqrt(share * (1 - share) / games + z2 / (4 * games))
  half /= 1 + z2
  return max(0.0, centre - half), min(1.0, centre + half)


def evaluate(
    spec: spec_lib.Evaluation,
    split: envs.Split,
    collector: collector_lib.BoundCollector,
    params: models.Params,
) -> Result:
  """Plays every game of the split once for each seed, or draws of them."""
  params = collector.sampler.prepare(params)  # Once for all seeds.
  tasks = [split[i] for i in range(spec.games or len(split))]
  played = {
      seed: collector.collect(
          params,
          draw(tasks, spec.draws, seed) if spec.draws else tasks,
          1,
          seed=seed,
          iteration=0,
          temperature=spec.temperature,
      )
      for seed in spec.seeds
  }
  return summarize(spec, tasks, played)


def draw(
    tasks: Sequence[types.Task], count: int, seed: int
) -> list[types.Task]:
  """`count` of `tasks`, drawn with replacement; a function of the seed."""
  chance = np.random.default_rng(np.random.SeedSequence([seed, count]))
  return [tasks[i] for i in chance.integers(len(tasks), size=count)]


def summarize(
    spec: spec_lib.Evaluation,
    tasks: Sequence[types.Task],
    played: Mapping[int, Sequence[types.Trajectory]],
) -> Result:
  """The result of the episodes `played`, one a task for each seed.

  Raises:
    ValueError: a task is missing or was played twice.
  """
  everything = [t for trajectories in played.values() for t in trajectories]
  if spec.draws:
    wins = [(t.task.kind, float(t.success)) for t in everything]
  else:
    wins = _wins_by_game(tasks, played)
  by_seed = {
      str(seed): sum(t.success for t in found) / len(found)
      for seed, found in played.items()
  }
  rates = list(by_seed.values())
  seen = rollout_metrics.rollout_metrics(everything)
  return Result(
      split=spec.split,
      temperature=spec.temperature,
      seeds=tuple(played),
      overall=_rate([share for _, share in wins]),
      by_kind={
          kind: _rate([share for of, share in wins if of == kind])
          for kind in sorted({kind for kind, _ in wins})
      },
      by_seed=by_seed,
      steps=seen['rollout/steps_per_trajectory'],
      invalid=seen['rollout/invalid'] + seen['rollout/invalid_cut'],
      inadmissible=seen['rollout/inadmissible'],
      aborted=sum(t.aborted for t in everything) / len(everything),
      spread=statistics.stdev(rates) if len(rates) > 1 else 0.0,
      draws=spec.draws,
  )


def _wins_by_game(
    tasks: Sequence[types.Task],
    played: Mapping[int, Sequence[types.Trajectory]],
) -> list[tuple[str, float]]:
  """(kind, share of the seeds that solved it) of each game."""
  wins = {task.task_id: 0.0 for task in tasks}
  for seed, trajectories in played.items():
    ids = [t.task.task_id for t in trajectories]
    if sorted(ids) != sorted(wins):
      raise ValueError(
          f'evaluation seed {seed} played {len(set(ids))} different tasks in'
          f' {len(ids)} episodes; expected each of {len(wins)} tasks once'
      )
    for trajectory in trajectories:
      wins[trajectory.task.task_id] += trajectory.success / len(played)
  return [(task.kind, wins[task.task_id]) for task in tasks]


def _rate(wins: Sequence[float]) -> Rate:
  low, high = wilson(sum(wins), len(wins))
  return Rate(len(wins), sum(wins) / len(wins), low, high)


def check_out(out: pathlib.Path) -> None:
  """Raises OSError if a result and its table could not be written there."""
  if out.suffix != '.json':  # The table beside it ends in .md.
    raise OSError(f'--out={out}: expected a name that ends in .json')
  for path in (out, out.with_suffix('.md')):
    whole_file.check(path, '--out')


def save(path: str | os.PathLike[str], result: Result, iteration: int) -> None:
  """Writes a result as JSON, whole or not at all."""
  record = {'iteration': iteration, **dataclasses.asdict(result)}
  with whole_file.replacing(path) as partial:
    partial.write_text(json.dumps(record, indent=1) + '\n', encoding='utf-8')


def load(path: str | os.PathLike[str]) -> Result:
  """Reads what `save` wrote."""
  record = json.loads(pathlib.Path(path).read_text(encoding='utf-8'))
  record.pop('iteration')
  record['seeds'] = tuple(record['seeds'])
  record['overall'] = Rate(**record['overall'])
  record['by_kind'] = {k: Rate(**v) for k, v in record['by_kind'].items()}
  return Result(**record)


def table(results: Mapping[str, Result]) -> str:
  """A Markdown table: a row a task kind, a column a result."""
  names, every = list(results), results.values()
  kinds = list(dict.fromkeys(k for r in every for k in r.by_kind))
  lines = [
      '| held-out success, % | games | ' + ' | '.join(names) + ' |',
      '|---|---|' + '---|' * len(names),
  ]
  first = results[names[0]]
  lines += [
      _line(
          kind,
          [f'{100 * r.by_kind[kind].mean:.1f}' for r in every],
          str(first.by_kind[kind].games),
      )
      for kind in kinds
  ]
  cells = [
      f'**{100 * r.overall.mean:.1f}** ({100 * r.overall.low:.1f} to'
      f' {100 * r.overall.high:.1f})'
      for r in every
  ]
  lines.append(
      _line('**all** (95 % interval)', cells, str(first.overall.games))
  )
  if any(len(r.seeds) > 1 for r in every):
    cells = [
        f'{100 * r.overall.mean:.1f} ± {100 * r.spread:.1f} ({len(r.seeds)})'
        for r in every
    ]
    lines.append(_line('mean ± deviation over seeds (seeds)', cells))
  if any(r.draws for r in every):
    cells = [str(r.draws or 'each once') for r in every]
    lines.append(_line('games drawn with replacement, a seed', cells))
  for label, field in (
      ('invalid format, %', 'invalid'),
      ('inadmissible actions, %', 'inadmissible'),
  ):
    cells = [f'{100 * getattr(r, field):.1f}' for r in every]
    lines.append(_line(label, cells))
  lines.append(_line('steps an episode', [f'{r.steps:.1f}' for r in every]))
  return '\n'.join(lines)


def _line(label: str, cells: Sequence[str], games: str = '') -> str:
  return (
      f'| {label} | {games + " " if games else ""}| ' + ' | '.join(cells) + ' |'
  )
