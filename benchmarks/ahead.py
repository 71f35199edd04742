"""What an iteration takes with rollouts ahead of the learner, and without.

  python -m benchmarks.ahead

trains the quick start's policy in environments that wait 20 ms a step, by turns
with Experiment.rollout_lag = 0 and 1, in one process, and prints the seconds of
an iteration, of the wall clock and of this process's CPU. The first iterations,
which compile, and the last, beside which nothing is played, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import time

from absl import app
from absl import flags
import jax

from hgpo_jax import config
from hgpo_jax import whole_file
from hgpo_jax.experiment import ahead
from hgpo_jax.experiment import arithmetic
from hgpo_jax.experiment import learn
from hgpo_jax.experiment import runtime
from hgpo_jax.experiment import spec as spec_lib

_GIN = pathlib.Path(__file__).with_suffix('.gin')
_WARM = 2
_Row = Mapping[str, float]


def measure(spec: spec_lib.Experiment) -> list[_Row]:
  """Trains, and returns a row for each iteration that counts."""
  rows = []
  with contextlib.ExitStack() as stack:
    player = stack.enter_context(runtime.open_player(spec))
    learner = runtime.make_learner(spec, player)
    rollouts = stack.enter_context(ahead.Rollouts(spec, player, learner))
    state = learner.state
    for iteration in range(spec.iterations):
      wall, cpu = time.monotonic(), time.process_time()
      found = rollouts.take(iteration, state)
      rollouts.begin(iteration + 1, state)
      start = time.monotonic()
      state, learned = learn.learn(
          *(spec, player, learner, state, found.played.kept, iteration),
          found.lag,
      )
      jax.block_until_ready(state)
      end = time.monotonic()
      rows.append(
          {
              'wall_s': end - wall,
              'cpu_s': time.process_time() - cpu,
              'rollout_s': found.metrics['time/rollout_s'],
              'wait_s': start - wall,
              'learn_s': end - start,
              'steps': learned['batch/steps'],
              'lag': float(found.lag),
          }
      )
  return rows[_WARM:-1]


def table(found: Mapping[int, Sequence[_Row]]) -> str:
  """Medians over iterations of each lag, and lag 1 over lag 0 a step."""
  names = 'wall_s', 'cpu_s', 'rollout_s', 'wait_s', 'learn_s'
  middle = lambda lag, value: statistics.median(map(value, found[lag]))
  lines = [
      '| rollout_lag | wall s | CPU s | playing s | waited for it s | learning'
      ' s | steps | wall ms a step | CPU ms a step |',
      '|---|---|---|---|---|---|---|---|---|',
  ]
  a_step = {}
  for lag in found:
    cells = [f'{middle(lag, lambda row, n=n: row[n]):.2f}' for n in names]
    cells.append(f'{middle(lag, lambda row: row["steps"]):.0f}')
    a_step[lag] = [
        1e3 * middle(lag, lambda row, n=n: row[n] / row['steps'])
        for n in names[:2]
    ]
    cells += [f'{value:.2f}' for value in a_step[lag]]
    lines.append(f'| {lag} | ' + ' | '.join(cells) + ' |')
  wall, cpu = (new / old for old, new in zip(a_step[0], a_step[1]))
  lines.append(f'\n1 over 0, a step: {wall:.2f} of the wall time, {cpu:.2f} of')
  lines[-1] += ' the CPU time of this process'
  return '\n'.join(lines)


def main(argv: Sequence[str]) -> None:
  del argv
  chosen = flags.FLAGS
  spec = config.load(
      [str(_GIN)],
      [
          f'Experiment.iterations = {chosen.iterations + _WARM + 1}',
          *chosen.gin_bindings,
      ],
      root=spec_lib.Experiment,
  )
  arithmetic.check(spec)
  if chosen.out:
    whole_file.check(chosen.out, '--out')
  found = {0: [], 1: []}
  for _ in range(chosen.rounds):
    for lag, rows in found.items():
      rows += measure(dataclasses.replace(spec, rollout_lag=lag))
  print(
      f'{len(found[0])} iterations each, {os.cpu_count()} CPUs,'
      f' {jax.devices()[0].device_kind}, load {os.getloadavg()[0]:.1f}\n'
  )
  print(table(found))
  if chosen.out:
    pathlib.Path(chosen.out).write_text(json.dumps(found), encoding='utf-8')


def define_flags() -> None:
  """Not at import: other programs have flags of these names."""
  flags.DEFINE_integer(
      'iterations', 5, 'Iterations that count, each round.', lower_bound=1
  )
  flags.DEFINE_integer(
      'rounds', 2, 'How often both lags take their turn.', lower_bound=1
  )
  flags.DEFINE_multi_string('gin_bindings', [], 'Such as a smaller run.')
  flags.DEFINE_string('out', '', 'Where to write the rows, JSON.')


if __name__ == '__main__':
  define_flags()
  app.run(main)
