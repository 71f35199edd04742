"""The quick start over several seeds: the table that the README shows.

  python -m benchmarks.quickstart --out=runs/quickstart-seeds

Trains once a seed, one after another, with the command of `make quickstart`,
each in its own run folder `<out>/seed<n>`. That command leaves a finished run
alone, goes on with one that was stopped and refuses one of other settings, so
the same command here resumes, or only prints the table.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import json
import pathlib
import subprocess
import sys

from absl import app
from absl import flags
import numpy as np
from scipy import special

from hgpo_jax.experiment import evaluate
from hgpo_jax.io import metrics


@dataclasses.dataclass(frozen=True)
class Run:
  """What a finished run measured.

  Attributes:
    seed: of the run.
    before: evaluation before the first iteration.
    after: evaluation after the last iteration.
    minutes: of play, learning and evaluation, compilation included; the start
      of the process and the loading of weights are not.
  """

  seed: int
  before: evaluate.Result
  after: evaluate.Result
  minutes: float


def eval_path(run_dir: pathlib.Path, iteration: int) -> pathlib.Path:
  """The evaluation of the policy before an iteration."""
  return run_dir / 'eval' / f'iteration_{iteration:06d}.json'


def read(run_dir: pathlib.Path, seed: int) -> Run:
  """What a finished run measured."""
  lines = metrics.read(run_dir)
  return Run(
      seed,
      evaluate.load(eval_path(run_dir, 0)),
      evaluate.load(eval_path(run_dir, lines[-1]['iteration'])),
      minutes(lines),
  )


def minutes(lines: Sequence[dict[str, float]]) -> float:
  """Of play, learning and evaluation, from the metrics of a run."""
  seconds = sum(
      value
      for line in lines
      for name, value in line.items()
      if name.startswith('time/') and name.endswith('_s')
  )
  return seconds / 60


def over_seeds(values: Sequence[float]) -> tuple[float, float, float]:
  """(mean, low, high): the 95 % t-interval of the mean over seeds.

  mean +- t_{0.975, n-1} s / sqrt(n), with s of ddof 1. It holds what differs
  between trainings; with one seed it is not defined and covers everything.
  """
  mean, count = float(np.mean(values)), len(values)
  if count < 2:
    return mean, -np.inf, np.inf
  half = special.stdtrit(count - 1, 0.975) * np.std(values, ddof=1)
  half /= np.sqrt(count)
  return mean, mean - half, mean + half


def pooled(results: Sequence[evaluate.Result]) -> tuple[float, float, float]:
  """(mean, low, high): Wilson's interval, each game counted once.

  All seeds are evaluated on the same games, so a game's successes over seeds
  are one fractional success, not several games. It holds which games the split
  happens to have.
  """
  games = results[0].overall.games
  if any(r.overall.games != games for r in results):
    raise ValueError(
        'runs were evaluated on different numbers of games:'
        f' {[r.overall.games for r in results]}; expected the same, remove the'
        ' runs made with other settings'
    )
  mean = float(np.mean([r.overall.mean for r in results]))
  return mean, *evaluate.wilson(mean * games, games)


def table(runs: Sequence[Run]) -> str:
  """The Markdown table: a row a seed, then the means over seeds."""
  lines = [
      '| seed | held-out success before, % | after, % | gain, points |'
      ' inadmissible before, % | after, % | minutes |',
      '|---|---|---|---|---|---|---|',
  ]
  for run in runs:
    rates = [
        _interval(r.mean, r.low, r.high)
        for r in (run.before.overall, run.after.overall)
    ]
    lines.append(_row(str(run.seed), rates, [run]))
  before, after = [r.before for r in runs], [r.after for r in runs]
  means = [_interval(*pooled(results)) for results in (before, after)]
  lines.append(_row('mean, Wilson over games', means, runs))
  if len(runs) > 1:
    spread = [
        _interval(*over_seeds([r.overall.mean for r in results]))
        for results in (before, after)
    ]
    lines.append(_row('mean, t-interval over seeds', spread, runs))
  return '\n'.join(lines)


def _interval(mean: float, low: float, high: float) -> str:
  if low == high:  # Nothing varied, so no interval was measured.
    return f'{100 * mean:.1f}'
  return f'{100 * mean:.1f} ({100 * low:.1f} to {100 * high:.1f})'


def _row(name: str, rates: Sequence[str], runs: Sequence[Run]) -> str:
  mean = lambda values: float(np.mean(list(values)))
  gain = mean(r.after.overall.mean - r.before.overall.mean for r in runs)
  cells = [
      name,
      *rates,
      f'{100 * gain:+.1f}',
      f'{100 * mean(r.before.inadmissible for r in runs):.1f}',
      f'{100 * mean(r.after.inadmissible for r in runs):.1f}',
      f'{mean(r.minutes for r in runs):.1f}',
  ]
  return '| ' + ' | '.join(cells) + ' |'


def where(run_dir: pathlib.Path) -> str:
  """One line that says on what the run was made."""
  record = json.loads((run_dir / 'run.json').read_text())
  attempt = record['attempts'][-1]
  commit = (attempt['git'] or {}).get('commit', 'unknown')
  return (
      f'{attempt["platform"]}, Python {attempt["python"]}, jax'
      f' {attempt["versions"]["jax"]}, {len(attempt["devices"])} device(s)'
      f' {attempt["devices"][0]}, commit {commit[:12]}'
  )


def train(
    run_dir: pathlib.Path, gin_files: Sequence[str], bindings: Sequence[str]
) -> None:
  """Trains in a process of its own; ends this one if the training fails."""
  command = [
      sys.executable,
      '-m',
      'hgpo_jax.train',
      *(f'--gin_file={name}' for name in gin_files),
      *(f'--gin_bindings={binding}' for binding in bindings),
      f'--run_dir={run_dir}',
  ]
  code = subprocess.run(command).returncode
  if code:
    sys.exit(
        f'error: the training in {run_dir} ended with code {code}; the same'
        ' command goes on'
    )


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}')
  runs = []
  for seed in map(int, flags.FLAGS.seeds):
    run_dir = pathlib.Path(flags.FLAGS.out) / f'seed{seed}'
    bindings = [*flags.FLAGS.gin_bindings, f'Experiment.seed = {seed}']
    train(run_dir, [flags.FLAGS.gin_file], bindings)
    runs.append(read(run_dir, seed))
    print(f'{run_dir}: {where(run_dir)}', flush=True)
  first = runs[0].before
  print(
      f'\n{first.overall.games} games of {first.split!r}, temperature'
      f' {first.temperature}\n\n{table(runs)}'
  )


def are_seeds(given: Sequence[str]) -> bool:
  """Whether a flag holds numbers, none of them twice."""
  return all(map(str.isdecimal, given)) and len(set(map(int, given))) == len(
      given
  )


def define_flags() -> None:
  """Not at import: the training's own flags have some of these names."""
  flags.DEFINE_string(
      'out', 'runs/quickstart-seeds', 'Folder that holds a run folder a seed.'
  )
  flags.DEFINE_list('seeds', ['0', '1', '2'], 'Seeds, by commas.')
  flags.register_validator(
      'seeds',
      are_seeds,
      'expected numbers, none twice',
  )
  flags.DEFINE_string('gin_file', 'runs/quickstart.gin', 'What to train.')
  flags.DEFINE_multi_string(
      'gin_bindings', [], 'Bindings for every seed; repeatable.'
  )


if __name__ == '__main__':
  define_flags()
  app.run(main)
