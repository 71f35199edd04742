"""Estimators compared: same policy, games, budget and seeds, paired with GRPO.

  python -m benchmarks.ablation --out=runs/ablation

Trains once a setting, method and seed, each in its own run folder
`<out>/<setting>/<method>/seed<n>`, all methods of a seed before the next seed:
whenever it is stopped, what is finished is paired. A finished run is skipped, a
stopped one goes on, one of other settings is refused. After each run the table
of all that is finished is written to `<out>/ablation.md`.

A method of one's own is a gin file that binds `Experiment.estimator`:

  python -m benchmarks.ablation --methods=grpo,hgpo,my.gin
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import dataclasses
import itertools
import pathlib
import sys

from absl import app
from absl import flags
from absl import logging

from benchmarks import ablation_methods
from benchmarks import ablation_table
from benchmarks import bindings as bindings_lib
from benchmarks import quickstart
from hgpo_jax import config
from hgpo_jax.experiment import run_folder
from hgpo_jax.experiment import spec as spec_lib

BUDGET = 'training/ablation.gin'
SETTINGS = {
    'mini': 'envs/household_mini.gin',
    'hard': 'envs/household_hard.gin',
}
SEEDS = {'mini': 5, 'hard': 3}

HELD_FIXED = (
    'Same for all: the packaged policy, the order of tasks and the seeds of'
    ' sampling and of minibatches, episodes an iteration, iterations, loss and'
    ' optimizer, division by the standard deviation, penalty 0.1 for an invalid'
    " action, gamma 0.95 (GraphGPO's 0.1 is the price of a step of distance)."
    ' States are known again as published: by observation, for G2PO with the'
    ' admissible commands, for GraphGPO with what was moved as well, for CovGPO'
    ' as for its base. Other knobs are those of gin/algorithms; for a gin file of'
    ' your own, whatever it binds.'
    ' Steps without an advantage are dropped, so methods differ in how many'
    ' updates an iteration has.'
)


@dataclasses.dataclass(frozen=True)
class Job:
  """One training of the comparison."""

  setting: str
  method: ablation_methods.Method
  seed: int

  def folder(self, out: pathlib.Path) -> pathlib.Path:
    return out / self.setting / self.method.name / f'seed{self.seed}'

  @property
  def gin_files(self) -> list[str]:
    """The estimator last, then nothing that could replace what it set."""
    return [BUDGET, SETTINGS[self.setting], self.method.gin_file]

  @property
  def bindings(self) -> list[str]:
    """All start with the same policy: what it can do is measured once a seed."""
    first = self.method == ablation_methods.BASELINE
    bindings = [
        f'Experiment.seed = {self.seed}',
        f'Evaluation.before_training = {first}',
    ]
    if self.method.state_key is not None:
      bindings.append(f'AlfworldEnv.state_key = {self.method.state_key!r}')
    return bindings


def jobs(
    settings: Sequence[str],
    compared: Sequence[ablation_methods.Method],
    seeds: Sequence[int],
) -> Iterator[Job]:
  """All methods of one seed, in all settings, before the next seed.

  Without `seeds` each setting has its own number of them.
  """
  of = {s: list(seeds) or list(range(SEEDS[s])) for s in settings}
  for seed in sorted(set(itertools.chain.from_iterable(of.values()))):
    for setting in settings:
      for method in compared:
        if seed in of[setting]:
          yield Job(setting, method, seed)


def _own(compared: Sequence[ablation_methods.Method]) -> dict[str, str]:
  """What bindings may not set, and what to do instead."""
  own = {
      'Experiment.seed': 'give --seeds',
      'Experiment.estimator': 'name its gin file in --methods',
      'Evaluation.before_training': 'the baseline alone is evaluated then',
  }
  fixed = [m.name for m in compared if m.state_key is not None]
  if fixed:
    own['AlfworldEnv.state_key'] = (
        f'that of {", ".join(fixed)} is fixed; bind it in a gin file of your'
        ' own, named in --methods'
    )
  return own


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
    # Run folders have no flag of their own here.
    message = error.message.replace('--run_dir', '--out')
    raise config.ConfigError(
        f'{job.method.name} in the setting {job.setting}: {message}'
    ) from error


def page(
    found: Mapping[str, ablation_table.Methods], where: Sequence[str]
) -> str:
  """The whole report: what was held fixed, a table a setting, the machine."""
  parts = [HELD_FIXED] if found else ['No training has finished yet.']
  for setting, runs in found.items():
    parts.append(
        f'`{SETTINGS[setting]}`:\n\n'
        f'{ablation_table.table(runs, ablation_methods.BASELINE.label)}'
    )
  return '\n\n'.join([*parts, *where]) + '\n'


def _report(
    out: pathlib.Path,
    wanted: Sequence[ablation_methods.Method],
    bindings: Sequence[str],
) -> str:
  """Writes and returns the page of everything finished under `out`."""
  found, where = {}, {}
  every = dict.fromkeys([*ablation_methods.METHODS.values(), *wanted])
  seeds = _seeds_of(out)
  for setting, method, seed in itertools.product(SETTINGS, every, seeds):
    job = Job(setting, method, seed)
    run_dir = job.folder(out)
    if run_dir.is_dir() and finished(job, run_dir, bindings):
      runs = found.setdefault(setting, {}).setdefault(method.label, {})
      runs[seed] = ablation_table.read(run_dir)
      where[quickstart.where(run_dir)] = None
  text = page(found, [*_passed_over(out, every), *where])
  out.mkdir(parents=True, exist_ok=True)
  (out / 'ablation.md').write_text(text)
  return text


def _passed_over(
    out: pathlib.Path, known: Iterable[ablation_methods.Method]
) -> list[str]:
  """Names the runs whose gin file is not known, if there are any."""
  folders = {path.parent.name for path in out.glob('*/*/seed*')}
  rest = sorted(folders - {method.name for method in known})
  return [
      f'Not in a table: runs of `{name}`; name its gin file in --methods.'
      for name in rest
  ]


def _seeds_of(out: pathlib.Path) -> list[int]:
  names = {path.name.removeprefix('seed') for path in out.glob('*/*/seed*')}
  return sorted({int(name) for name in names if name.isdecimal()})


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}')
  logging.set_verbosity(logging.WARNING)
  given = flags.FLAGS
  out, bindings = pathlib.Path(given.out), given.gin_bindings
  try:
    compared = ablation_methods.find(given.methods)
    bindings_lib.refuse(bindings, _own(compared))
    wanted = [*jobs(given.settings, compared, [*map(int, given.seeds)])]
    # All of them first: a binding may be wrong for the last method alone, or
    # not be that of what lies in `out`, with which the table would end.
    left = [
        job for job in wanted if not finished(job, job.folder(out), bindings)
    ]
    report = _report(out, compared, bindings)
    for number, job in enumerate(left if given.train else (), 1):
      run_dir = job.folder(out)
      print(f'{number} of {len(left)}: {run_dir}', flush=True)
      quickstart.train(run_dir, job.gin_files, [*bindings, *job.bindings])
      report = _report(out, compared, bindings)
    print(f'\n{report}')
  except (OSError, ValueError) as error:
    sys.exit(f'error: {error}')


def define_flags() -> None:
  """Not at import: the training's own flags have some of these names."""
  flags.DEFINE_string('out', 'runs/ablation', 'Folder of all run folders.')
  flags.DEFINE_list('settings', list(SETTINGS), 'Games, by commas.')
  flags.register_validator(
      'settings',
      lambda given: given and set(given) <= set(SETTINGS),
      f'expected some of {", ".join(SETTINGS)}',
  )
  flags.DEFINE_list(
      'methods', ablation_methods.MAIN, 'Estimators or gin files, by commas.'
  )
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
