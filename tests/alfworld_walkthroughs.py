"""Loads every official game and plays its walkthrough in the fast engine.

  python -m tests.alfworld_walkthroughs --data=json_2.1.1 --cache=FOLDER

Each walkthrough has to win, and not before its last command. It leaves the
translations of all games in the cache.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
import os
import time

from absl import app
from absl import flags

from hgpo_jax import types
from hgpo_jax.envs import alfworld
from hgpo_jax.envs import counters

_EVERY = 100


def trouble(
    spec: alfworld.AlfworldEnv, env: alfworld.LiveAlfworld, task: types.Task
) -> str:
  """What is wrong with a game and its walkthrough; '' if nothing is."""
  try:
    commands = spec.games.load(task)['walkthrough']
    result = env.reset(task)
    for step, command in enumerate(commands):
      if command not in result.admissible:
        return f'step {step}: {command!r} is not admissible'
      result = env.step(command)
      if result.done and step + 1 < len(commands):
        return f'ends with step {step + 1} of {len(commands)}'
    return '' if result.success else 'does not win'
  except Exception as error:  # pylint: disable=broad-except
    return repr(error)


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}')
  games = alfworld.OfficialGames(folder=flags.FLAGS.data)
  spec = alfworld.AlfworldEnv(games=games, cache=flags.FLAGS.cache)
  spec.check()
  env, start = spec.make(), time.monotonic()
  won: collections.Counter[str] = collections.Counter()
  bad = 0
  for name in flags.FLAGS.splits:
    split = spec.split(name)
    for index in range(len(split)):
      if what := trouble(spec, env, split[index]):
        bad += 1
        print(f'{split[index].task_id}: {what}', flush=True)
      else:
        won[name] += 1
      if index % _EVERY == _EVERY - 1:
        print(f'{name} {index + 1}: {won[name]} won', flush=True)
    print(f'{name}: {won[name]} of {len(split)} walkthroughs win', flush=True)
  print(
      f'{won.total()} won, {bad} did not, {time.monotonic() - start:.0f} s wall,'
      f' {time.process_time():.0f} s CPU, {counters.take()}',
      flush=True,
  )
  os._exit(bool(bad))  # The native library must not be unloaded.


def define_flags() -> None:
  """Not at import: other programs have flags of these names."""
  flags.DEFINE_string('data', '', 'As OfficialGames.folder.')
  flags.DEFINE_string('cache', '', 'As AlfworldEnv.cache.')
  flags.DEFINE_list('splits', list(alfworld.OFFICIAL_COUNTS), 'Splits.')


if __name__ == '__main__':
  define_flags()
  app.run(main)
