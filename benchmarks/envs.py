"""Three ALFWorld environments on the same games and the same commands.

  python -m benchmarks.envs --data=json_2.1.1 --out=envs.json

TextWorld's own engine in one process, TextWorld's AsyncBatchEnv with a process
an environment, and ours: one environment alone, and a pool as training uses
it. Each plays in a process of its own. Times are CPU time, which a busy machine
changes little; wall time is given beside them where it says something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import json
import os
import pathlib
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import app
from absl import flags

from hgpo_jax import types
from hgpo_jax import whole_file
from hgpo_jax.envs import alfworld
from hgpo_jax.envs import pool as pool_lib


def spec(folder: str) -> alfworld.AlfworldEnv:
  """The environment under test; its cache starts empty."""
  games = alfworld.HouseholdGames()
  if flags.FLAGS.data:
    games = alfworld.OfficialGames(folder=flags.FLAGS.data)
  return alfworld.AlfworldEnv(games=games, cache=folder)


def tasks(env: alfworld.AlfworldEnv, count: int) -> list[types.Task]:
  """`count` training tasks, the task types in turn."""
  split = env.split('train')
  order = random.Random(0).sample(range(len(split)), len(split))
  kinds: dict[str, list[types.Task]] = {}
  for index in order:
    kinds.setdefault(split[index].kind, []).append(split[index])
  pools = sorted(kinds.values(), key=lambda pool: pool[0].kind)
  return [pools[i % len(pools)][i // len(pools)] for i in range(count)]


def cpu(pid: int) -> float:
  """CPU seconds of another process so far; exact while it sleeps."""
  threads = pathlib.Path(f'/proc/{pid}/task').glob('*/schedstat')
  return sum(int(path.read_text().split()[0]) for path in threads) / 1e9


def memory_mb(pids: Sequence[int]) -> float:
  """Memory of processes; what several share is counted once."""
  total = 0
  for pid in pids:
    text = pathlib.Path(f'/proc/{pid}/smaps_rollup').read_text()
    total += next(
        int(line.split()[1]) for line in text.splitlines() if line[:4] == 'Pss:'
    )
  return total / 1e3


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
  """What `call` returns and the CPU milliseconds it took here."""
  start = time.process_time()
  result = call()
  return result, 1e3 * (time.process_time() - start)


def middle(values: Sequence[float]) -> dict[str, float]:
  return {'median': statistics.median(values), 'mean': statistics.fmean(values)}


def part_alone(work: pathlib.Path) -> dict[str, Any]:
  """One of our environments at a time; also chooses everyone's commands."""
  env_spec = spec(str(work / 'cache'))
  env = env_spec.make()
  cold, resets, steps, commands = [], [], [], []
  for number, task in enumerate(tasks(env_spec, flags.FLAGS.games)):
    cold.append(timed(lambda t=task: env_spec.prepare(t))[1])
    for member in range(flags.FLAGS.group):
      chance = random.Random(number * flags.FLAGS.group + member)
      result, cost = timed(lambda t=task: env.reset(t))
      resets.append(cost)
      commands.append([])
      while len(commands[-1]) < flags.FLAGS.steps and not result.done:
        garbage = chance.random() < 0.1
        command = 'eat it' if garbage else chance.choice(result.admissible)
        result, cost = timed(lambda c=command: env.step(c))
        commands[-1].append(command)
        steps.append(cost)
  (work / 'commands.json').write_text(json.dumps(commands))
  return {
      'first_load_ms': middle(cold),
      'reset_ms': middle(resets),
      'step_ms': middle(steps),
      **_growth(env_spec, env),
  }


def _growth(env_spec, env) -> dict[str, float]:
  """Resident memory that resets of known and of new games leave behind."""
  chosen = tasks(env_spec, flags.FLAGS.games)
  rss = []
  for number in range(flags.FLAGS.resets + 2 * len(chosen)):
    if number in (2 * len(chosen), flags.FLAGS.resets + 2 * len(chosen) - 1):
      rss.append(_resident_mb())
    env.step(env.reset(chosen[number % len(chosen)]).admissible[0])
  return {'resets_growth_mb': rss[1] - rss[0]}


def _resident_mb() -> float:
  pages = int(pathlib.Path('/proc/self/statm').read_text().split()[1])
  return pages * os.sysconf('SC_PAGE_SIZE') / 1e6


def _stock_env():
  from alfworld.agents.environment import alfred_tw_env
  import textworld
  from textworld.envs.pddl import PddlEnv

  infos = textworld.EnvInfos(won=True, admissible_commands=True, feedback=True)
  return alfred_tw_env.AlfredDemangler(PddlEnv(infos))


def _stock_games(work: pathlib.Path) -> tuple[list[str], list[list[str]]]:
  """Files and commands of the environments that the stock engines play."""
  env_spec = spec('none')
  commands = json.loads((work / 'commands.json').read_text())
  paths, chosen = [], []
  for number, task in enumerate(tasks(env_spec, flags.FLAGS.games)):
    path = work / f'{number}.tw-pddl'
    path.write_text(json.dumps(env_spec.games.load(task)))
    paths.append(str(path))
    chosen.append(
        commands[number * flags.FLAGS.group][: flags.FLAGS.stock_steps]
    )
  return paths[: flags.FLAGS.stock_envs], chosen[: flags.FLAGS.stock_envs]


def part_stock(work: pathlib.Path) -> dict[str, Any]:
  """The stock engine, one environment after another."""
  resets, steps = [], []
  for path, commands in zip(*_stock_games(work)):
    env = _stock_env()
    load = timed(lambda e=env, p=path: e.load(p))[1]
    resets.append(load + timed(env.reset)[1])
    steps += [timed(lambda e=env, c=c: e.step(c))[1] for c in commands]
  return {'reset_ms': middle(resets), 'step_ms': middle(steps)}


def part_batch(work: pathlib.Path) -> dict[str, Any]:
  """The stock engine in AsyncBatchEnv: a process an environment."""
  from textworld.envs.batch import AsyncBatchEnv
  from textworld.envs.wrappers import Filter

  paths, commands = _stock_games(work)
  envs = AsyncBatchEnv([lambda: Filter(_stock_env())] * len(paths))
  pids = [env._process.pid for env in envs.envs]  # pylint: disable=protected-access
  before = sum(map(cpu, pids))
  envs.load(paths)
  envs.reset()
  reset_ms = 1e3 * (sum(map(cpu, pids)) - before) / len(pids)
  steps = []
  for together in zip(*commands):
    before = sum(map(cpu, pids))
    envs.step(list(together))
    steps.append(1e3 * (sum(map(cpu, pids)) - before) / len(pids))
  memory = memory_mb(pids) / len(pids)
  for env in envs.envs:
    env._process.kill()  # pylint: disable=protected-access
  return {
      'reset_ms': {'mean': reset_ms},
      'step_ms': middle(steps),
      'memory_mb_per_env': memory,
  }


def part_pool(work: pathlib.Path) -> dict[str, Any]:
  """Our pool, with all environments at once."""
  env_spec = spec(str(work / 'cache'))
  commands = json.loads((work / 'commands.json').read_text())
  chosen = [
      t
      for t in tasks(env_spec, flags.FLAGS.games)
      for _ in range(flags.FLAGS.group)
  ]
  with pool_lib.EnvPool(env_spec, len(chosen), flags.FLAGS.workers) as envs:
    pids = envs.worker_pids
    before, start = sum(map(cpu, pids)), time.monotonic()
    envs.reset(dict(enumerate(chosen)))
    result = {
        'slots': len(chosen),
        'workers': len(pids),
        'reset_ms': {
            'mean': 1e3 * (sum(map(cpu, pids)) - before) / len(chosen)
        },
        'reset_all_wall_s': time.monotonic() - start,
    }
    steps, parent, wall = [], [], []
    for step in range(flags.FLAGS.steps):
      acts = {s: c[step] for s, c in enumerate(commands) if step < len(c)}
      before, start = sum(map(cpu, pids)), time.monotonic()
      parent.append(timed(lambda a=acts: envs.step(a))[1] / len(acts))
      wall.append(time.monotonic() - start)
      steps.append(1e3 * (sum(map(cpu, pids)) - before) / len(acts))
    return result | {
        'step_ms': middle(steps),
        'parent_ms_per_step': middle(parent),
        'step_all_wall_s': middle(wall),
        'memory_mb_all_slots': memory_mb(pids),
    }


PARTS = {
    'alone': part_alone,
    'stock': part_stock,
    'batch': part_batch,
    'pool': part_pool,
}


def table(found: dict[str, Any]) -> str:
  """The numbers as Markdown."""
  alone, pool = found['alone'], found['pool']
  stock, batch = found['stock'], found['batch']
  stock_step = stock['step_ms']['median']
  rows = [
      ('stock engine', stock, None),
      ('AsyncBatchEnv', batch, batch['memory_mb_per_env'] * pool['slots']),
      ('ours, one env', alone, None),
      (f'ours, {pool["workers"]} workers', pool, pool['memory_mb_all_slots']),
  ]
  lines = [
      '| | reset, CPU ms | step, CPU ms: median | mean | times stock |'
      f' memory of {pool["slots"]}, MB |',
      '|---|---|---|---|---|---|',
  ]
  for name, numbers, memory in rows:
    step = numbers['step_ms']
    lines.append(
        f'| {name} | {numbers["reset_ms"]["mean"]:.1f} | {step["median"]:.3f} |'
        f' {step["mean"]:.3f} | {stock_step / step["median"]:.0f} |'
        f' {f"{memory:.0f}" if memory else ""} |'
    )
  lines += [
      '',
      f'Loading a game for the first time: {alone["first_load_ms"]["mean"]:.0f}'
      f' ms. Parent, a step: {pool["parent_ms_per_step"]["median"]:.4f} ms. All'
      f' {pool["slots"]} slots, wall: {pool["step_all_wall_s"]["median"]:.3f} s a'
      f' step. {flags.FLAGS.resets} resets leave {alone["resets_growth_mb"]:.1f} MB.',
  ]
  return '\n'.join(lines)


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}')
  if flags.FLAGS.part:
    work = pathlib.Path(flags.FLAGS.work)
    found = PARTS[flags.FLAGS.part](work)
    (work / f'{flags.FLAGS.part}.json').write_text(json.dumps(found))
    os._exit(0)  # The native library must not be unloaded.
  spec('none').check()
  if flags.FLAGS.out:
    whole_file.check(flags.FLAGS.out, '--out')
  found = {'machine': f'{platform.machine()}, {os.cpu_count()} cores'}
  with tempfile.TemporaryDirectory() as work:
    for part in PARTS:
      arguments = [f'--part={part}', f'--work={work}', *sys.argv[1:]]
      command = [sys.executable, '-m', 'benchmarks.envs', *arguments]
      subprocess.run(command, check=True)
      found[part] = json.loads(
          (pathlib.Path(work) / f'{part}.json').read_text()
      )
  if flags.FLAGS.out:
    pathlib.Path(flags.FLAGS.out).write_text(json.dumps(found, indent=1) + '\n')
  print(table(found))


def define_flags() -> None:
  """Not at import: other programs have flags of these names."""
  flags.DEFINE_string(
      'data', '', 'As OfficialGames.folder; generated games if empty.'
  )
  flags.DEFINE_integer('games', 16, 'Games, of all task types.', lower_bound=1)
  flags.DEFINE_integer('group', 8, 'Environments of each game.', lower_bound=1)
  flags.DEFINE_integer(
      'steps', 50, 'Commands to each environment.', lower_bound=1
  )
  flags.DEFINE_integer('workers', 2, 'Processes of our pool.', lower_bound=1)
  flags.DEFINE_integer('stock_envs', 4, 'Stock environments.', lower_bound=1)
  flags.DEFINE_integer('stock_steps', 15, 'Commands to each.', lower_bound=1)
  flags.DEFINE_integer(
      'resets', 500, 'Resets of the memory test.', lower_bound=1
  )
  flags.DEFINE_string('out', '', 'JSON file to write the numbers to.')
  flags.DEFINE_string('part', '', 'Internal: what this process plays.')
  flags.DEFINE_string('work', '', 'Internal: folder shared by the parts.')


if __name__ == '__main__':
  define_flags()
  app.run(main)
