"""Causal attention of whole rows, a block of queries at a time, in plain XLA.

A block of queries meets only the keys up to its own end, so that about half
of the products are never made, and the scores of one block are all that is
held of them. The gradient is written out: from the output and one number a
query it makes the weights again in a single pass (Dao et al. 2022, alg. 4).
"""

from __future__ import annotations

from collections.abc import Iterator
import functools

import jax
from jax import ad_checkpoint
import jax.numpy as jnp

# What the backward pass needs of the forward pass, beside q, k and v; a policy
# of `jax.checkpoint` that keeps this name need not attend a second time.
RESIDUALS = 'attention'
_LEAST_BLOCK = 128
_MOST_BLOCKS = 4


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attend(
    q_BKGTh: jax.Array,
    k_BKTh: jax.Array,
    v_BKTh: jax.Array,
    segment_ids_BT: jax.Array,
    precision: jax.lax.Precision | None = None,
) -> jax.Array:
  """softmax(q k / sqrt(h)) v over the keys up to a query, of its segment.

  G query heads share a key head. The softmax is in float32. The gradient
  cannot be derived again.

  Returns:
    [B, K, G, T, h] in the dtype of q.
  """
  return _forward(q_BKGTh, k_BKTh, v_BKTh, segment_ids_BT, precision)[0]


def _forward(q_BKGTh, k_BKTh, v_BKTh, segment_ids_BT, precision):
  outs, totals = [], []
  for start, stop in _blocks(q_BKGTh.shape[3]):
    q = q_BKGTh[:, :, :, start:stop]
    scores = _scores(q, k_BKTh[:, :, :stop], segment_ids_BT, start, precision)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    weight = jnp.sum(weights, axis=-1, keepdims=True)
    out = _product(
        'bkgts,bksh->bkgth',
        *(weights.astype(v_BKTh.dtype), v_BKTh[:, :, :stop], precision),
    )
    outs.append((out / weight).astype(q.dtype))
    totals.append(top + jnp.log(weight))
  keep = lambda parts: ad_checkpoint.checkpoint_name(
      jnp.concatenate(parts, axis=3), RESIDUALS
  )
  out, total = keep(outs), keep(totals)
  return out, (q_BKGTh, k_BKTh, v_BKTh, segment_ids_BT, out, total)


def _backward(precision, residuals, d_out):
  q_BKGTh, k_BKTh, v_BKTh, segment_ids_BT, out, total = residuals
  delta = jnp.sum(
      out.astype(jnp.float32) * d_out.astype(jnp.float32), -1, keepdims=True
  )
  product = functools.partial(_product, precision=precision)
  d_q = []
  d_k, d_v = jnp.zeros((2, *k_BKTh.shape), jnp.float32)
  for start, stop in _blocks(q_BKGTh.shape[3]):
    q, d, less, norm = (
        x[:, :, :, start:stop] for x in (q_BKGTh, d_out, delta, total)
    )
    k, v = k_BKTh[:, :, :stop], v_BKTh[:, :, :stop]
    scores = _scores(q, k, segment_ids_BT, start, precision)
    weights = jnp.exp(scores - norm)
    d_weights = product('bkgth,bksh->bkgts', d, v)
    scale = q.shape[-1] ** -0.5
    d_scores = (weights * (d_weights - less) * scale).astype(q.dtype)
    weights = weights.astype(q.dtype)
    d_q.append(product('bkgts,bksh->bkgth', d_scores, k).astype(q.dtype))
    d_k = d_k.at[:, :, :stop].add(product('bkgts,bkgth->bksh', d_scores, q))
    d_v = d_v.at[:, :, :stop].add(product('bkgts,bkgth->bksh', weights, d))
  return (
      jnp.concatenate(d_q, axis=3),
      d_k.astype(k_BKTh.dtype),
      d_v.astype(v_BKTh.dtype),
      None,
  )


attend.defvjp(_forward, _backward)


def _blocks(length: int) -> Iterator[tuple[int, int]]:
  """(first query, first query of the next block): few, so as to compile fast.

  Sizes are multiples of `_LEAST_BLOCK`, except that of the last.
  """
  size = -(-length // (_LEAST_BLOCK * _MOST_BLOCKS)) * _LEAST_BLOCK
  for start in range(0, length, size):
    yield start, min(start + size, length)


def _scores(q, k, segment_ids_BT, start, precision):
  """Scaled scores of a block of queries; the least float where it may not look.

  Padding looks at padding, so that every query sees at least itself.
  """
  stop = k.shape[2]
  scores = _product('bkgth,bksh->bkgts', q, k, precision) * q.shape[-1] ** -0.5
  same_BtS = (
      segment_ids_BT[:, start:stop, None] == segment_ids_BT[:, None, :stop]
  )
  before_tS = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)
  sees = (same_BtS & before_tS)[:, None, None]
  return jnp.where(sees, scores, jnp.finfo(jnp.float32).min)


def _product(equation, x, y, precision):
  return jnp.einsum(
      equation,
      x,
      y,
      precision=precision,
      preferred_element_type=jnp.float32,
  )
