"""ALFWorld: generated or official text games on the real TextWorld engine."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol

from hgpo_jax import config
from hgpo_jax import types
from hgpo_jax.envs import alfworld_official
from hgpo_jax.envs import alfworld_states
from hgpo_jax.envs import base
from hgpo_jax.envs import disk_cache
from hgpo_jax.envs import household
from hgpo_jax.envs import household_pddl
from hgpo_jax.envs import textworld_engine
from hgpo_jax.envs import textworld_game
from hgpo_jax.envs import textworld_stock

# Reward of the step that solves the task (published ALFWorld protocol).
SOLVED_REWARD = 10.0

OfficialGames = alfworld_official.OfficialGames
OFFICIAL_COUNTS = alfworld_official.COUNTS

_STATE_KEYS = alfworld_states.STATE_KEYS
_ENGINES = {
    'fast': textworld_engine.Engine,
    'stock': textworld_stock.StockEngine,
}
_NO_CACHE = 'none'


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
  """Generated games; the kinds of task take turns."""

  name: str
  size: int
  seed: int
  offset: int
  kinds: tuple[str, ...] = household.KINDS

  def __len__(self) -> int:
    return self.size

  def __getitem__(self, index: int) -> types.Task:
    _check_index(index, self.size, self.name)
    # Seeds of the splits differ modulo the number of splits, so no seed of
    # one split is ever a seed of another.
    seed = (self.seed + index) * len(HouseholdGames.SPLITS) + self.offset
    kind = self.kinds[index % len(self.kinds)]
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
    kinds: kinds of task that take turns in both splits.
  """

  layout: household.Layout = household.Layout()
  train_size: int = 4096
  heldout_size: int = 256
  first_seed: int = 0
  kinds: tuple[str, ...] = household.KINDS

  SPLITS = ('train', 'heldout')

  def __post_init__(self) -> None:
    if min(self.train_size, self.heldout_size) < 1 or self.first_seed < 0:
      raise ValueError(
          'HouseholdGames needs train_size >= 1, heldout_size >= 1 and'
          f' first_seed >= 0, got {self.train_size}, {self.heldout_size} and'
          f' {self.first_seed}'
      )
    if not self.kinds or not set(self.kinds) <= set(household.KINDS):
      raise ValueError(
          f'HouseholdGames.kinds is {self.kinds}; expected at least one of'
          f' {household.KINDS}'
      )

  def check(self) -> None:
    """Generated games are always there."""

  def split(self, name: str) -> HouseholdSplit:
    if name not in self.SPLITS:
      raise KeyError(
          f'unknown split {name!r} of HouseholdGames; known: {self.SPLITS}'
      )
    size = {'train': self.train_size, 'heldout': self.heldout_size}[name]
    offset = self.SPLITS.index(name)
    return HouseholdSplit(name, size, self.first_seed, offset, self.kinds)

  def load(self, task: types.Task) -> dict[str, Any]:
    game = household.generate(task.seed, task.kind, self.layout)
    return household_pddl.game_data(game)


@config.configurable
@dataclasses.dataclass(frozen=True)
class AlfworldEnv:
  """ALFWorld text games as an environment.

  Reward 10 on the step that solves the task, else 0.

  Attributes:
    games: where games come from.
    max_steps: steps after which an unsolved episode is truncated.
    state_key: what makes two states the same one, see `alfworld_states`:
      'observation' (published GiGPO and HGPO), 'admissible' (published G2PO)
      or 'inventory' (published GraphGPO).
    engine: 'fast', which gives way to the stock engine on versions that it
      was not written for, or 'stock': the same texts, a hundred times slower.
    cache: folder that translated games are kept in, for any number of runs at
      a time; '' for one in the user's cache folder, 'none' for no cache.
  """

  games: Games
  max_steps: int = 50
  state_key: str = 'observation'
  engine: str = config.may_change('fast')
  cache: str = config.may_change('')

  def __post_init__(self) -> None:
    if self.max_steps < 1:
      raise ValueError(
          f'AlfworldEnv.max_steps is {self.max_steps}; expected at least 1'
      )
    for name, known in (('state_key', _STATE_KEYS), ('engine', _ENGINES)):
      if getattr(self, name) not in known:
        raise ValueError(
            f'AlfworldEnv.{name} is {getattr(self, name)!r}; expected one of'
            f' {sorted(known)}'
        )

  def check(self) -> None:
    textworld_game.check_versions()
    self.games.check()

  def split(self, name: str) -> base.Split:
    return self.games.split(name)

  def make(self) -> LiveAlfworld:
    return LiveAlfworld(self, _ENGINES['fast' if self._fast else 'stock']())

  def prepare(self, task: types.Task) -> None:
    """Loads a game that an env of this process will soon be reset to."""
    _ready(self, task)

  @property
  def _fast(self) -> bool:
    return self.engine == 'fast' and textworld_game.check_versions()

  def _load(self, task: types.Task) -> Any:
    """The game of a task, as the engine takes it."""
    data = self.games.load(task)
    if not self._fast:
      return textworld_stock.stock_game(data)
    if self.cache == _NO_CACHE:
      return textworld_game.compile_game(data)
    folder = self.cache or disk_cache.user_folder() / 'alfworld_games'
    cache = disk_cache.DiskCache(folder, 'game_cache')
    return textworld_game.compile_game(data, cache)


@functools.lru_cache(maxsize=64)
def _ready(spec: AlfworldEnv, task: types.Task) -> Any:
  """Loaded games are shared by all slots of a worker process."""
  return spec._load(task)  # pylint: disable=protected-access


class LiveAlfworld:
  """One slot: an engine that plays one episode after another."""

  def __init__(
      self,
      spec: AlfworldEnv,
      engine: textworld_engine.Engine | textworld_stock.StockEngine,
  ) -> None:
    self._spec = spec
    self._engine = engine
    self._key = _STATE_KEYS[spec.state_key]()
    self._steps = 0
    self._done = True

  def reset(self, task: types.Task) -> types.StepResult:
    game = _ready(self._spec, task)
    text = self._engine.reset(game)
    self._steps, self._done = 0, False
    self._key = _STATE_KEYS[self._spec.state_key]()
    return self._result('', text, instruction=game.task)

  def step(self, action: str) -> types.StepResult:
    if self._done:
      raise RuntimeError('step after the episode ended; call reset first')
    text = self._engine.step(action)
    self._steps += 1
    return self._result(action, text)

  def close(self) -> None:
    """The native library cannot be unloaded; it ends with the process."""
    self._done = True

  def _result(
      self, action: str, text: str, instruction: str = ''
  ) -> types.StepResult:
    won = self._engine.won
    admissible = self._engine.admissible
    truncated = self._steps >= self._spec.max_steps and not won
    self._done = won or truncated
    return types.StepResult(
        observation=text,
        state_key=self._key(action, text, admissible),
        admissible=admissible,
        reward=SOLVED_REWARD if won and self._steps else 0.0,
        terminated=won,
        truncated=truncated,
        success=won if self._done else None,
        score=float(won),
        instruction=instruction,
    )
