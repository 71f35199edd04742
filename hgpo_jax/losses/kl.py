"""Per-token estimates of the KL divergence to a reference policy."""

from __future__ import annotations

import jax
import jax.numpy as jnp

KINDS = ('k1', 'abs', 'k2', 'k3', 'low_var_kl')
_K3_LIMIT = 10.0


def kl(kind: str, logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
  """KL(policy || reference) from one sampled token (Schulman 2020).

  With d = log p - log p_ref: k1 = d; abs = |d|; k2 = d^2 / 2; k3, also called
  low_var_kl, = exp(-d) + d - 1, clamped to at most 10 with no gradient
  beyond. The reference gets no gradient.

  Args:
    kind: one of `KINDS`.
    logprobs: log-probabilities of the sampled tokens, any shape.
    ref_logprobs: the reference's, same shape.
  """
  difference = logprobs - jax.lax.stop_gradient(ref_logprobs)
  if kind == 'k1':
    return difference
  if kind == 'abs':
    return jnp.abs(difference)
  if kind == 'k2':
    return 0.5 * jnp.square(difference)
  if kind in ('k3', 'low_var_kl'):
    # Past the limit the exponential would overflow and its gradient with it.
    safe = jnp.maximum(difference, -2.0 * _K3_LIMIT)
    return jnp.clip(jnp.expm1(-safe) + safe, -_K3_LIMIT, _K3_LIMIT)
  raise ValueError(
      f'kl_kind is {kind!r}, expected one of {KINDS}; set PPOLoss.kl_kind'
  )
