"""What an advantage estimator is, and what is asked of its result."""

from __future__ import annotations

from collections.abc import Mapping
import inspect
from typing import Any, Protocol

import numpy as np

from hgpo_jax import types


class EstimatorError(RuntimeError):
  """An estimator returned something else than one finite advantage a step."""


class Estimator(Protocol):
  """Turns the steps of one iteration into one advantage a step.

  Implementations are gin-configured frozen dataclasses, one a file; a field
  that some settings leave without effect is told by `unread` (see `config`).
  The result does not depend on the order of the rows.
  """

  def __call__(
      self, inputs: types.AdvantageInputs
  ) -> tuple[np.ndarray, types.Metrics]:
    """Returns (float32 [N] advantages, metrics)."""


def check(estimator: Any, knob: str) -> None:
  """Refuses what cannot be called with the steps alone, as a loss.

  Args:
    estimator: what is bound as one.
    knob: the field that it is bound to.

  Raises:
    ValueError: as said.
  """
  try:
    inspect.signature(estimator).bind('inputs')
  except TypeError as error:
    raise ValueError(
        f'{knob} is @{type(estimator).__name__}(), which is no estimator'
        f' ({error}); expected one that takes the inputs alone. See Estimator'
        ' in hgpo_jax/advantages/base.py'
    ) from error


def estimate(
    estimator: Estimator, inputs: types.AdvantageInputs
) -> tuple[np.ndarray, types.Metrics]:
  """What `estimator` returns for `inputs`: (float32 [N], metrics), checked.

  Raises:
    EstimatorError: it is not a pair, the advantages are not N finite
      numbers, or a metric is none. Training on them would be wrong, or would
      do nothing, or would end when the metrics are written.
  """
  if not callable(estimator):
    raise EstimatorError(
        f'{type(estimator).__name__} is no estimator: it cannot be called. See'
        ' Estimator in hgpo_jax/advantages/base.py'
    )
  found = estimator(inputs)
  if not isinstance(found, tuple) or len(found) != 2:
    raise _error(
        estimator, 'a pair (advantages, metrics)', type(found).__name__
    )
  advantage_N, metrics = found
  if not isinstance(metrics, Mapping):
    raise _error(estimator, 'metrics in a dict', type(metrics).__name__)
  for name, value in metrics.items():
    if not _is_number(value):
      raise _error(
          estimator, 'numbers as metrics', f'{value!r} as metric {name!r}'
      )
  want = f'advantages as a float array of shape ({len(inputs.outcome_N)},)'
  if not isinstance(advantage_N, np.ndarray):
    raise _error(estimator, want, type(advantage_N).__name__)
  if (
      advantage_N.shape != np.shape(inputs.outcome_N)
      or advantage_N.dtype.kind != 'f'
  ):
    raise _error(estimator, want, f'{advantage_N.dtype} {advantage_N.shape}')
  with np.errstate(over='ignore'):  # What is too large becomes inf.
    advantage_N = advantage_N.astype(np.float32, copy=False)
  broken_N = ~np.isfinite(advantage_N)
  if broken_N.any():
    row = int(np.argmax(broken_N))
    raise _error(
        estimator,
        'finite advantages',
        f'{advantage_N[row]} in row {row}, and {broken_N.sum()} such rows in'
        ' all',
    )
  return advantage_N, metrics


def _is_number(value: Any) -> bool:
  try:
    float(value)
  except (TypeError, ValueError):
    return False
  return not isinstance(value, (str, bytes)) and np.ndim(value) == 0


def _error(estimator: Any, expected: str, got: str) -> EstimatorError:
  return EstimatorError(
      f'{type(estimator).__name__} returned {got}; expected {expected}. See'
      ' Estimator in hgpo_jax/advantages/base.py'
  )
