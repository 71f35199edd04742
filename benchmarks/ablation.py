"""Estimators compared: same policy, games, budget and seeds, paired with GRPO.

  python -m benchmarks.ablation --out=runs/ablation

Trains once a setting, method and seed, each in its own run folder
`<out>/<setting>/<method>/seed<n>`, all methods of a seed before the next seed:
whenever it is stopped, what is finished is paired. A finished run is skipped, a
stopped one goes on, one of other settings is refused. After each run the table
of all that is finished is written to `<out>/ablation.md`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import itertools
import math
import pathlib
import sys

from absl import app
from absl import flags
from absl import logging
import numpy as np

from benchmarks import quickstart
from hgpo_jax import config
from hgpo_jax.experiment import run_folder
from hgpo_jax.experiment import spec as spec_lib
from hgpo_jax.io import metrics

BUDGET = 'training/ablation.gin'
SETTINGS = {
    'mini': 'envs/household_mini.gin',
    'hard': 'envs/household_hard.gin',
}
SEEDS = {'mini': 5, 'hard': 3}
BASELINE = 'grpo'
# What the table calls a method: its gin file in gin/algorithms, or, where that
# is followed by '_observed', the same with states known by their text alone.
METHODS = {
    'grpo': 'GRPO',
    'gigpo': 'GiGPO',
    'hgpo': 'HGPO',
    'g2po': 'G2PO',
    'graphgpo': 'GraphGPO',
    'progpo': 'ProGPO',
    'covgpo_grpo': 'CovGPO over GRPO',
    'covgpo_hgpo': 'CovGPO over HGPO',
    'g2po_observed': 'G2PO, states as observations',
    'graphgpo_observed': 'GraphGPO, states as observations',
}
_OBSERVED = '_observed'
MAIN = [name for name in METHODS if not name.endswith(_OBSERVED)]
# How a method knows a state again, as published; the others by observation.
STATES = {'g2po': 'admissible', 'graphgpo': 'inventory'}
HELD_FIXED = (
    'Same for all: the packaged policy, the order of tasks and the seeds of'
    ' sampling and of minibatches, episodes an iteration, iterations, loss and'
    ' optimizer, division by the standard deviation, penalty 0.1 for an invalid'
    " action, gamma 0.95 (GraphGPO's 0.1 is the price of a step of distance)."
    ' States are known again as published: by observation, for G2PO with the'
    ' admissible commands, for GraphGPO with what was moved as well. Other knobs'
    ' are those of gin/algorithms. Steps without an advantage are dropped, so methods differ'
    ' in how many updates an iteration has.'
)


@dataclasses.dataclass(frozen=True)
class Job:
  """One training of the comparison."""

  setting: str
  method: str
  seed: int

  def folder(self, out: pathlib.Path) -> pathlib.Path:
    return out / self.setting / self.method / f'seed{self.seed}'

  @property
  def gin_files(self) -> list[str]:
    """The estimator last, then nothing that could replace what it set."""
    name = self.method.removesuffix(_OBSERVED)
    return [BUDGET, SETTINGS[self.setting], f'algorithms/{name}.gin']

  @property
  def bindings(self) -> list[str]:
    """All start with the same policy: what it can do is measured once a seed."""
    first = self.method == BASELINE
    return [
        f'Experiment.seed = {self.seed}',
        f'Evaluation.before_training = {first}',
        f'AlfworldEnv.state_key = {STATES.get(self.method, "observation")!r}',
    ]


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What a finished training measured; shares, not percent.

  Attributes:
    before: held-out success before the first iteration; nan where that was not
      evaluated.
    after: held-out success after the last.
    training: mean success of the episodes trained on, all iterations alike.
    failed: share of groups without a success, in the first iteration.
    updates: optimizer updates in all.
    minutes: of play, learning and evaluation.
  """

  before: float
  after: float
  training: float
  failed: float
  updates: float
  minutes: float


def jobs(
    settings: Sequence[str], methods: Sequence[str], seeds: Sequence[int]
) -> Iterator[Job]:
  """All methods of one seed, in all settings, before the next seed.

  Without `seeds` each setting has its own number of them.
  """
  of = {s: list(seeds) or list(range(SEEDS[s])) for s in settings}
  for seed in sorted(set(itertools.chain.from_iterable(of.values()))):
    for setting in settings:
      for method in methods:
        if seed in of[setting]:
          yield Job(setting, method, seed)


def finished(job: Job, run_dir: pathlib.Path, bindings: Sequence[str]) -> bool:
  """Whether the run folder holds all of this training.

  Raises:
    ConfigError: the settings are wrong, or it holds a training of others.
  """
  try:
    spec = config.load(
        job.gin_files, [*bindings, *job.bindings], root=spec_lib.Experiment
    )
    return config.check_resume(run_dir) and run_folder.finished(spec, run_dir)
  except config.ConfigError as error:
    raise config.ConfigError(
        f'{job.method} in the setting {job.setting}: {error.message}'
    ) from error


def read(run_dir: pathlib.Path) -> Outcome:
  """What a finished training measured."""
  lines = metrics.read(run_dir)
  played = [line for line in lines if 'rollout/success_rate' in line]
  return Outcome(
      before=lines[0].get('eval/success_rate', math.nan),
      after=lines[-1]['eval/success_rate'],
      training=float(np.mean([x['rollout/success_rate'] for x in played])),
      failed=played[0]['advantage/frac_failed_groups'],
      updates=sum(x['update/count'] for x in played),
      minutes=quickstart.minutes(lines),
  )


def table(found: Mapping[Job, Outcome], setting: str) -> str:
  """The Markdown table of a setting: a row a method that has finished runs."""
  lines = [
      '| estimator | seeds | held-out success before, % | after, % | sd over'
      ' seeds | minus GRPO, points (95 %) | success in training, % | minus'
      ' GRPO, points (95 %) | groups failed at first, % | updates | minutes |',
      '|' + '---|' * 11,
  ]
  for method, name in METHODS.items():
    mine = _by_seed(found, setting, method)
    if mine:
      cells = _cells(mine, _by_seed(found, setting, BASELINE), method)
      lines.append(f'| {name} | ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines)


def _by_seed(
    found: Mapping[Job, Outcome], setting: str, method: str
) -> dict[int, Outcome]:
  return {
      job.seed: outcome
      for job, outcome in found.items()
      if (job.setting, job.method) == (setting, method)
  }


def _cells(
    mine: Mapping[int, Outcome], theirs: Mapping[int, Outcome], method: str
) -> list[str]:
  values = {
      field.name: [getattr(outcome, field.name) for outcome in mine.values()]
      for field in dataclasses.fields(Outcome)
  }
  mean = {name: float(np.mean(x)) for name, x in values.items()}
  spread = 100 * np.std(values['after'], ddof=1) if len(mine) > 1 else np.nan
  gap = lambda field: '' if method == BASELINE else paired(mine, theirs, field)
  return [
      str(len(mine)),
      '' if math.isnan(mean['before']) else f'{100 * mean["before"]:.1f}',
      f'{100 * mean["after"]:.1f}',
      f'{spread:.1f}' if len(mine) > 1 else '',
      gap('after'),
      f'{100 * mean["training"]:.1f}',
      gap('training'),
      f'{100 * mean["failed"]:.0f}',
      f'{mean["updates"]:.0f}',
      f'{mean["minutes"]:.1f}',
  ]


def paired(
    mine: Mapping[int, Outcome], theirs: Mapping[int, Outcome], field: str
) -> str:
  """Mean difference over the seeds that both have, with its t-interval.

  A pair shares the seed, so the tasks, their order and the seed of sampling;
  what differs between seeds is not in the interval.
  """
  both = sorted(set(mine) & set(theirs))
  if not both:
    return ''
  gaps = [
      100 * (getattr(mine[s], field) - getattr(theirs[s], field)) for s in both
  ]
  mean, low, high = quickstart.over_seeds(gaps)
  if len(both) < 2:
    return f'{mean:+.1f}'
  pairs = '' if len(both) == len(mine) else f', {len(both)} pairs'
  return f'{mean:+.1f} ({low:+.1f} to {high:+.1f}{pairs})'


def page(found: Mapping[Job, Outcome], where: Sequence[str]) -> str:
  """The whole report: what was held fixed, a table a setting, the machine."""
  parts = [HELD_FIXED] if found else ['No training has finished yet.']
  for setting, gin_file in SETTINGS.items():
    if any(job.setting == setting for job in found):
      parts.append(f'`{gin_file}`:\n\n{table(found, setting)}')
  return '\n\n'.join([*parts, *where]) + '\n'


def _report(out: pathlib.Path, bindings: Sequence[str]) -> str:
  """Writes and returns the page of everything finished under `out`."""
  found, where = {}, {}
  for job in jobs(list(SETTINGS), list(METHODS), _seeds_of(out)):
    run_dir = job.folder(out)
    if run_dir.is_dir() and finished(job, run_dir, bindings):
      found[job] = read(run_dir)
      where[quickstart.where(run_dir)] = None
  text = page(found, list(where))
  out.mkdir(parents=True, exist_ok=True)
  (out / 'ablation.md').write_text(text)
  return text


def _seeds_of(out: pathlib.Path) -> list[int]:
  names = {path.name.removeprefix('seed') for path in out.glob('*/*/seed*')}
  return sorted({int(name) for name in names if name.isdecimal()})


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}')
  logging.set_verbosity(logging.WARNING)
  given = flags.FLAGS
  for name, known in (('settings', SETTINGS), ('methods', METHODS)):
    if not getattr(given, name) or not set(getattr(given, name)) <= set(known):
      raise app.UsageError(
          f'--{name}={",".join(getattr(given, name))}; expected some of'
          f' {", ".join(known)}'
      )
  out, bindings = pathlib.Path(given.out), given.gin_bindings
  wanted = [*jobs(given.settings, given.methods, [*map(int, given.seeds)])]
  try:
    # All of them first: a binding may be wrong for the last method alone.
    left = [
        job for job in wanted if not finished(job, job.folder(out), bindings)
    ]
    for number, job in enumerate(left if given.train else (), 1):
      run_dir = job.folder(out)
      print(f'{number} of {len(left)}: {run_dir}', flush=True)
      quickstart.train(run_dir, job.gin_files, [*bindings, *job.bindings])
      _report(out, bindings)
    print(f'\n{_report(out, bindings)}')
  except config.ConfigError as error:
    sys.exit(f'error: {error}')


def define_flags() -> None:
  """Not at import: the training's own flags have some of these names."""
  flags.DEFINE_string('out', 'runs/ablation', 'Folder of all run folders.')
  flags.DEFINE_list('settings', list(SETTINGS), 'Games, by commas.')
  flags.DEFINE_list('methods', MAIN, 'Estimators, by commas.')
  flags.DEFINE_list('seeds', [], 'Seeds, by commas; by default 5, 3 if hard.')
  flags.register_validator(
      'seeds',
      quickstart.are_seeds,
      'expected numbers, none twice',
  )
  flags.DEFINE_bool('train', True, 'False prints what is finished only.')
  flags.DEFINE_multi_string(
      'gin_bindings', [], 'Bindings for every run; repeatable.'
  )


if __name__ == '__main__':
  define_flags()
  app.run(main)
