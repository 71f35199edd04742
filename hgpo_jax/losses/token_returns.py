"""Token-level advantages inside one response: REINFORCE++, GAE, ReMax.

The estimators in hgpo_jax/advantages give one number a step. These give one a
token, from rewards on tokens; a response is one row, and nothing flows
between the steps of an episode. R is the padded length of a response.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp

from hgpo_jax.losses import aggregate
from hgpo_jax.losses import value


def reinforce_pp(
    reward_BR: jax.Array, mask_BR: jax.Array, gamma: float
) -> tuple[jax.Array, jax.Array]:
  """REINFORCE++ (Hu 2025): G_l = x_l + gamma m_{l+1} G_{l+1}, whitened.

  Returns (advantages, 0 outside the mask; returns G).

  Args:
    reward_BR: reward of each token.
    mask_BR: 1 on response tokens; the running sum starts anew at a 0.
    gamma: discount a token.
  """
  chex.assert_equal_shape([reward_BR, mask_BR])

  def back(later_B, column):
    reward_B, mask_B = column
    return_B = reward_B + gamma * later_B
    return return_B * mask_B, return_B

  start_B = jnp.zeros(reward_BR.shape[0], jnp.float32)
  columns = reward_BR.T, mask_BR.T.astype(jnp.float32)
  _, return_RB = jax.lax.scan(back, start_B, columns, reverse=True)
  advantage_BR = value.masked_whiten(return_RB.T, mask_BR)
  return aggregate.masked(advantage_BR, mask_BR), return_RB.T


def gae(
    reward_BR: jax.Array,
    value_BR: jax.Array,
    mask_BR: jax.Array,
    gamma: float,
    lam: float,
) -> tuple[jax.Array, jax.Array]:
  """Generalised advantage estimation (Schulman et al. 2016, eq. 16).

  d_l = x_l + gamma V_{l+1} - V_l;  a_l = d_l + gamma lam a_{l+1}. Returns
  (a whitened over the mask, a + V).

  Args:
    reward_BR: reward of each token, 0 outside the mask.
    value_BR: V; 0 after the last column. Where the mask is 0 it is used like
      any other, so let it be 0 there.
    mask_BR: 1 on response tokens; only the whitening reads it, and values
      outside are shifted and scaled likewise.
    gamma: discount a token.
    lam: lambda, from 0 (one token ahead) to 1 (to the end).
  """
  chex.assert_equal_shape([reward_BR, value_BR, mask_BR])
  next_BR = jnp.pad(value_BR[:, 1:], ((0, 0), (0, 1)))
  delta_BR = reward_BR + gamma * next_BR - value_BR

  def back(later_B, delta_B):
    advantage_B = delta_B + gamma * lam * later_B
    return advantage_B, advantage_B

  start_B = jnp.zeros(reward_BR.shape[0], jnp.float32)
  _, advantage_RB = jax.lax.scan(back, start_B, delta_BR.T, reverse=True)
  return (
      value.masked_whiten(advantage_RB.T, mask_BR),
      advantage_RB.T + value_BR,
  )


def remax(
    reward_BR: jax.Array, baseline_B: jax.Array, mask_BR: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """ReMax (Li et al. 2024, arXiv 2310.10505, algorithm 2).

  Returns (G - b on the mask, G), G the sum of rewards from a token on.

  Args:
    reward_BR: reward of each token.
    baseline_B: b, the reward of the greedy response.
    mask_BR: 1 on response tokens.
  """
  chex.assert_equal_shape([reward_BR, mask_BR])
  masked_BR = aggregate.masked(reward_BR, mask_BR)
  return_BR = jnp.cumsum(masked_BR[:, ::-1], axis=1)[:, ::-1]
  return return_BR - baseline_B[:, None] * mask_BR, return_BR
