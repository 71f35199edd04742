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
  groups = q_BKGTh.shape[:3]
  outs, totals = [], []
  for start, stop in _blocks(q_BKGTh.shape[3]):
    q = _block(q_BKGTh, start, stop)
    scores = _scores(q, k_BKTh[:, :, :stop], segment_ids_BT, start, precision)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    weight = jnp.sum(weights, axis=-1, keepdims=True)
    out = _product(
        'bkns,bksh->bknh',
        *(weights.astype(v_BKTh.dtype), v_BKTh[:, :, :stop], precision),
    )
    outs.append((out / weight).astype(q.dtype))
    totals.append(top + jnp.log(weight))
  keep = lambda parts: ad_checkpoint.checkpoint_name(
      _joined(parts, groups), RESIDUALS
  )
  out, total = keep(outs), keep(totals)
  return out, (q_BKGTh, k_BKTh, v_BKTh, segment_ids_BT, out, total)


def _backward(precision, residuals, d_out):
  q_BKGTh, k_BKTh, v_BKTh, segment_ids_BT, out, total = residuals
  delta = jnp.sum(
      out.astype(jnp.float32) * d_out.astype(jnp.float32), -1, keepdims=True
  )
  product = functools.partial(_product, precision=precision)
  scale = q_BKGTh.shape[-1] ** -0.5
  d_q = []
  d_k, d_v = jnp.zeros((2, *k_BKTh.shape), jnp.float32)
  for start, stop in _blocks(q_BKGTh.shape[3]):
    q, d, less, norm = (
        _block(x, start, stop) for x in (q_BKGTh, d_out, delta, total)
    )
    k, v = k_BKTh[:, :, :stop], v_BKTh[:, :, :stop]
    scores = _scores(q, k, segment_ids_BT, start, precision)
    weights = jnp.exp(scores - norm)
    d_weights = product('bknh,bksh->bkns', d, v)
    d_scores = (weights * (d_weights - less) * scale).astype(q.dtype)
    weights = weights.astype(q.dtype)
    d_q.append(product('bkns,bksh->bknh', d_scores, k).astype(q.dtype))
    d_k = d_k.at[:, :, :stop].add(product('bkns,bknh->bksh', d_scores, q))
    d_v = d_v.at[:, :, :stop].add(product('bkns,bknh->bksh', weights, d))
  return (
      _joined(d_q, q_BKGTh.shape[:3]),
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


def _block(x_BKGTi: jax.Array, start: int, stop: int) -> jax.Array:
  """Some queries of all heads of a group, [B, K, N, i] with N = G times t.

  One axis in place of two spares XLA copies of what is as large as scores.
  """
  x = x_BKGTi[:, :, :, start:stop]
  return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _joined(blocks_BKNi: list[jax.Array], groups: tuple[int, ...]) -> jax.Array:
  """[B, K, G, T, i] of its blocks."""
  parts = [x.reshape(*groups, -1, x.shape[-1]) for x in blocks_BKNi]
  return jnp.concatenate(parts, axis=3)


def _scores(q_BKNh, k_BKSh, segment_ids_BT, start, precision):
  """Scaled scores of a block of queries; the least float where it may not look.

  Padding looks at padding, so that every query sees at least itself.
  """
  stop = k_BKSh.shape[2]
  scores = _product('bknh,bksh->bkns', q_BKNh, k_BKSh, precision)
  before_tS = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)
  queries_Bt = segment_ids_BT[:, start:stop, None]
  sees_BtS = (queries_Bt == segment_ids_BT[:, None, :stop]) & before_tS
  heads = q_BKNh.shape[2] // (stop - start)
  sees_B1NS = jnp.tile(sees_BtS, (1, heads, 1))[:, None]
  scores *= q_BKNh.shape[-1] ** -0.5
  return jnp.where(sees_B1NS, scores, jnp.finfo(jnp.float32).min)


def _product(equation, x, y, precision):
  return jnp.einsum(
      equation,
      x,
      y,
      precision=precision,
      preferred_element_type=jnp.float32,
  )
