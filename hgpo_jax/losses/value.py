"""The clipped value loss of a critic, and masked whitening."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from hgpo_jax.losses import aggregate


def value_loss(
    value_BR: jax.Array,
    old_value_BR: jax.Array,
    return_BR: jax.Array,
    clip: float,
) -> tuple[jax.Array, jax.Array]:
  """Per-token max((v - R)^2, (clip(v, v_old -+ clip) - R)^2).

  There is no factor 1/2. Returns (loss_BR, clipped_BR), the second 1 where
  the clipped value gives the larger loss.

  Args:
    value_BR: values of the critic being trained.
    old_value_BR: its values before the update.
    return_BR: targets.
    clip: how far from its old value a value may count.
  """
  chex.assert_equal_shape([value_BR, old_value_BR, return_BR])
  near_BR = jnp.clip(value_BR, old_value_BR - clip, old_value_BR + clip)
  plain_BR = jnp.square(value_BR - return_BR)
  clipped_BR = jnp.square(near_BR - return_BR)
  clipped = (clipped_BR > plain_BR).astype(plain_BR.dtype)
  return jnp.maximum(plain_BR, clipped_BR), clipped


def masked_whiten(x_BR: jax.Array, mask_BR: jax.Array) -> jax.Array:
  """(x - mean) / sqrt(var + 1e-8), statistics over the masked tokens.

  The variance is unbiased, M / (M - 1) with M masked tokens; with M <= 1 it
  counts as 0. Values outside the mask are shifted and scaled likewise.
  """
  chex.assert_equal_shape([x_BR, mask_BR])
  tokens = jnp.sum(mask_BR, dtype=jnp.float32)

  def mean(values_BR):
    return jnp.sum(aggregate.masked(values_BR, mask_BR)) / (tokens + 1e-8)

  centred_BR = x_BR - mean(x_BR)
  variance = mean(jnp.square(centred_BR))
  variance *= tokens / jnp.maximum(tokens - 1.0, 1.0)
  return centred_BR * jax.lax.rsqrt(variance + 1e-8)
