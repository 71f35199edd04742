"""The estimators that are compared: one a gin file of `algorithms/`."""

from __future__ import annotations

import collections
from collections.abc import Sequence
import pathlib

from hgpo_jax import config
from hgpo_jax.advantages import base
from hgpo_jax.experiment import spec as spec_lib

# An estimator is bound to an experiment; this is the rest of one.
_REST = ('base.gin', 'envs/household_mini.gin', 'models/tiny_household.gin')


def names() -> list[str]:
  """Gin files of all methods, 'algorithms/<name>.gin', sorted."""
  found = {
      f'algorithms/{path.name}'
      for folder in config.SEARCH_PATH
      for path in pathlib.Path(folder, 'algorithms').glob('*.gin')
  }
  return sorted(found)


def load(files: Sequence[str] = ()) -> dict[str, base.Estimator]:
  """Estimators by the stem of their file; all of `names()` by default.

  Of `names()`, files that differ in the loss alone have equal estimators: of
  these the one named as its class is kept, else the first. All given files are
  kept; where two have one stem, their names are as given. What gin had loaded
  is forgotten.

  Args:
    files: gin files that bind `Experiment.estimator`, by path or by name.

  Raises:
    ConfigError: a file is missing or wrong.
  """
  stems = collections.Counter(pathlib.Path(file).stem for file in set(files))
  found = {}
  for file in files or names():
    stem = pathlib.Path(file).stem
    found[file if stems[stem] > 1 else stem] = _load(file)
  config.reset()
  if files:
    return found
  kept: dict[base.Estimator, str] = {}
  for name, estimator in found.items():
    if name == type(estimator).__name__.lower() or estimator not in kept:
      kept[estimator] = name
  return {name: found[name] for name in found if name in kept.values()}


def _load(file: str) -> base.Estimator:
  try:
    return config.load([*_REST, file], root=spec_lib.Experiment).estimator
  except config.ConfigError as error:
    # Whoever names files here names them in a flag of another name.
    message = error.message.replace('--gin_file', '--estimator')
    raise config.ConfigError(
        f'{message} (in {file}; expected a gin file with an estimator,'
        ' as in: Experiment.estimator = @HGPO())'
    ) from error
