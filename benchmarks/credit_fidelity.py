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
import pathlib
import sys
import time

from absl import app
from absl import flags
from absl import logging

from benchmarks import bindings
from benchmarks import fidelity_plot
from benchmarks import fidelity_table
from hgpo_jax import config
from hgpo_jax import run_record
from hgpo_jax import whole_file
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


def study(
    policies: Mapping[str, str],
    estimators: Mapping[str, base.Estimator],
    spec: spec_lib.Experiment,
    design: probes.Design,
    settings: fidelity.Study,
    out: pathlib.Path,
) -> dict[str, fidelity_table.Result]:
  """Plays and compares; the same tasks for every policy.

  The table and the picture are written anew after each policy.
  """
  if design.pool < max(settings.group_sizes) - 1:
    raise ValueError(
        f'--pool={design.pool} is too small for --group_sizes='
        f'{",".join(map(str, settings.group_sizes))}; expected at least'
        f' {max(settings.group_sizes) - 1}, all of a group but one'
    )
  sources = {
      name: dataclasses.replace(spec.policy, folder=folder)
      for name, folder in policies.items()
  }
  for source in sources.values():
    source.check()
    source.check_weights()
  _keep_to(out, _settings(policies, spec, design))
  tasks = task_order.choose(
      spec.env.split(spec.split), design.tasks, design.seed, 0
  )
  found = {}
  with runtime.open_player(spec) as player:
    for name, source in sources.items():
      start = time.monotonic()
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
      comparison = fidelity.compare(settings, sample, estimators, gram_PP, _say)
      seconds = time.monotonic() - start
      _say(f'{name}: {seconds - played:.0f} s to compare')
      found[name] = fidelity_table.Result(
          sample.success_rate,
          len(sample.probes),
          seconds,
          truth.measure(sample).noise,
          comparison,
      )
      write(found, design, settings, out)
  return found


def _settings(
    policies: Mapping[str, str],
    spec: spec_lib.Experiment,
    design: probes.Design,
) -> dict[str, object]:
  """What episodes depend on: 'policy.low', 'env.max_steps' and so on."""
  found = {f'policy.{name}': folder for name, folder in policies.items()}
  parts = {'design': design} | {
      name: getattr(spec, name)
      for name in ('env', 'collector', 'sampler', 'split', 'temperature')
  }
  for name, part in parts.items():
    for key, value in run_record.flatten(part).items():
      found[name + key.removeprefix(type(part).__name__)] = value
  return found


def _keep_to(out: pathlib.Path, settings: Mapping[str, object]) -> None:
  """Refuses to mix episodes of different studies in one folder."""
  path = out / 'study.json'
  if any((out / 'rollouts').rglob('*.jsonl.gz')):
    changed = run_record.differences(_read(path), settings)
    if changed:
      raise ValueError(
          f'{out} holds a study with other settings:\n'
          + '\n'.join(changed)
          + '\nGo on with the old values, or give another --out'
      )
  out.mkdir(parents=True, exist_ok=True)
  with whole_file.replacing(path) as partial:
    partial.write_text(json.dumps(settings, indent=1) + '\n')


def _read(path: pathlib.Path) -> dict[str, object]:
  try:
    found = json.loads(path.read_text(encoding='utf-8'))
  except (OSError, ValueError) as error:
    found = error
  if not isinstance(found, dict):
    raise ValueError(
        f'{path} does not say what the episodes beside it are of ({found!r});'
        ' give another --out'
    )
  return found


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
    results: Mapping[str, fidelity_table.Result],
    design: probes.Design,
    settings: fidelity.Study,
    out: pathlib.Path,
) -> None:
  """Writes fidelity.md and fidelity.svg."""
  text = fidelity_table.markdown(results, design, settings)
  (out / 'fidelity.md').write_text(text, encoding='utf-8')
  panels = {
      f'{name}, {100 * result.success:.0f} % solved': result.comparison.figures
      for name, result in results.items()
  }
  picture = fidelity_plot.draw(
      panels, {k: fidelity_table.HEADS[k] for k in ('rank', 'cosine')}
  )
  (out / 'fidelity.svg').write_text(picture, encoding='utf-8')


def _load(gin_file: str, given: Sequence[str]) -> spec_lib.Experiment:
  """The games, prompts and sampler, and an estimator that is not compared."""
  spec = config.load([gin_file], given, root=spec_lib.Experiment)
  named = 'write a gin file of such an estimator and name it in --estimator'
  parts = [spec.estimator, getattr(spec.estimator, 'base', spec.estimator)]
  instead = {type(part).__name__: named for part in parts} | {
      'Experiment.estimator': named,
      'Experiment.seed': 'give --seed',
      'Experiment.group_size': 'give --group_sizes',
  }
  bindings.refuse(given, instead)
  return spec


def _say(text: str) -> None:
  print(text, flush=True)


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}')
  logging.set_verbosity(logging.WARNING)  # Gin files are read by the dozen.
  given = flags.FLAGS
  out = pathlib.Path(given.out)
  try:
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
        given.baseline,
    )
    policies = policies_of(given.policy)
    estimators = methods.load(given.estimator)
    if given.baseline not in estimators:
      expected = f'expected one of {", ".join(estimators)}'
      if given['baseline'].present:
        raise ValueError(f'--baseline={given.baseline}; {expected}')
      _say(f'No differences without --baseline: {expected}.')
    spec = _load(given.gin_file, given.gin_bindings)
    study(policies, estimators, spec, design, settings, out)
  except (OSError, ValueError, base.EstimatorError) as error:
    sys.exit(f'error: {error}')
  _say((out / 'fidelity.md').read_text())


def define_flags() -> None:
  """Not at import: the training's own flags have some of these names."""
  design, standard = probes.Design(), fidelity.Study()
  flags.DEFINE_string('out', 'runs/fidelity', 'Folder of the study.')
  flags.DEFINE_multi_string(
      'policy', ['packaged=tiny_household'], 'name=folder; repeatable.'
  )
  flags.DEFINE_multi_string(
      'estimator', [], 'Gin file of an estimator; repeatable. Default: all.'
  )
  flags.DEFINE_string(
      'baseline',
      standard.baseline,
      'The estimator that the others are compared with.',
  )
  flags.DEFINE_string(
      'gin_file', 'runs/quickstart.gin', 'The games, prompts and sampler.'
  )
  flags.DEFINE_multi_string('gin_bindings', [], 'Repeatable.')
  whole = flags.DEFINE_integer
  whole('tasks', design.tasks, 'Of each policy; intervals need two.', 2)
  whole('probes', design.probes, 'Steps of each task.', 1)
  whole(
      'continuations',
      design.continuations,
      'Episodes from before, and from after, each step.',
      1,
  )
  whole('pool', design.pool, 'Free episodes of each task.', 1)
  whole('replicates', standard.replicates, 'Groups a step.', 1)
  whole('draws', standard.draws, 'Of the bootstrap.', 1)
  whole('seed', design.seed, 'Of everything.', 0)
  flags.DEFINE_list('group_sizes', [*map(str, standard.group_sizes)], 'G.')
  flags.register_validator(
      'group_sizes',
      lambda given: given and all(x.isdecimal() and int(x) > 1 for x in given),
      'expected numbers of at least 2',
  )


if __name__ == '__main__':
  define_flags()
  app.run(main)
