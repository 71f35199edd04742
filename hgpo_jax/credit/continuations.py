"""Episodes that go on from chosen steps, kept on disk as they are played."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import pathlib
from typing import Protocol

from hgpo_jax import types
from hgpo_jax.io import trajectories as trajectories_io
from hgpo_jax.models import base as models
from hgpo_jax.rollout import collector as collector_lib

Opening = tuple[types.Step, ...]


class Play(Protocol):
  """Plays a fixed policy."""

  def __call__(
      self,
      tasks: Sequence[types.Task],
      openings: Sequence[Opening],
      episodes: int,
      key: int,
  ) -> list[types.Trajectory]:
    """`episodes` episodes of each task, each beginning with its opening.

    Episodes are independent given the opening, in the order of the tasks;
    another key gives other ones, the same key the same ones.
    """


@dataclasses.dataclass(frozen=True)
class CollectorPlay:
  """Plays with a collector: resets, replays the opening, samples on.

  Attributes:
    collector: bound to environments and a sampler.
    params: of the policy.
    seed: of sampling.
    temperature: of sampling.
  """

  collector: collector_lib.BoundCollector
  params: models.Params
  seed: int
  temperature: float

  def __call__(
      self,
      tasks: Sequence[types.Task],
      openings: Sequence[Opening],
      episodes: int,
      key: int,
  ) -> list[types.Trajectory]:
    return self.collector.collect(
        self.params,
        tasks,
        episodes,
        seed=self.seed,
        iteration=key,
        temperature=self.temperature,
        openings=openings,
    )


@dataclasses.dataclass(frozen=True)
class Saved:
  """Plays a part at a time; a part that is on disk is read, not played.

  Attributes:
    play: what plays.
    folder: where parts are kept, one a file; for one policy and one design.
    episodes_a_part: about how many episodes are lost if the process ends.
  """

  play: Play
  folder: pathlib.Path
  episodes_a_part: int = 256

  def __call__(
      self,
      tasks: Sequence[types.Task],
      openings: Sequence[Opening],
      episodes: int,
      key: int,
  ) -> list[types.Trajectory]:
    """As `Play`; keys may be 0 to 999.

    Raises:
      ValueError: what is on disk are episodes of other tasks.
    """
    size = max(1, self.episodes_a_part // episodes)
    found = []
    for part, start in enumerate(range(0, len(tasks), size)):
      some = slice(start, start + size)
      path = self.folder / f'{key:03d}_{part:05d}.jsonl.gz'
      if not path.exists():
        # Ids of episodes start anew in each part, so its key must differ.
        played = self.play(
            tasks[some], openings[some], episodes, key * 1_000_000 + part
        )
        trajectories_io.save(path, played)
      found += _checked(path, tasks[some], openings[some], episodes)
    return found


def _checked(
    path: pathlib.Path,
    tasks: Sequence[types.Task],
    openings: Sequence[Opening],
    episodes: int,
) -> list[types.Trajectory]:
  """Reads a part, from disk in any case: what is used is what is kept."""
  found = trajectories_io.load(path)
  wanted = [
      (task.task_id, [step.action for step in opening])
      for task, opening in zip(tasks, openings, strict=True)
      for _ in range(episodes)
  ]
  for place, (task_id, actions) in enumerate(wanted):
    episode = found[place] if place < len(found) else None
    if (
        len(found) != len(wanted)
        or episode.task.task_id != task_id
        or [s.action for s in episode.steps[: len(actions)]] != actions
        and not episode.aborted
    ):
      raise ValueError(
          f'{path} holds {len(found)} episodes, and number {place} is not one'
          f' of the {len(wanted)} expected, of task {task_id!r} after'
          f' {actions}: it was made with other settings. Give another --out, or'
          ' remove the folder'
      )
  return found
