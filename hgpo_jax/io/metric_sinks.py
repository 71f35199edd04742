"""Where metrics are written: a JSONL file, TensorBoard, wandb, a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import json
import pathlib
from typing import Protocol

from absl import logging

from hgpo_jax import whole_file

Values = Mapping[str, float | None]


class Sink(Protocol):
  """Takes the metrics of one iteration; None stands for not finite."""

  def write(self, iteration: int, values: Values) -> None:
    """Writes and flushes."""

  def close(self) -> None:
    """Frees what the sink holds."""


class Jsonl:
  """One line an iteration, flushed, so that a killed run leaves whole lines."""

  def __init__(self, path: pathlib.Path, first_iteration: int):
    if path.exists():
      keep_before(path, first_iteration)
    self._file = open(path, 'a', encoding='utf-8')

  def write(self, iteration: int, values: Values) -> None:
    line = json.dumps({'iteration': iteration, **values}, allow_nan=False)
    with whole_file.naming(self._file.name):
      self._file.write(line + '\n')
      self._file.flush()

  def close(self) -> None:
    self._file.close()


def keep_before(path: pathlib.Path, first_iteration: int) -> None:
  """Cuts the file before the line of `first_iteration` or a broken line."""
  kept, last = 0, None
  with open(path, 'rb') as lines:
    for line in lines:
      iteration = _iteration(line)
      if iteration is None or iteration >= first_iteration:
        break
      kept, last = kept + len(line), iteration
  if kept < path.stat().st_size:
    logging.info('%s: dropping lines from iteration %d', path, first_iteration)
  if (
      last is None
      and first_iteration > 0
      or (last is not None and last < first_iteration - 1)
  ):
    logging.warning(
        '%s: the last whole line is of iteration %s, but the run goes on with '
        'iteration %d; the curve has a gap.',
        path,
        last,
        first_iteration,
    )
  with open(path, 'r+b') as file:
    file.truncate(kept)


def _iteration(line: bytes) -> int | None:
  """The iteration of a whole line; None for a line cut off by a kill."""
  if not line.endswith(b'\n'):
    return None
  try:
    return int(json.loads(line)['iteration'])
  except (ValueError, KeyError, TypeError):
    return None


class Tensorboard:
  """TensorBoard event files; what a killed run wrote too much is purged."""

  def __init__(self, folder: pathlib.Path, first_iteration: int):
    import tensorboardX  # Slow to import; only when asked for.

    self._writer = tensorboardX.SummaryWriter(
        str(folder), purge_step=first_iteration or None
    )

  def write(self, iteration: int, values: Values) -> None:
    for name, value in values.items():
      if value is not None:
        self._writer.add_scalar(name, value, iteration)
    self._writer.flush()

  def close(self) -> None:
    self._writer.close()


class Wandb:
  """Weights & Biases; the run's id is its folder name, so it is resumed."""

  def __init__(self, project: str, name: str, run_config: str):
    import wandb  # Not a dependency; only when asked for.

    self._run = wandb.init(
        project=project,
        name=name,
        id=name,
        resume='allow',
        config={'gin': run_config},
    )

  def write(self, iteration: int, values: Values) -> None:
    finite = {k: v for k, v in values.items() if v is not None}
    self._run.log(finite, step=iteration)

  def close(self) -> None:
    self._run.finish()


class Progress:
  """A progress bar with a few values, for a terminal."""

  def __init__(self, names: Sequence[str], first: int, total: int):
    import tqdm

    self._names = names
    self._seen: dict[str, float] = {}
    self._bar = tqdm.tqdm(initial=first, total=total, unit='it')

  def write(self, iteration: int, values: Values) -> None:
    for name in self._names:
      if values.get(name) is not None:
        self._seen[name] = values[name]
    self._bar.set_postfix(
        {name: f'{value:.3g}' for name, value in self._seen.items()},
        refresh=False,
    )
    self._bar.update(iteration + 1 - self._bar.n)

  def close(self) -> None:
    self._bar.close()
