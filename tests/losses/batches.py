"""A random minibatch as the loss sees it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.losses import aggregate
from hgpo_jax.losses import ppo

ROWS, WIDTH = 8, 6


def minibatch(seed: int = 0) -> dict[str, Any]:
  """Rows of uneven length; the last but one is empty, the last weighs 0."""
  rng = np.random.default_rng(seed)
  length_B = np.array([6, 1, 3, 2, 6, 4, 0, 5])
  old_BR = -rng.exponential(size=(ROWS, WIDTH))
  batch = {
      'logprobs_BR': old_BR + rng.normal(size=old_BR.shape) * 0.3,
      'old_logprobs_BR': old_BR,
      'ref_logprobs_BR': old_BR + rng.normal(size=old_BR.shape) * 0.3,
      'entropy_BR': rng.exponential(size=old_BR.shape),
      'advantage_BR': np.repeat(rng.normal(size=(ROWS, 1)), WIDTH, 1) * 2.0,
  }
  batch = {name: jnp.float32(x) for name, x in batch.items()}
  batch['mask_BR'] = jnp.asarray(np.arange(WIDTH) < length_B[:, None])
  batch['row_weight_B'] = jnp.array([1.0] * 7 + [0.0])
  return batch


def rows_of(batch: dict[str, Any], rows: Any) -> dict[str, Any]:
  """Some of the rows."""
  return {name: x[jnp.asarray(rows)] for name, x in batch.items()}


def packed(batch: dict[str, Any]) -> tuple[dict[str, Any], Any]:
  """The rows that have tokens, two in each new row; and where they came from.

  Returns (batch, (rows, columns) of the old batch for each new slot).
  """
  length_B = np.asarray(batch['mask_BR']).sum(1)
  pairs = ((0, 1), (2, 4), (5, 3), (7,))
  row_BR, column_BR = np.zeros((2, len(pairs), 2 * WIDTH), int)
  mask_BR = np.zeros((len(pairs), 2 * WIDTH), bool)
  for new, rows in enumerate(pairs):
    slots = [(row, column) for row in rows for column in range(length_B[row])]
    row_BR[new, : len(slots)], column_BR[new, : len(slots)] = zip(*slots)
    mask_BR[new, : len(slots)] = True
  source = (row_BR, column_BR)
  joined = {
      name: x[source] for name, x in batch.items() if name.endswith('_BR')
  }
  joined['mask_BR'] = jnp.asarray(mask_BR)
  joined['row_weight_B'] = batch['row_weight_B'][np.array([0, 2, 5, 7])]
  joined['step_BR'] = jnp.asarray(np.where(mask_BR, row_BR, 0))
  return joined, source


def denominators(
    loss: ppo.PPOLoss, batch: dict[str, Any]
) -> aggregate.Denominators:
  """Of a whole minibatch."""
  return loss.denominators(
      batch['mask_BR'], batch['row_weight_B'], step_BR=batch.get('step_BR')
  )


def evaluate(
    loss: ppo.PPOLoss,
    batch: dict[str, Any],
    whole: dict[str, Any] | None = None,
) -> Any:
  """((loss, metrics), gradients in log-probs and entropies) of a part."""
  return _evaluate(loss, batch, batch if whole is None else whole)


@functools.partial(jax.jit, static_argnums=0)
def _evaluate(
    loss: ppo.PPOLoss, batch: dict[str, Any], whole: dict[str, Any]
) -> Any:
  counted = denominators(loss, whole)

  def run(logprobs_BR, entropy_BR):
    changed = batch | {'logprobs_BR': logprobs_BR, 'entropy_BR': entropy_BR}
    return loss(**changed, denominators=counted)

  return jax.value_and_grad(run, argnums=(0, 1), has_aux=True)(
      batch['logprobs_BR'], batch['entropy_BR']
  )
