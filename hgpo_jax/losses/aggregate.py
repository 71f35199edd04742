"""From per-token losses to one number, by denominators of the whole minibatch.

The denominators are counted once over a minibatch and passed to each of its
micro-batches, so that micro-batch losses and gradients add up to those of
the minibatch, however it is split, padded or spread over devices.
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
    rows: rows, weighted; a real row without any scored token counts.
    length: the fixed length of 'seq-mean-token-sum-norm', in tokens.
  """

  tokens: jax.Array
  rows: jax.Array
  length: jax.Array

  def __add__(self, other: Denominators) -> Denominators:
    """Of two parts of a minibatch together."""
    return Denominators(
        self.tokens + other.tokens, self.rows + other.rows, self.length
    )


def count(
    mask_BR: jax.Array, row_weight_B: jax.Array, length: int = 1
) -> Denominators:
  """Counts a minibatch. Zero-weight rows add nothing."""
  weight_BR = mask_BR * row_weight_B[:, None]
  return Denominators(
      tokens=jnp.sum(weight_BR, dtype=jnp.float32),
      rows=jnp.sum(row_weight_B, dtype=jnp.float32),
      length=jnp.float32(length),
  )


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
) -> jax.Array:
  """This part's share of the aggregated minibatch; the shares are summed.

  token-mean: sum / tokens. seq-mean-token-sum: mean over rows of row sums.
  seq-mean-token-mean: mean over rows of row means; a row without scored
  tokens has mean 0 and still counts as a row. seq-mean-token-sum-norm:
  sum / length, a fixed length, so padding changes nothing.

  Args:
    mode: one of `MODES`.
    x_BR: per-token values; anything may stand where the mask is 0.
    mask_BR: tokens that count.
    row_weight_B: weight of each row; 0 for rows added as padding.
    denominators: of the whole minibatch.
  """
  if mode not in MODES:
    raise ValueError(
        f'aggregation is {mode!r}, expected one of {MODES}; set'
        ' PPOLoss.aggregation'
    )
  if mode == TOKEN_MEAN:
    return token_mean(x_BR, mask_BR, row_weight_B, denominators)
  row_B = masked(x_BR, mask_BR).sum(1)
  if mode == SEQ_MEAN_TOKEN_SUM_NORM:
    return jnp.sum(row_B * row_weight_B) / denominators.length
  if mode == SEQ_MEAN_TOKEN_MEAN:
    row_B /= jnp.maximum(jnp.sum(mask_BR, 1, dtype=jnp.float32), 1.0)
  return jnp.sum(row_B * row_weight_B) / jnp.maximum(denominators.rows, 1e-8)
