"""How faithful each estimator's advantages are to the true ones.

  python -m benchmarks.credit_fidelity --out=runs/fidelity \\
      --policy=low=tiny_household --policy=high=exported

For each policy (a Hugging Face folder, or the name of a packaged one; see
hgpo_jax.export) it plays generated household games, chooses steps, measures
their true advantages by playing on from them many times, and compares them
with what every estimator of gin/algorithms gives the same steps in groups of
several sizes. Episodes are kept in <out>/rollouts; a stopped run goes on when
the command is given again. Writes <out>/fidelity.md and <out>/fidelity.svg.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import json
import math
import pathlib
import sys
import time

from absl import app
from absl import flags
from absl import logging

from benchmarks import fidelity_plot
from hgpo_jax import config
from hgpo_jax.advantages import base
from hgpo_jax.credit import continuations
from hgpo_jax.credit import fidelity
from hgpo_jax.credit import gradients
from hgpo_jax.credit import methods
from hgpo_jax.credit import probes
from hgpo_jax.credit import truth
from hgpo_jax.experiment import runtime
from hgpo_jax.experiment import spec as spec_lib
from hgpo_jax.experiment import task_order

Table = dict[str, dict[int, dict[str, fidelity.Interval]]]

_HEADS = {
    'bias': 'bias²',
    'variance': 'variance',
    'rank': 'rank correlation',
    'sign': 'right sign',
    'cosine': 'gradient cosine',
}


@dataclasses.dataclass(frozen=True)
class Result:
  """What the study found of one policy."""

  success: float
  probes: int
  seconds: float
  noise: float
  table: Table


def study(
    policies: Mapping[str, str],
    estimators: Mapping[str, base.Estimator],
    spec: spec_lib.Experiment,
    design: probes.Design,
    settings: fidelity.Study,
    out: pathlib.Path,
) -> dict[str, Result]:
  """Plays and compares; the same tasks for every policy.

  The table and the picture are written anew after each policy.
  """
  _keep_to(out, {'design': dataclasses.asdict(design), 'policies': policies})
  tasks = task_order.choose(
      spec.env.split(spec.split), design.tasks, design.seed, 0
  )
  found = {}
  with runtime.open_player(spec) as player:
    for name, folder in policies.items():
      start = time.monotonic()
      source = dataclasses.replace(spec.policy, folder=folder)
      params = player.put(source.load(player.model))
      play = continuations.CollectorPlay(
          player.collector, params, design.seed, spec.temperature
      )
      saved = continuations.Saved(play, out / 'rollouts' / name)
      sample = probes.sample(design, tasks, saved)
      played = time.monotonic() - start
      _say(
          f'{name}: success {sample.success_rate:.2f}, {len(sample.probes)}'
          f' steps, {design.episodes} episodes played or read in {played:.0f} s'
      )
      gram_PP = gradients.gram(
          player.model,
          params,
          [probe.step for probe in sample.probes],
          spec.temperature,
          spec.minibatches,
      )
      table = fidelity.compare(settings, sample, estimators, gram_PP, _say)
      seconds = time.monotonic() - start
      _say(f'{name}: {seconds - played:.0f} s to compare')
      found[name] = Result(
          sample.success_rate,
          len(sample.probes),
          seconds,
          truth.measure(sample).noise,
          table,
      )
      write(found, design, settings, out)
  return found


def markdown(
    results: Mapping[str, Result],
    design: probes.Design,
    settings: fidelity.Study,
) -> str:
  """The tables, one a policy, with what they were made from."""
  lines = [
      f'{design.tasks} tasks, {design.probes} steps of each,'
      f' {design.continuations} episodes from before and from after each step,'
      f' groups made {settings.replicates} times from {design.pool} free'
      ' episodes a task. 95 % intervals: bootstrap over tasks.'
  ]
  for name, result in results.items():
    lines += [
        '',
        f'**{name}**: success {100 * result.success:.0f} %,'
        f' {result.probes} steps, {result.seconds / 60:.0f} minutes. The exact'
        f' advantages would have a bias² of {result.noise:.2f}: the chance'
        ' in measuring them.',
        '',
        '| estimator | group | ' + ' | '.join(_HEADS.values()) + ' |',
        '|---|---|' + '---|' * len(_HEADS),
    ]
    for estimator, sizes in result.table.items():
      for size, row in sizes.items():
        cells = ' | '.join(
            '' if not size and key in ('bias', 'variance') else _cell(row[key])
            for key in _HEADS
        )
        lines.append(f'| {estimator} | {size or ""} | {cells} |')
  return '\n'.join(lines) + '\n'


def _cell(found: fidelity.Interval) -> str:
  if math.isnan(found.value):
    return '–'
  return f'{found.value:.2f} ({found.low:.2f} to {found.high:.2f})'


def _keep_to(out: pathlib.Path, settings: dict[str, object]) -> None:
  """Refuses to mix episodes of different studies in one folder."""
  path = out / 'study.json'
  if path.exists() and json.loads(path.read_text()) != settings:
    raise ValueError(
        f'{path} is of a study with other settings: {path.read_text()}; these'
        f' are {json.dumps(settings)}. Give another --out'
    )
  out.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(settings))


def policies_of(pairs: Sequence[str]) -> dict[str, str]:
  """Folders by name, from 'name=folder'."""
  found = {}
  for pair in pairs:
    name, _, folder = pair.partition('=')
    # The name is that of a folder of episodes.
    if not folder or name in ('', '.', '..') or '/' in name:
      raise ValueError(f'--policy={pair}; expected --policy=name=folder')
    if name in found:
      raise ValueError(
          f'--policy={pair}, and {name} is {found[name]} already; expected a'
          ' name of its own for each policy'
      )
    found[name] = folder
  return found


def write(
    results: Mapping[str, Result],
    design: probes.Design,
    settings: fidelity.Study,
    out: pathlib.Path,
) -> None:
  """Writes fidelity.md and fidelity.svg."""
  text = markdown(results, design, settings)
  (out / 'fidelity.md').write_text(text, encoding='utf-8')
  panels = {
      f'{name}, {100 * result.success:.0f} % solved': result.table
      for name, result in results.items()
  }
  picture = fidelity_plot.draw(
      panels, {k: _HEADS[k] for k in ('rank', 'cosine')}
  )
  (out / 'fidelity.svg').write_text(picture, encoding='utf-8')


def _say(text: str) -> None:
  print(text, flush=True)


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}')
  logging.set_verbosity(logging.WARNING)  # Gin files are read by the dozen.
  given = flags.FLAGS
  design = probes.Design(
      given.tasks,
      given.probes,
      given.continuations,
      given.pool,
      given.seed,
  )
  settings = fidelity.Study(
      tuple(map(int, given.group_sizes)),
      given.replicates,
      given.draws,
      given.seed,
  )
  out = pathlib.Path(given.out)
  try:
    policies = policies_of(given.policy)
    estimators = methods.load(given.estimator)
    spec = config.load(
        [given.gin_file], given.gin_bindings, root=spec_lib.Experiment
    )
    study(policies, estimators, spec, design, settings, out)
  except (OSError, ValueError, base.EstimatorError) as error:
    sys.exit(f'error: {error}')
  _say((out / 'fidelity.md').read_text())


def define_flags() -> None:
  """Not at import: the training's own flags have some of these names."""
  flags.DEFINE_string('out', 'runs/fidelity', 'Folder of the study.')
  flags.DEFINE_multi_string(
      'policy', ['packaged=tiny_household'], 'name=folder; repeatable.'
  )
  flags.DEFINE_multi_string(
      'estimator', [], 'Gin file of an estimator; repeatable. Default: all.'
  )
  flags.DEFINE_string(
      'gin_file', 'runs/quickstart.gin', 'The games, prompts and sampler.'
  )
  flags.DEFINE_multi_string('gin_bindings', [], 'Repeatable.')
  flags.DEFINE_integer('tasks', 48, 'Tasks of each policy.', lower_bound=1)
  flags.DEFINE_integer('probes', 3, 'Steps of each task.', lower_bound=1)
  flags.DEFINE_integer(
      'continuations',
      64,
      'Episodes from before, and from after, each step.',
      lower_bound=1,
  )
  flags.DEFINE_integer('pool', 48, 'Free episodes of each task.', lower_bound=1)
  flags.DEFINE_list('group_sizes', ['4', '8', '16'], 'G.')
  flags.register_validator(
      'group_sizes',
      lambda given: given and all(x.isdecimal() and int(x) > 1 for x in given),
      'expected numbers of at least 2',
  )
  flags.DEFINE_integer('replicates', 16, 'Groups a step.', lower_bound=1)
  flags.DEFINE_integer('draws', 400, 'Of the bootstrap.', lower_bound=1)
  flags.DEFINE_integer('seed', 0, 'Of everything.', lower_bound=0)


if __name__ == '__main__':
  define_flags()
  app.run(main)
