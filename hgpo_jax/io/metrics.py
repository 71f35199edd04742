"""Metrics of a run: JSONL always, TensorBoard, wandb when asked.

A name is `prefix/what`, lower case; `PREFIXES` lists the prefixes and what
belongs under each. An unknown prefix is an error, so that a misspelt metric
cannot start a curve of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import importlib
import json
import math
import os
import pathlib
import re
import sys
from typing import Any

from absl import logging

from hgpo_jax import config
from hgpo_jax.io import metric_sinks

PREFIXES: Mapping[str, str] = {
    'advantage': 'what the estimator did: groups, spread, advantages',
    'batch': 'steps and tokens that reached the learner, and what was dropped',
    'env': 'inside environments, such as caches; differs from run to run',
    'eval': 'evaluation on held-out tasks',
    'logprob_gap': 'sampler against learner on the sampled tokens',
    'loss': 'parts of the policy loss',
    'memory': 'resident memory; differs from run to run',
    'pool': 'environment processes: failures, restarts, replays',
    'policy': 'ratio, clipping, divergence, entropy',
    'rollout': 'episodes of the iteration: success, length, validity',
    'run': 'iteration, tokens and episodes so far',
    'sampler': 'generation: tokens, slots, finish reasons',
    'sync': 'sampler against learner on fixed tokens, when it gets the weights',
    'time': 'seconds of each phase, and rates; differ from run to run',
    'update': 'optimizer: learning rate, gradient norm, skipped updates',
}
JSONL = 'metrics.jsonl'
_NAME = re.compile(r'[a-z][a-z0-9_]*(/[A-Za-z0-9_.@-]+)+')


def check_name(name: str) -> None:
  """Raises ValueError unless `name` is `prefix/what` with a known prefix."""
  prefix = name.split('/')[0]
  if not _NAME.fullmatch(name) or prefix not in PREFIXES:
    raise ValueError(
        f'metric name {name!r}: expected prefix/what with a prefix out of '
        f'{", ".join(PREFIXES)}; correct the name, or add the prefix to '
        'hgpo_jax.io.metrics.PREFIXES.'
    )


@config.configurable
@dataclasses.dataclass(frozen=True)
class Logging:
  """Where metrics go besides `metrics.jsonl` and the progress line.

  Attributes:
    tensorboard: write TensorBoard event files to `<run_dir>/tensorboard`.
    wandb_project: project on Weights & Biases; '' does not import wandb.
    progress: names shown on the progress line, in this order.
  """

  tensorboard: bool = True
  wandb_project: str = ''
  progress: tuple[str, ...] = ('rollout/success_rate', 'eval/success_rate')

  def __post_init__(self) -> None:
    for name in self.progress:
      check_name(name)

  def check(self) -> None:
    """Raises ImportError if what `open` needs is not installed."""
    if self.wandb_project and not _has_wandb():
      raise ImportError(
          f'Logging.wandb_project={self.wandb_project!r} asks for Weights &'
          ' Biases, but wandb is not installed; `pip install wandb`, or bind'
          " Logging.wandb_project = ''."
      )

  def open(
      self,
      run_dir: str | os.PathLike[str],
      first_iteration: int,
      iterations: int,
      run_config: str = '',
  ) -> MetricsWriter:
    """Opens the metrics of a run that goes on with `first_iteration`.

    What an earlier, killed run wrote for that iteration and later ones is
    dropped, so that the file ends equal to that of an uninterrupted run.
    """
    self.check()
    run_dir = pathlib.Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    sinks: list[metric_sinks.Sink] = []
    if self.wandb_project:  # First: it is the one that may be missing.
      sinks.append(
          metric_sinks.Wandb(
              self.wandb_project, run_dir.resolve().name, run_config
          )
      )
    sinks.append(metric_sinks.Jsonl(run_dir / JSONL, first_iteration))
    if self.tensorboard:
      sinks.append(
          metric_sinks.Tensorboard(run_dir / 'tensorboard', first_iteration)
      )
    if sys.stderr.isatty():
      sinks.append(
          metric_sinks.Progress(self.progress, first_iteration, iterations)
      )
    return MetricsWriter(sinks, first_iteration)


class MetricsWriter:
  """Writes one set of metrics an iteration to every sink; made by `Logging`.

  Write an iteration before its checkpoint is saved: a run killed in between
  repeats the iteration, and nothing is missing from the file.
  """

  def __init__(self, sinks: Sequence[metric_sinks.Sink], first_iteration: int):
    self._sinks = tuple(sinks)
    self._next = first_iteration

  def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
    """Writes `metrics`; a value that is not finite is null, with a warning.

    Raises:
      ValueError: a name without a known prefix, or an iteration that was
        already written.
    """
    if iteration < self._next:
      raise ValueError(
          f'metrics of iteration {iteration} are already written; expected '
          f'iteration {self._next} or later, one call an iteration.'
      )
    self._next = iteration + 1
    values = {name: _value(name, metrics[name]) for name in sorted(metrics)}
    broken = [name for name, value in values.items() if value is None]
    if broken:
      logging.warning(
          'iteration %d: not finite, written as null: %s',
          iteration,
          ', '.join(f'{name}={float(metrics[name])}' for name in broken),
      )
    for sink in self._sinks:
      sink.write(iteration, values)

  def close(self) -> None:
    """Flushes and closes every sink."""
    for sink in self._sinks:
      sink.close()

  def __enter__(self) -> MetricsWriter:
    return self

  def __exit__(self, *unused: Any) -> None:
    self.close()


def read(run_dir: str | os.PathLike[str]) -> list[dict[str, float | None]]:
  """The lines of a run's `metrics.jsonl`; each holds its 'iteration'."""
  with open(pathlib.Path(run_dir) / JSONL, encoding='utf-8') as lines:
    return [json.loads(line) for line in lines]


def _has_wandb() -> bool:
  try:
    # A folder of that name, such as wandb leaves behind, can be imported too.
    return hasattr(importlib.import_module('wandb'), 'init')
  except ImportError:
    return False


def _value(name: str, value: float) -> float | None:
  check_name(name)
  value = float(value)
  return value if math.isfinite(value) else None
