"""From per-token losses to one number, by denominators of the whole minibatch.

The denominators are counted once over a minibatch and passed to each of its
micro-batches, so that micro-batch losses and gradients add up to those of
the minibatch, however it is split, padded, packed or spread over devices. A
sequence is one step's response: a row is one, unless `step_BR` says that it
holds several.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

TOKEN_MEAN = 'token-mean'
SEQ_MEAN_TOKEN_SUM = 'seq-mean-token-sum'
SEQ_MEAN_TOKEN_MEAN = 'seq-mean-token-mean'
SEQ_MEAN_TOKEN_SUM_NORM = 'seq-mean-token-sum-norm'
MODES = (
    TOKEN_MEAN,
    SEQ_MEAN_TOKEN_SUM,
    SEQ_MEAN_TOKEN_MEAN,
    SEQ_MEAN_TOKEN_SUM_NORM,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Denominators:
  """What a minibatch is divided by; float32 scalars.

  Attributes:
    tokens: scored tokens, weighted by their rows.
    sequences: steps with scored tokens, weighted by their rows; a real row
      without any scored token counts as one.
    length: the fixed length of 'seq-mean-token-sum-norm', in tokens.
  """

  tokens: jax.Array
  sequences: jax.Array
  length: jax.Array

  def __add__(self, other: Denominators) -> Denominators:
    """Of two parts of a minibatch together."""
    return Denominators(
        self.tokens + other.tokens,
        self.sequences + other.sequences,
        self.length,
    )


def count(
    mask_BR: jax.Array,
    row_weight_B: jax.Array,
    length: int = 1,
    step_BR: jax.Array | None = None,
) -> Denominators:
  """Counts a minibatch. Zero-weight rows add nothing."""
  mask_BR = jnp.asarray(mask_BR, jnp.float32)
  # A step's tokens weigh 1 together.
  share_BR = mask_BR / jnp.maximum(step_sum(mask_BR, step_BR), 1.0)
  sequences_B = jnp.maximum(jnp.round(share_BR.sum(1)), 1.0)
  return Denominators(
      tokens=jnp.sum(mask_BR * row_weight_B[:, None]),
      sequences=jnp.sum(sequences_B * row_weight_B, dtype=jnp.float32),
      length=jnp.float32(length),
  )


def step_sum(x_BR: jax.Array, step_BR: jax.Array | None = None) -> jax.Array:
  """On each token, the sum of x over the tokens of its step in its row.

  Args:
    x_BR: per-token values, 0 where nothing is scored.
    step_BR: which step a token belongs to; those of a step lie side by side.
      None where a row is one step.
  """
  if step_BR is None:
    return jnp.broadcast_to(x_BR.sum(1, keepdims=True), x_BR.shape)
  step_BR = jnp.asarray(step_BR)
  change_BR = step_BR[:, 1:] != step_BR[:, :-1]
  index_BR = jnp.pad(jnp.cumsum(change_BR, axis=1), ((0, 0), (1, 0)))
  # Row by row, so that rows may lie on different devices.
  total = lambda x_R, index_R: jax.ops.segment_sum(x_R, index_R, len(x_R))
  return jnp.take_along_axis(jax.vmap(total)(x_BR, index_BR), index_BR, axis=1)


def masked(x_BR: jax.Array, mask_BR: jax.Array) -> jax.Array:
  """x where the mask holds, exactly 0 elsewhere, whatever stands there."""
  return jnp.where(mask_BR.astype(bool), x_BR, 0.0)


def token_mean(
    x_BR: jax.Array,
    mask_BR: jax.Array,
    row_weight_B: jax.Array,
    denominators: Denominators,
) -> jax.Array:
  """This part's share of the minibatch's mean over scored tokens."""
  total = jnp.sum(masked(x_BR, mask_BR) * row_weight_B[:, None])
  return total / jnp.maximum(denominators.tokens, 1e-8)


def aggregate(
    mode: str,
    x_BR: jax.Array,
    mask_BR: jax.Array,
    row_weight_B: jax.Array,
    denominators: Denominators,
    step_BR: jax.Array | None = None,
) -> jax.Array:
  """This part's share of the aggregated minibatch; the shares are summed.

  token-mean: sum / tokens. seq-mean-token-sum: mean over steps of their sums.
  seq-mean-token-mean: mean over steps of their means; a row without scored
  tokens has mean 0 and still counts as a step. seq-mean-token-sum-norm:
  sum / length, a fixed length, so padding changes nothing.

  Args:
    mode: one of `MODES`.
    x_BR: per-token values; anything may stand where the mask is 0.
    mask_BR: tokens that count.
    row_weight_B: weight of each row; 0 for rows added as padding.
    denominators: of the whole minibatch.
    step_BR: the step of each token, as in `step_sum`; None: a row is a step.
  """
  if mode not in MODES:
    raise ValueError(
        f'aggregation is {mode!r}, expected one of {MODES}; set'
        ' PPOLoss.aggregation'
    )
  if mode == TOKEN_MEAN:
    return token_mean(x_BR, mask_BR, row_weight_B, denominators)
  x_BR = masked(x_BR, mask_BR)
  if mode == SEQ_MEAN_TOKEN_MEAN:
    tokens_BR = step_sum(jnp.asarray(mask_BR, jnp.float32), step_BR)
    x_BR /= jnp.maximum(tokens_BR, 1.0)
  total = jnp.sum(x_BR.sum(1) * row_weight_B)
  if mode == SEQ_MEAN_TOKEN_SUM_NORM:
    return total / denominators.length
  return total / jnp.maximum(denominators.sequences, 1e-8)
