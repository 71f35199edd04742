"""The folder of a run: whether it can be used, and what a finished one says."""

from __future__ import annotations

import json
import pathlib
import tempfile

from hgpo_jax import config
from hgpo_jax.experiment import evaluate
from hgpo_jax.experiment import spec as spec_lib
from hgpo_jax.io import metrics


def finished(spec: spec_lib.Experiment, run_dir: pathlib.Path) -> bool:
  """Whether the last evaluation of the run is in its metrics."""
  try:
    return metrics.read(run_dir)[-1]['iteration'] == spec.iterations
  except (OSError, ValueError, LookupError):  # Not there, or cut by a kill.
    return False


def check_length(spec: spec_lib.Experiment, done: int) -> None:
  if done > spec.iterations:
    raise config.ConfigError(
        f'Experiment.iterations is {spec.iterations}, but the run has a'
        f' checkpoint after {done} iterations; give at least {done}, or'
        ' another --run_dir'
    )


def check_writable(run_dir: pathlib.Path) -> None:
  """Makes the folder; fails before anything has started."""
  try:
    run_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=run_dir):
      pass
  except OSError as error:
    raise OSError(
        f'--run_dir={run_dir} cannot be written to ({error}); give a folder'
        ' that can'
    ) from error


def summary(run_dir: pathlib.Path) -> str:
  """The table of a finished run: its first and its last evaluation."""
  paths = sorted((run_dir / 'eval').glob('iteration_*.json'))
  chosen = dict.fromkeys((paths[0], paths[-1]))
  results = {}
  for path in chosen:
    iteration = json.loads(path.read_text())['iteration']
    name = 'before training' if iteration == 0 else f'after {iteration}'
    results[name] = evaluate.load(path)
  return evaluate.table(results)
