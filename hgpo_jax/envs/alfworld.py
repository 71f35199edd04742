"""ALFWorld: generated or official text games on the real TextWorld engine."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any, Protocol

from hgpo_jax import config
from hgpo_jax import types
from hgpo_jax.envs import base
from hgpo_jax.envs import household
from hgpo_jax.envs import household_pddl
from hgpo_jax.envs import textworld_engine
from hgpo_jax.envs import textworld_game

# Reward of the step that solves the task (published ALFWorld protocol).
SOLVED_REWARD = 10.0

# Games of the official release json_2.1.1, by split.
OFFICIAL_COUNTS = {'train': 3553, 'valid_seen': 140, 'valid_unseen': 134}


class Games(Protocol):
  """Where games come from; a gin-configured frozen dataclass."""

  def check(self) -> None:
    """Raises an error that names the knob if the games are not there."""

  def split(self, name: str) -> base.Split:
    """The split called `name`."""

  def load(self, task: types.Task) -> dict[str, Any]:
    """The content of the task's `game.tw-pddl`."""


def _check_index(index: int, size: int, name: str) -> None:
  if not 0 <= index < size:
    raise IndexError(f'task {index} of split {name!r} with {size} tasks')


@dataclasses.dataclass(frozen=True)
class HouseholdSplit:
  """Generated games; game `index` has the task kind `index % 6`."""

  name: str
  size: int
  seed: int
  offset: int

  def __len__(self) -> int:
    return self.size

  def __getitem__(self, index: int) -> types.Task:
    _check_index(index, self.size, self.name)
    # Seeds of the splits differ modulo the number of splits, so no seed of
    # one split is ever a seed of another.
    seed = (self.seed + index) * len(HouseholdGames.SPLITS) + self.offset
    kind = household.KINDS[index % len(household.KINDS)]
    return types.Task(
        self.name, index, f'household/{self.name}/{kind}-{seed}', seed, kind
    )


@config.configurable
@dataclasses.dataclass(frozen=True)
class HouseholdGames:
  """Generated ALFWorld-format games; see `household.py`.

  Attributes:
    layout: size and order of the rooms.
    train_size: games of the split 'train'.
    heldout_size: games of the split 'heldout'.
    first_seed: shifts both splits to other games.
  """

  layout: household.Layout = household.Layout()
  train_size: int = 4096
  heldout_size: int = 256
  first_seed: int = 0

  SPLITS = ('train', 'heldout')

  def __post_init__(self) -> None:
    if min(self.train_size, self.heldout_size) < 1 or self.first_seed < 0:
      raise ValueError(
          'HouseholdGames needs train_size >= 1, heldout_size >= 1 and'
          f' first_seed >= 0, got {self.train_size}, {self.heldout_size} and'
          f' {self.first_seed}'
      )

  def check(self) -> None:
    """Generated games are always there."""

  def split(self, name: str) -> HouseholdSplit:
    if name not in self.SPLITS:
      raise KeyError(
          f'unknown split {name!r} of HouseholdGames; known: {self.SPLITS}'
      )
    size = {'train': self.train_size, 'heldout': self.heldout_size}[name]
    return HouseholdSplit(name, size, self.first_seed, self.SPLITS.index(name))

  def load(self, task: types.Task) -> dict[str, Any]:
    game = household.generate(task.seed, task.kind, self.layout)
    return household_pddl.game_data(game)


@dataclasses.dataclass(frozen=True)
class OfficialSplit:
  """Game files of one folder of the official layout, sorted by path."""

  name: str
  paths: tuple[str, ...]

  def __len__(self) -> int:
    return len(self.paths)

  def __getitem__(self, index: int) -> types.Task:
    _check_index(index, len(self), self.name)
    path = self.paths[index]
    kind = path.split('/')[1].split('-')[0]
    return types.Task(self.name, index, path, 0, kind)


@functools.lru_cache(maxsize=8)
def _game_paths(folder: str, split: str) -> tuple[str, ...]:
  root = pathlib.Path(folder)
  found = sorted((root / split).glob('*/*/game.tw-pddl'))
  return tuple(p.relative_to(root).as_posix() for p in found)


@config.configurable
@dataclasses.dataclass(frozen=True)
class OfficialGames:
  """The official ALFWorld games, read from `folder` (never downloaded).

  Attributes:
    folder: the folder `json_2.1.1` that holds train/, valid_seen/ and
      valid_unseen/.
    any_count: accept other numbers of games than the official ones.
  """

  folder: str
  any_count: bool = False

  def check(self) -> None:
    for name, expected in OFFICIAL_COUNTS.items():
      found = len(_game_paths(self.folder, name))
      if not found or (found != expected and not self.any_count):
        raise ValueError(
            f'OfficialGames.folder = {self.folder!r} holds {found} games in'
            f' {name}/, expected {expected}; give the folder json_2.1.1 of the'
            ' official data, or set OfficialGames.any_count = True for a part'
            ' of it'
        )

  def split(self, name: str) -> OfficialSplit:
    if name not in OFFICIAL_COUNTS:
      raise KeyError(
          f'unknown split {name!r} of OfficialGames; known:'
          f' {tuple(OFFICIAL_COUNTS)}'
      )
    return OfficialSplit(name, _game_paths(self.folder, name))

  def load(self, task: types.Task) -> dict[str, Any]:
    return textworld_game.read_game(pathlib.Path(self.folder) / task.task_id)


@config.configurable
@dataclasses.dataclass(frozen=True)
class AlfworldEnv:
  """ALFWorld text games as an environment.

  Reward 10 on the step that solves the task, else 0. The state key is the
  raw observation text, as in the published GiGPO and HGPO protocol.

  Attributes:
    games: where games come from.
    max_steps: steps after which an unsolved episode is truncated.
  """

  games: Games
  max_steps: int = 50

  def __post_init__(self) -> None:
    if self.max_steps < 1:
      raise ValueError(
          f'AlfworldEnv.max_steps is {self.max_steps}; expected at least 1'
      )

  def check(self) -> None:
    textworld_game.check_versions()
    self.games.check()

  def split(self, name: str) -> base.Split:
    return self.games.split(name)

  def make(self) -> LiveAlfworld:
    return LiveAlfworld(self)


@functools.lru_cache(maxsize=64)
def _compiled(games: Games, task: types.Task) -> textworld_game.CompiledGame:
  """Translated games are shared by all slots of a worker process."""
  return textworld_game.compile_game(games.load(task))


class LiveAlfworld:
  """One slot: an engine that plays one episode after another."""

  def __init__(self, spec: AlfworldEnv) -> None:
    self._spec = spec
    self._engine = textworld_engine.Engine()
    self._steps = 0
    self._done = True

  def reset(self, task: types.Task) -> types.StepResult:
    game = _compiled(self._spec.games, task)
    text = self._engine.reset(game)
    self._steps, self._done = 0, False
    return self._result(text, instruction=game.task)

  def step(self, action: str) -> types.StepResult:
    if self._done:
      raise RuntimeError('step after the episode ended; call reset first')
    text = self._engine.step(action)
    self._steps += 1
    return self._result(text)

  def close(self) -> None:
    """The native library cannot be unloaded; it ends with the process."""
    self._done = True

  def _result(self, text: str, instruction: str = '') -> types.StepResult:
    won = self._engine.won
    truncated = self._steps >= self._spec.max_steps and not won
    self._done = won or truncated
    return types.StepResult(
        observation=text,
        state_key=text,
        admissible=self._engine.admissible,
        reward=SOLVED_REWARD if won and self._steps else 0.0,
        terminated=won,
        truncated=truncated,
        success=won if self._done else None,
        score=float(won),
        instruction=instruction,
    )
