"""Official games that note which of them are loaded. No jax here."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

from hgpo_jax import types
from hgpo_jax.envs import alfworld


@dataclasses.dataclass(frozen=True)
class LoggedGames(alfworld.OfficialGames):
  """`OfficialGames`; each load adds a line, the game's path, to `log`."""

  log: str = ''

  def load(self, task: types.Task) -> dict[str, Any]:
    line = f'{task.task_id}\n'.encode()
    file = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, line)  # Whole: workers write to the same file.
    os.close(file)
    return super().load(task)


def loaded(log: pathlib.Path) -> list[str]:
  """Paths of the games that were loaded, once for each load."""
  return log.read_text().splitlines()
