"""Steps whose true advantage is measured by playing on from them."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import numpy as np

from hgpo_jax import types
from hgpo_jax.credit import continuations

# Keys of what is played; each phase has its own random numbers.
_POOL, _SOURCES, _BEFORE, _AFTER = range(4)


@dataclasses.dataclass(frozen=True)
class Probe:
  """A step as the policy took it.

  Attributes:
    task: index in the list of tasks.
    opening: the steps before it.
    step: the step.
  """

  task: int
  opening: continuations.Opening
  step: types.Step


@dataclasses.dataclass(frozen=True)
class Sample:
  """Episodes of one policy around P probes.

  Attributes:
    probes: the steps.
    before: of each probe, M episodes from the state before it.
    after: of each probe, M episodes that go on after it.
    pool: of each task, episodes from its start.
  """

  probes: tuple[Probe, ...]
  before: tuple[tuple[types.Trajectory, ...], ...]
  after: tuple[tuple[types.Trajectory, ...], ...]
  pool: tuple[tuple[types.Trajectory, ...], ...]

  @property
  def success_rate(self) -> float:
    """Of the policy, over the pool."""
    return float(np.mean([t.success for some in self.pool for t in some]))


@dataclasses.dataclass(frozen=True)
class Design:
  """How much is played for one policy.

  Attributes:
    tasks: number of tasks.
    probes: steps of each task, taken from as many episodes.
    continuations: M, episodes from before and from after each step; even.
    pool: free episodes of each task, of which groups are made.
    seed: which steps are chosen.
  """

  tasks: int = 48
  probes: int = 3
  continuations: int = 64
  pool: int = 48
  seed: int = 0

  def __post_init__(self):
    if min(self.tasks, self.probes, self.pool) < 1:
      raise ValueError(f'{self}: expected at least one of everything')
    if self.continuations < 4 or self.continuations % 2:
      raise ValueError(
          f'continuations is {self.continuations}; expected an even number of'
          ' at least 4: one half is the truth for groups made of the other'
      )

  @property
  def episodes(self) -> int:
    """Episodes played, those that start on the way among them."""
    each = self.pool + self.probes * (1 + 2 * self.continuations)
    return self.tasks * each


def sample(
    design: Design, tasks: Sequence[types.Task], play: continuations.Play
) -> Sample:
  """Plays everything; with `continuations.Saved`, what is still missing."""
  start = [()] * len(tasks)
  pool = play(tasks, start, design.pool, _POOL)
  sources = play(tasks, start, design.probes, _SOURCES)
  probes = tuple(
      probe
      for index, some in enumerate(_by(sources, design.probes))
      for probe in choose(index, some, design)
  )
  where = [tasks[probe.task] for probe in probes]
  opening = [probe.opening for probe in probes]
  through = [(*probe.opening, probe.step) for probe in probes]
  each = design.continuations
  found = Sample(
      probes,
      _by(play(where, opening, each, _BEFORE), each),
      _by(play(where, through, each, _AFTER), each),
      _by(pool, design.pool),
  )
  _refuse_aborted(found)
  return found


def choose(
    task: int, sources: Sequence[types.Trajectory], design: Design
) -> list[Probe]:
  """Steps of some episodes, each step as likely as any other, none twice."""
  steps = [
      (trajectory.steps[:t], step)
      for trajectory in sources
      if not trajectory.aborted
      for t, step in enumerate(trajectory.steps)
  ]
  rng = np.random.default_rng([design.seed, task])
  count = min(design.probes, len(steps))
  places = sorted(rng.choice(len(steps), count, replace=False))
  return [Probe(task, *steps[place]) for place in places]


def _by(
    trajectories: Sequence[types.Trajectory], size: int
) -> tuple[tuple[types.Trajectory, ...], ...]:
  return tuple(
      tuple(trajectories[i : i + size])
      for i in range(0, len(trajectories), size)
  )


def _refuse_aborted(found: Sample) -> None:
  for some in (*found.before, *found.after, *found.pool):
    for trajectory in some:
      if trajectory.aborted:
        raise ValueError(
            f'an episode of {trajectory.task.task_id!r} was broken off'
            f' ({trajectory.error}); what is left would be a biased sample.'
            ' Look at the environment, remove the file of that part and run'
            ' again'
        )
