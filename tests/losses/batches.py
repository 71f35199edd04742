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


def denominators(
    loss: ppo.PPOLoss, batch: dict[str, Any]
) -> aggregate.Denominators:
  """Of a whole minibatch."""
  return loss.denominators(batch['mask_BR'], batch['row_weight_B'])


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
