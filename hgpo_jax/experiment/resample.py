"""Further rounds of sampling for groups whose episodes all ended alike.

The dynamic sampling of DAPO (Yu et al. 2025, arXiv 2503.14476, equation 11)
with an end: what is still missing after the last round is made up with groups
that ended alike, so the batch keeps its size and no run stops.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import itertools

from hgpo_jax import types
from hgpo_jax.advantages import segments
from hgpo_jax.experiment import spec as spec_lib
from hgpo_jax.experiment import task_order
from hgpo_jax.models import base as models
from hgpo_jax.rollout import collector as collector_lib


@dataclasses.dataclass(frozen=True)
class Played:
  """The episodes of an iteration.

  Attributes:
    every: all of them, those that were replaced too.
    kept: those to learn from: as many groups as an iteration has tasks.
    metrics: how many groups were drawn; nothing without resampling.
  """

  every: list[types.Trajectory]
  kept: list[types.Trajectory]
  metrics: types.Metrics


def play(
    spec: spec_lib.Experiment,
    collector: collector_lib.BoundCollector,
    params: models.Params,
    tasks: Sequence[types.Task],
    iteration: int,
) -> Played:
  """Plays a group of each task, then of further tasks while some ended alike.

  A round plays as many tasks as groups are missing. Which come first is a
  function of seed and iteration; how many are needed, of the episodes.
  """
  split = spec.env.split(spec.split)
  spare = task_order.spare(split, tasks, spec.seed, iteration)
  size, groups, rounds = spec.group_size, [], -1
  while tasks and rounds < spec.resample_rounds:
    found = collector.collect(
        params,
        tasks,
        size,
        seed=spec.seed,
        iteration=iteration,
        temperature=spec.temperature,
        first_group=len(groups),
    )
    groups += [found[i : i + size] for i in range(0, len(found), size)]
    rounds += 1
    missing = spec.tasks_per_iteration - sum(map(differs, groups))
    tasks = list(itertools.islice(spare, missing))
  return Played(
      list(itertools.chain(*groups)),
      list(itertools.chain(*_chosen(groups, spec.tasks_per_iteration))),
      _metrics(spec, groups, rounds),
  )


def differs(group: Sequence[types.Trajectory]) -> bool:
  """Whether outcomes differ among the episodes that were not broken off."""
  outcomes = [t.outcome for t in group if not t.aborted] or [0.0]
  low, high = min(outcomes), max(outcomes)
  scale = max(1.0, abs(low), abs(high))
  return high - low > segments.SPREAD_TOLERANCE * scale


def _chosen(
    groups: Sequence[Sequence[types.Trajectory]], count: int
) -> list[Sequence[types.Trajectory]]:
  """The first groups that differ, made up with the first that do not."""
  best = sorted(range(len(groups)), key=lambda g: not differs(groups[g]))
  return [groups[g] for g in sorted(best[:count])]


def _metrics(
    spec: spec_lib.Experiment,
    groups: Sequence[Sequence[types.Trajectory]],
    rounds: int,
) -> types.Metrics:
  if not spec.resample_rounds:
    return {}
  alike = sum(not differs(group) for group in groups)
  return {
      'rollout/resample_rounds': float(rounds),
      'rollout/resampled_groups': float(len(groups) - spec.tasks_per_iteration),
      'rollout/frac_alike_groups': alike / len(groups),
  }
