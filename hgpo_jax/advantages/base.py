"""What an advantage estimator is."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from hgpo_jax import types


class Estimator(Protocol):
  """Turns the steps of one iteration into one advantage a step.

  Implementations are gin-configured frozen dataclasses, one a file. The
  result does not depend on the order of the rows.
  """

  def __call__(
      self, inputs: types.AdvantageInputs
  ) -> tuple[np.ndarray, types.Metrics]:
    """Returns (float32 [N] advantages, metrics)."""
