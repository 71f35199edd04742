"""Draws tokens from logits, each row by its own rules and its own key."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rules(NamedTuple):
  """How each row is sampled; filters apply in the order of the fields.

  Attributes:
    temperature_B: float32; 0 takes the likeliest token.
    top_k_B: int32, how many of the likeliest tokens stay; 0 for all.
    top_p_B: float32, the likeliest tokens that together have this probability
      stay; 1 for all.
    min_p_B: float32, tokens stay that have this share of the probability of
      the likeliest; 0 for all.
  """

  temperature_B: jax.Array
  top_k_B: jax.Array
  top_p_B: jax.Array
  min_p_B: jax.Array


class Drawn(NamedTuple):
  """What was drawn.

  Attributes:
    token_B: int32.
    logprob_B: float32, of the distribution that was sampled from; at
      temperature 0, where that is a single token, of the model.
    model_logprob_B: float32, at temperature 1 among all tokens.
  """

  token_B: jax.Array
  logprob_B: jax.Array
  model_logprob_B: jax.Array


def draw(
    logits_BV: jax.Array,
    uniform_B: jax.Array,
    rules: Rules,
    allowed_BV: jax.Array | None = None,
) -> Drawn:
  """One token a row, by inversion of the cumulative distribution.

  Args:
    logits_BV: of the model.
    uniform_B: float32 in [0, 1), all the randomness there is.
    rules: of each row.
    allowed_BV: tokens that may be drawn, at least one a row; None for all.
  """
  logits_BV = logits_BV.astype(jnp.float32)
  greedy_B = rules.temperature_B == 0
  scale_B = jnp.where(greedy_B, 1.0, rules.temperature_B)
  scaled_BV = logits_BV / scale_B[:, None]
  if allowed_BV is not None:
    scaled_BV = jnp.where(allowed_BV, scaled_BV, -jnp.inf)
  filtering = ~greedy_B & (
      (rules.top_k_B > 0) | (rules.top_p_B < 1) | (rules.min_p_B > 0)
  )
  # Sorting is the dearest part, so it is left out where no row needs it.
  scaled_BV = jax.lax.cond(
      filtering.any(),
      lambda x: jnp.where(filtering[:, None], _filtered(x, rules), x),
      lambda x: x,
      scaled_BV,
  )
  top_B1 = scaled_BV.max(axis=-1, keepdims=True)
  weight_BV = jnp.exp(scaled_BV - top_B1)
  drawn_B, total_B = _invert(weight_BV, uniform_B)
  # Twice a maximum: an arg max is several times slower on CPU.
  vocab = scaled_BV.shape[-1]
  likeliest_B = jnp.where(scaled_BV == top_B1, jnp.arange(vocab), vocab - 1)
  token_B = jnp.where(greedy_B, likeliest_B.min(axis=-1), drawn_B)
  at = lambda x_BV: jnp.take_along_axis(x_BV, token_B[:, None], axis=1)[:, 0]
  return Drawn(
      token_B.astype(jnp.int32),
      at(scaled_BV) - top_B1[:, 0] - jnp.log(total_B),
      at(logits_BV) - jax.nn.logsumexp(logits_BV, axis=-1),
  )


def _filtered(scaled_BV: jax.Array, rules: Rules) -> jax.Array:
  """-inf for what the filters take away; ties with the last to stay, stay."""
  ordered_BV = jnp.sort(scaled_BV, axis=-1, descending=True)
  rank_V = jnp.arange(ordered_BV.shape[-1])
  top_k_B1 = rules.top_k_B[:, None]
  ordered_BV = jnp.where(
      (top_k_B1 > 0) & (rank_V >= top_k_B1), -jnp.inf, ordered_BV
  )
  share_BV = jax.nn.softmax(ordered_BV, axis=-1)
  before_BV = jnp.cumsum(share_BV, axis=-1) - share_BV
  stays_BV = (before_BV < rules.top_p_B[:, None]) & (
      share_BV >= rules.min_p_B[:, None] * share_BV[:, :1]
  )
  stays_BV |= rank_V == 0
  least_B = jnp.where(stays_BV, ordered_BV, jnp.inf).min(axis=-1)
  return jnp.where(scaled_BV >= least_B[:, None], scaled_BV, -jnp.inf)


def _invert(
    weight_BV: jax.Array, uniform_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Indices with probability in proportion to the weights, and their sum.

  The index whose stretch of the cumulative sum holds uniform * total: first
  the stretch of a block of tokens, then that of a token in it. Never one of
  weight 0, whatever the rounding.
  """
  rows, vocab = weight_BV.shape
  size = 2 ** round(math.log2(vocab) / 2)
  padding = -vocab % size
  blocks_BNS = jnp.pad(weight_BV, ((0, 0), (0, padding))).reshape(
      rows, -1, size
  )
  until_BN = jnp.cumsum(blocks_BNS.sum(axis=-1), axis=-1)
  total_B = until_BN[:, -1]
  goal_B1 = jnp.minimum(uniform_B * total_B, jnp.nextafter(total_B, 0.0))[
      :, None
  ]
  block_B1 = (until_BN <= goal_B1).sum(axis=-1, keepdims=True)
  before_B1 = jnp.where(
      block_B1 > 0,
      jnp.take_along_axis(until_BN, jnp.maximum(block_B1 - 1, 0), axis=1),
      0.0,
  )
  inside_BS = jnp.take_along_axis(blocks_BNS, block_B1[:, :, None], 1)[:, 0]
  index_B = (jnp.cumsum(inside_BS, axis=-1) <= goal_B1 - before_B1).sum(axis=-1)
  last_B = jnp.where(inside_BS > 0, jnp.arange(size), 0).max(axis=-1)
  return block_B1[:, 0] * size + jnp.minimum(index_B, last_B), total_B
