"""Clipped policy-gradient losses, per token: PPO with dual clip, and GSPO."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from hgpo_jax.losses import aggregate

# exp(20) is far past any clip; beyond it only overflow is left to happen.
_LOG_RATIO_LIMIT = 20.0
_SEQUENCE_LOG_RATIO_LIMIT = 10.0


class PolicyTerms(NamedTuple):
  """Per-token loss and what the clips did.

  Attributes:
    loss_BR: to be aggregated over the scored tokens.
    ratio_BR: new probability over old.
    clipped_BR: 1 where the clip gives a larger loss than the ratio.
    clipped_low_BR: 1 where the dual clip holds the loss down.
  """

  loss_BR: jax.Array
  ratio_BR: jax.Array
  clipped_BR: jax.Array
  clipped_low_BR: jax.Array


def token_log_ratio(
    logprobs_BR: jax.Array, old_logprobs_BR: jax.Array, mask_BR: jax.Array
) -> jax.Array:
  """log p - log p_old where the mask holds, 0 elsewhere.

  Masked before any exponential, so nothing in masked slots (padding values,
  NaN) reaches the loss or its gradient.
  """
  chex.assert_equal_shape([logprobs_BR, old_logprobs_BR, mask_BR])
  old_BR = jax.lax.stop_gradient(aggregate.masked(old_logprobs_BR, mask_BR))
  return aggregate.masked(logprobs_BR, mask_BR) - old_BR


def sequence_log_ratio(
    log_ratio_BR: jax.Array,
    mask_BR: jax.Array,
    step_BR: jax.Array | None = None,
) -> jax.Array:
  """GSPO's sequence log-ratio on each token (Zheng et al. 2025, eqs. 7, 14).

  log s_i = (1 / |y_i|) sum_t log r_{i,t}; token t carries the value log s_i
  and the gradient of its own log-probability. At most 10.

  Args:
    log_ratio_BR: `token_log_ratio`.
    mask_BR: tokens that count.
    step_BR: the step of each token, which is its sequence, as in
      `aggregate.step_sum`; None: a row is one.
  """
  total = lambda x_BR: aggregate.step_sum(x_BR, step_BR)
  length_BR = jnp.maximum(total(jnp.asarray(mask_BR, jnp.float32)), 1.0)
  mean_BR = total(aggregate.masked(log_ratio_BR, mask_BR)) / length_BR
  own_BR = log_ratio_BR - jax.lax.stop_gradient(log_ratio_BR)
  value_BR = own_BR + jax.lax.stop_gradient(mean_BR)
  return jnp.minimum(value_BR, _SEQUENCE_LOG_RATIO_LIMIT)


def truncated_weight(
    log_ratio_BR: jax.Array, most: float
) -> tuple[jax.Array, jax.Array]:
  """min(r, most) without a gradient, and 1 where it was cut (Yao et al. 2025).

  The ratio is between two models that should be one, so it is near 1; cutting
  it bounds what a token that the sampler hardly gave can weigh.
  """
  log_ratio_BR = jax.lax.stop_gradient(log_ratio_BR)
  weight_BR = jnp.exp(jnp.minimum(log_ratio_BR, _LOG_RATIO_LIMIT))
  cut_BR = (weight_BR > most).astype(weight_BR.dtype)
  return jnp.minimum(weight_BR, most), cut_BR


def ppo_clip(
    log_ratio_BR: jax.Array,
    advantage_BR: jax.Array,
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> PolicyTerms:
  """max(-A r, -A clip(r, 1 - low, 1 + high)), dual-clipped where A < 0.

  PPO (Schulman et al. 2017, eq. 7); the dual clip (Ye et al. 2020, eq. 5)
  bounds the loss of a negative advantage by -A c.

  Args:
    log_ratio_BR: log of the ratio r.
    advantage_BR: A; gets no gradient.
    clip_low: how far below 1 the ratio counts.
    clip_high: how far above.
    dual_clip: c, above 1; 0 for none.
  """
  chex.assert_equal_shape([log_ratio_BR, advantage_BR])
  advantage_BR = jax.lax.stop_gradient(advantage_BR)
  ratio_BR = jnp.exp(
      jnp.clip(log_ratio_BR, -_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
  )
  plain_BR = -advantage_BR * ratio_BR
  clipped_BR = -advantage_BR * jnp.clip(
      ratio_BR, 1.0 - clip_low, 1.0 + clip_high
  )
  loss_BR = jnp.maximum(plain_BR, clipped_BR)
  lower_BR = jnp.zeros_like(loss_BR)
  if dual_clip:
    bound_BR = -advantage_BR * dual_clip
    held_BR = (advantage_BR < 0.0) & (loss_BR > bound_BR)
    loss_BR = jnp.where(held_BR, bound_BR, loss_BR)
    lower_BR = held_BR.astype(loss_BR.dtype)
  return PolicyTerms(
      loss_BR=loss_BR,
      ratio_BR=ratio_BR,
      clipped_BR=(clipped_BR > plain_BR).astype(loss_BR.dtype),
      clipped_low_BR=lower_BR,
  )
