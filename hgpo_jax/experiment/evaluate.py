"""Evaluation: every game of a split exactly once a seed, with an interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import json
import math
import os
import pathlib

from hgpo_jax import types
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
    seeds: sampling seeds; each played every game once.
    overall: over all games.
    by_kind: by task kind.
    by_seed: success rate of each seed.
    steps: mean steps of an episode.
    invalid: share of responses without the required format.
    inadmissible: share of actions that were not admissible; a response
      without the required format is nearly always one of these too.
    aborted: share of episodes that the environment broke off; they count as
      not solved.
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
  """Plays every game of the split once for each seed."""
  tasks = [split[i] for i in range(spec.games or len(split))]
  played = {
      seed: collector.collect(
          params, tasks, 1, seed=seed, iteration=0, temperature=spec.temperature
      )
      for seed in spec.seeds
  }
  return summarize(spec, tasks, played)


def summarize(
    spec: spec_lib.Evaluation,
    tasks: Sequence[types.Task],
    played: Mapping[int, Sequence[types.Trajectory]],
) -> Result:
  """The result of the episodes `played`, one a task for each seed.

  Raises:
    ValueError: a task is missing or was played twice.
  """
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
  kinds = sorted({task.kind for task in tasks})
  everything = [t for trajectories in played.values() for t in trajectories]
  seen = rollout_metrics.rollout_metrics(everything)
  return Result(
      split=spec.split,
      temperature=spec.temperature,
      seeds=tuple(played),
      overall=_rate(list(wins.values())),
      by_kind={
          kind: _rate([wins[t.task_id] for t in tasks if t.kind == kind])
          for kind in kinds
      },
      by_seed={
          str(seed): sum(t.success for t in found) / len(found)
          for seed, found in played.items()
      },
      steps=seen['rollout/steps_per_trajectory'],
      invalid=seen['rollout/invalid'] + seen['rollout/invalid_cut'],
      inadmissible=seen['rollout/inadmissible'],
      aborted=sum(t.aborted for t in everything) / len(everything),
  )


def _rate(wins: Sequence[float]) -> Rate:
  low, high = wilson(sum(wins), len(wins))
  return Rate(len(wins), sum(wins) / len(wins), low, high)


def save(path: str | os.PathLike[str], result: Result, iteration: int) -> None:
  """Writes a result as JSON, whole or not at all."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(path.name + '.partial')
  record = {'iteration': iteration, **dataclasses.asdict(result)}
  partial.write_text(json.dumps(record, indent=1) + '\n')
  os.replace(partial, path)


def load(path: str | os.PathLike[str]) -> Result:
  """Reads what `save` wrote."""
  record = json.loads(pathlib.Path(path).read_text())
  record.pop('iteration')
  record['seeds'] = tuple(record['seeds'])
  record['overall'] = Rate(**record['overall'])
  record['by_kind'] = {k: Rate(**v) for k, v in record['by_kind'].items()}
  return Result(**record)


def table(results: Mapping[str, Result]) -> str:
  """A Markdown table: a row a task kind, a column a result."""
  names = list(results)
  kinds = list(dict.fromkeys(k for r in results.values() for k in r.by_kind))
  lines = [
      '| held-out success, % | games | ' + ' | '.join(names) + ' |',
      '|---|---|' + '---|' * len(names),
  ]
  first = results[names[0]]
  for kind in kinds:
    cells = [f'{100 * r.by_kind[kind].mean:.1f}' for r in results.values()]
    lines.append(
        f'| {kind} | {first.by_kind[kind].games} | ' + ' | '.join(cells) + ' |'
    )
  cells = [
      f'**{100 * r.overall.mean:.1f}** ({100 * r.overall.low:.1f} to'
      f' {100 * r.overall.high:.1f})'
      for r in results.values()
  ]
  lines.append(
      f'| **all** (95 % interval) | {first.overall.games} | '
      + ' | '.join(cells)
      + ' |'
  )
  for label, field in (
      ('invalid format, %', 'invalid'),
      ('inadmissible actions, %', 'inadmissible'),
  ):
    cells = [f'{100 * getattr(r, field):.1f}' for r in results.values()]
    lines.append(f'| {label} | | ' + ' | '.join(cells) + ' |')
  cells = [f'{r.steps:.1f}' for r in results.values()]
  lines.append('| steps an episode | | ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines)
