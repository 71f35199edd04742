"""TextWorld's own ALFRED engine, behind the interface of `textworld_engine`.

About a hundred times slower. It is what the fast engine is held to, and what
is played on versions of TextWorld that the fast engine was not written for.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import json
import os
import tempfile
from typing import Any

from hgpo_jax.envs import alfworld_package
from hgpo_jax.envs import textworld_game


@dataclasses.dataclass(frozen=True)
class StockGame:
  """A game as the stock engine takes it.

  Attributes:
    task: the task sentence.
    data: the content of a `game.tw-pddl`.
  """

  task: str
  data: Mapping[str, Any]


def stock_game(data: Mapping[str, Any]) -> StockGame:
  """The game for `StockEngine.reset`."""
  return StockGame(textworld_game.task_sentence(data['grammar']), data)


class StockEngine:
  """One `PddlEnv` with ALFWorld's names; plays one game after another."""

  def __init__(self) -> None:
    import textworld
    from textworld.envs.pddl import PddlEnv

    alfred_tw_env = alfworld_package.load(
        'alfworld.agents.environment.alfred_tw_env'
    )
    infos = textworld.EnvInfos(
        won=True, admissible_commands=True, feedback=True
    )
    self._env = alfred_tw_env.AlfredDemangler(PddlEnv(infos))
    self._state: Any = None

  def reset(self, game: StockGame) -> str:
    """Starts a game; returns the opening text."""
    handle, path = tempfile.mkstemp(suffix='.tw-pddl')
    try:
      with open(handle, 'w', encoding='utf-8') as file:
        json.dump(dict(game.data), file)
      self._env.load(path)
      self._state = self._env.reset()
    finally:
      os.unlink(path)
    return self._state.feedback

  def step(self, command: str) -> str:
    """Acts; returns the feedback ("Nothing happens." if inadmissible)."""
    self._state, _, _ = self._env.step(command)
    return self._state.feedback

  @property
  def admissible(self) -> tuple[str, ...]:
    """The commands that would act now, sorted."""
    return tuple(self._state['admissible_commands'])

  @property
  def won(self) -> bool:
    """The goal holds now."""
    return bool(self._state['won'])
