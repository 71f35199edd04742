"""Plays games in the stock engine and in ours, and compares every byte.

  python -m tests.alfworld_equality --data=json_2.1.1 --games=60

takes official games, evenly from the six task types and from valid_seen and
valid_unseen. In each game it sends random admissible commands, one in ten of
them garbage, and then the walkthrough; it compares texts, admissible commands,
reward, won and done. Each engine plays in a process of its own, because ours
changes how TextWorld computes texts in its whole process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import itertools
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import app
from absl import flags

from hgpo_jax import types
from hgpo_jax.envs import alfworld
from hgpo_jax.envs import household

ENGINES = ('stock', 'fast')
RANDOM_COMMANDS = 25
_GARBAGE = ('eat it', '', 'go to the moon 9', 'look\n', ' put  apple in fridge')


# (text, admissible commands, reward, won, done)
Answer = tuple[str, list[str], float, bool, bool]


def choose(games: alfworld.OfficialGames, count: int) -> list[types.Task]:
  """`count` tasks, evenly from task types and from both valid splits."""
  pools = []
  for split, kind in itertools.product(
      ('valid_seen', 'valid_unseen'), household.KINDS
  ):
    tasks = games.split(split)
    pool = [t for t in map(tasks.__getitem__, range(len(tasks)))]
    pool = [task for task in pool if task.kind == kind]
    random.Random(f'{split} {kind}').shuffle(pool)
    pools.append(pool)
  turns = itertools.chain.from_iterable(itertools.zip_longest(*pools))
  return list(itertools.islice((t for t in turns if t is not None), count))


def stock(data: Mapping[str, Any]) -> Iterator[Answer]:
  """The engine as ALFWorld and TextWorld ship it."""
  from alfworld.agents.environment import alfred_tw_env
  import textworld
  from textworld.envs.pddl import PddlEnv

  infos = textworld.EnvInfos(won=True, admissible_commands=True, feedback=True)
  env = alfred_tw_env.AlfredDemangler(PddlEnv(infos))
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'game.tw-pddl'
    path.write_text(json.dumps(dict(data)))
    env.load(str(path))
    state = env.reset()
  done = False
  while True:
    won = bool(state['won'])
    command = yield (
        state.feedback,
        list(state['admissible_commands']),
        alfworld.SOLVED_REWARD * won,
        won,
        bool(done),
    )
    state, _, done = env.step(command)


class _OneGame:
  """A source of games that holds one."""

  def __init__(self, data: Mapping[str, Any]):
    self._data = data

  def load(self, task: types.Task) -> Mapping[str, Any]:
    del task
    return self._data


def fast(data: Mapping[str, Any]) -> Iterator[Answer]:
  """Ours, as a worker runs it."""
  spec = alfworld.AlfworldEnv(_OneGame(data), max_steps=10**6, cache='none')
  env = spec.make()
  result = env.reset(types.Task('', 0, 'one', 0, 'one'))
  while True:
    command = yield (
        result.observation,
        list(result.admissible),
        result.reward,
        result.score == 1.0,
        result.done,
    )
    result = env.step(command)


def play(engine: str, data: Mapping[str, Any], seed: int) -> list[Any]:
  """The transcript of one game: [command, answer], ..."""
  chance = random.Random(seed)
  game = {'stock': stock, 'fast': fast}[engine](data)
  answer = next(game)
  transcript = [['', answer]]
  for planned in [None] * RANDOM_COMMANDS + list(data['walkthrough']):
    command = planned
    if command is None:
      garbage = chance.random() < 0.1
      command = chance.choice(_GARBAGE if garbage else answer[1])
    answer = game.send(command)
    transcript.append([command, answer])
    if answer[-1]:
      break
  return transcript


def differences(
    games: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> list[str]:
  """What differs, a line for each game that does; prints as it goes."""
  found = []
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'games.json'
    path.write_text(json.dumps(list(map(dict, games))))
    players = [_start(engine, path) for engine in ENGINES]
    for index, name in enumerate(names):
      lines = [player.stdout.readline() for player in players]
      if not all(lines):
        raise RuntimeError(f'an engine ended in game {index}, {name}')
      if lines[0] != lines[1]:
        found.append(f'{name}: {_first(*map(json.loads, lines))}')
      steps = len(json.loads(lines[0])) - 1
      verdict = 'differs' if lines[0] != lines[1] else 'equal'
      print(f'{index + 1:4d} {verdict} {steps:3d} steps  {name}', flush=True)
    for player in players:
      player.stdout.close()
      player.wait()
  return found


def _start(engine: str, path: pathlib.Path) -> subprocess.Popen[str]:
  code = (
      'import sys; from tests import alfworld_equality as e;'
      ' e.serve(*sys.argv[1:])'
  )
  return subprocess.Popen(
      [sys.executable, '-c', code, engine, str(path)],
      stdout=subprocess.PIPE,
      cwd=pathlib.Path(__file__).parents[1],
      env={**os.environ, 'OMP_NUM_THREADS': '1'},
      text=True,
  )


def serve(engine: str, path: str) -> None:
  """Writes a transcript a line to the original standard output."""
  out = os.fdopen(os.dup(1), 'w')  # The translator replaces sys.stdout.
  for index, data in enumerate(json.loads(pathlib.Path(path).read_text())):
    out.write(json.dumps(play(engine, data, index)) + '\n')
    out.flush()
  os._exit(0)  # The native library must not be unloaded.


def _first(stock_lines: list[Any], fast_lines: list[Any]) -> str:
  for step, pair in enumerate(zip(stock_lines, fast_lines)):
    if pair[0] != pair[1]:
      return f'step {step}: stock {pair[0]}, fast {pair[1]}'
  return f'{len(stock_lines)} steps in stock, {len(fast_lines)} in fast'


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}')
  games = alfworld.OfficialGames(folder=flags.FLAGS.data)
  games.check()
  tasks = choose(games, flags.FLAGS.games)
  start = time.monotonic()
  found = differences(
      [games.load(task) for task in tasks], [task.task_id for task in tasks]
  )
  print(*found, sep='\n')
  kinds = {k: sum(t.kind == k for t in tasks) for k in household.KINDS}
  print(
      f'{len(found)} differences in {len(tasks)} games ({kinds}),'
      f' {time.monotonic() - start:.0f} s'
  )
  sys.exit(bool(found))


def define_flags() -> None:
  """Not at import: other programs have flags of these names."""
  flags.DEFINE_string('data', '', 'As OfficialGames.folder.')
  flags.DEFINE_integer('games', 60, 'Number of games.')


if __name__ == '__main__':
  define_flags()
  app.run(main)
