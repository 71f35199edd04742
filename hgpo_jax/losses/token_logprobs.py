"""Log-probabilities and entropies of response tokens, a chunk at a time."""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp

CHUNK_TOKENS = 2048


def gather_targets(
    hidden_BTD: jax.Array, tokens_BT: jax.Array, target_BR: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Pairs each response token with the hidden state that predicts it.

  The token at index t is predicted from the hidden state at t - 1.

  Args:
    hidden_BTD: hidden states of whole rows.
    tokens_BT: token ids of whole rows.
    target_BR: index in T of each response token; 0 on padding.

  Returns:
    (hidden_BRD, token ids [B, R]).
  """
  chex.assert_rank([hidden_BTD, tokens_BT, target_BR], [3, 2, 2])
  before_BR = jnp.maximum(target_BR - 1, 0)
  hidden_BRD = jnp.take_along_axis(hidden_BTD, before_BR[..., None], axis=1)
  return hidden_BRD, jnp.take_along_axis(tokens_BT, target_BR, axis=1)


def token_logprobs(
    hidden_BRD: jax.Array,
    tokens_BR: jax.Array,
    logits_fn: Callable[[jax.Array], jax.Array],
    temperature: jax.Array | float,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[jax.Array, jax.Array]:
  """log_softmax(logits / temperature) at the tokens, and its entropy.

  Logits are made for at most about `chunk_tokens` positions at a time, along
  R, and made again in the backward pass, so [B, R, V] never exists.

  Args:
    hidden_BRD: hidden states that predict the tokens.
    tokens_BR: token ids; out-of-range ids must not occur, 0 on padding.
    logits_fn: from hidden states [..., D] to logits [..., V].
    temperature: the sampling temperature, above 0.
    chunk_tokens: positions, over all rows, whose logits are held at once.

  Returns:
    (log-probabilities, entropies), both float32 [B, R].
  """
  chex.assert_rank([hidden_BRD, tokens_BR], [3, 2])
  chex.assert_equal_shape_prefix([hidden_BRD, tokens_BR], 2)
  rows, length = tokens_BR.shape
  chunk = min(length, max(1, chunk_tokens // rows))
  chunks = -(-length // chunk)

  @jax.checkpoint
  def score(part):
    hidden_BCD, tokens_BC = part
    logits_BCV = logits_fn(hidden_BCD).astype(jnp.float32) / temperature
    return logprobs_and_entropy(logits_BCV, tokens_BC)

  if chunks == 1:
    return score((hidden_BRD, tokens_BR))

  def split(x):
    extra = [(0, 0), (0, chunks * chunk - length)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, extra)
    return jnp.moveaxis(x.reshape(rows, chunks, chunk, *x.shape[2:]), 1, 0)

  def join(x):
    return jnp.moveaxis(x, 0, 1).reshape(rows, -1)[:, :length]

  parts = jax.lax.map(score, (split(hidden_BRD), split(tokens_BR)))
  return join(parts[0]), join(parts[1])


@jax.custom_vjp
def logprobs_and_entropy(
    logits: jax.Array, tokens: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """log p(token) and -sum_v p_v log p_v of float32 logits, over the last axis.

  Its gradient is written out, since the derived one holds several arrays as
  large as the logits; it cannot be derived again.
  """
  return _forward(logits, tokens)[0]


def _forward(logits, tokens):
  # Sums of functions of the logits alone, which need no array of their size.
  top = jnp.max(logits, axis=-1, keepdims=True)
  weight = jnp.sum(jnp.exp(logits - top), axis=-1, keepdims=True)
  mean = jnp.sum(jnp.exp(logits - top) * (logits - top), axis=-1)
  total = top + jnp.log(weight)
  entropy = jnp.log(weight)[..., 0] - mean / weight[..., 0]
  own = jnp.take_along_axis(logits, tokens[..., None], axis=-1) - total
  return (own[..., 0], entropy), (logits, tokens, total, entropy)


def _backward(residuals, gradients):
  """1[v = token] - p_v, and -p_v (log p_v + entropy)."""
  logits, tokens, total, entropy = residuals
  of_own, of_entropy = (g[..., None] for g in gradients)
  logp = logits - total
  spread = of_own + of_entropy * (logp + entropy[..., None])
  index = tuple(jnp.indices(tokens.shape, sparse=True)) + (tokens,)
  return (-jnp.exp(logp) * spread).at[index].add(gradients[0]), None


logprobs_and_entropy.defvjp(_forward, _backward)
