"""Qwen2 with a cache of keys and values: what prefill and decoding run.

The arithmetic is that of `qwen2`; the layout is another. Projections that read
the same input are one product, layers are apart, and a cache row holds token
`i` of its sequence in entry `i`, so that rows of different lengths decode side
by side and one sequence can go on where another left off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hgpo_jax import sharding
from hgpo_jax.models import base
from hgpo_jax.models import cache_rows
from hgpo_jax.models import layers
from hgpo_jax.models import lora
from hgpo_jax.models import quantize

# Masked scores; finite, so that a row without a single key stays finite too.
_MASKED = -1e30
# Numbers of entries are multiples of this.
_UNIT = 64


def decode_params(
    params: base.Params,
    config: base.ModelConfig,
    dtype: Any,
    int8: bool = False,
) -> base.Params:
  """Parameters for `extend`: adapters merged, projections fused, layers apart.

  The query heads of each key/value head stand before its key and its value,
  [D, K, H / K + 2, h], so that splitting key/value heads over devices splits
  all three alike. With `int8` the kernels of layers are `quantize.Int8`.
  """
  if isinstance(params['layers'], tuple):
    return params
  params = lora.merge(params)
  cast = lambda tree: jax.tree.map(lambda p: p.astype(dtype), tree)
  # Apart first, and fused then: no layer waits in memory for another.
  apart = (
      _fused(cast(jax.tree.map(lambda p, i=i: p[i], params['layers'])), config)
      for i in range(config.num_layers)
  )
  if int8:
    apart = map(_in_int8, apart)
  rest = {name: x for name, x in params.items() if name != 'layers'}
  return cast(rest) | {'layers': tuple(apart)}


def _fused(layer: base.Params, config: base.ModelConfig) -> base.Params:
  attention, mlp = layer['attention'], layer['mlp']
  return {
      'attention_norm': layer['attention_norm'],
      'mlp_norm': layer['mlp_norm'],
      'qkv': {
          leaf: _by_kv_head(attention, leaf, config)
          for leaf in ('kernel', 'bias')
      },
      'o': attention['o'],
      'gate_up': jnp.stack([mlp['gate']['kernel'], mlp['up']['kernel']], 1),
      'down': mlp['down'],
  }


def decode_axes(
    axes: sharding.LogicalAxes, layers: int, int8: bool = False
) -> sharding.LogicalAxes:
  """Logical axes of what `decode_params` makes of parameters with `axes`."""
  stacked = axes['layers']
  attention, mlp = stacked['attention'], stacked['mlp']
  of = lambda part, leaf: part[leaf][1:]
  kernel = lambda x: quantize.Int8(x, x[1:]) if int8 else x
  n_in, width = of(mlp['gate'], 'kernel')
  layer = {
      'attention_norm': {'scale': of(stacked['attention_norm'], 'scale')},
      'mlp_norm': {'scale': of(stacked['mlp_norm'], 'scale')},
      'qkv': {
          'kernel': kernel((*of(attention['k'], 'kernel'), None, None)),
          'bias': (*of(attention['k'], 'bias'), None, None),
      },
      'o': {'kernel': kernel(of(attention['o'], 'kernel'))},
      'gate_up': kernel((n_in, None, width)),
      'down': {'kernel': kernel(of(mlp['down'], 'kernel'))},
  }
  return axes | {'layers': (layer,) * layers}


def _in_int8(layer: base.Params) -> base.Params:
  found = {**layer, 'gate_up': quantize.quantize(layer['gate_up'])}
  for name in ('qkv', 'o', 'down'):
    kernel = quantize.quantize(layer[name]['kernel'])
    found[name] = {**layer[name], 'kernel': kernel}
  return found


def init_cache(
    config: base.ModelConfig, rows: int, entries: int, dtype: Any
) -> base.KVCache:
  """A cache of zeros."""
  lead, head_dim = (rows, config.num_kv_heads), config.head_dim
  tiles, tile = cache_rows.tiles(entries)
  zeros = lambda *shape: tuple(
      jnp.zeros((*lead, *shape), dtype) for _ in range(config.num_layers)
  )
  cache = base.KVCache(zeros(tiles, head_dim, tile), zeros(entries, head_dim))
  return jax.tree.map(cache_rows.pin, cache)


def extend(
    params: base.Params,
    config: base.ModelConfig,
    dtype: Any,
    cache: base.KVCache,
    tokens_NC: jax.Array,
    start_N: jax.Array,
    row_N: jax.Array | None,
) -> tuple[jax.Array, base.KVCache]:
  """See `base.LanguageModel.extend`."""
  rows, _, entries, _ = cache.v[0].shape
  if row_N is not None:
    row_N, start_N = cache_rows.in_share(row_N, start_N, rows, entries)
  place_NC = start_N[:, None] + jnp.arange(tokens_NC.shape[1])
  rotary = layers.rotary_angles(config, place_NC)
  x_NCD = params['embed']['embedding'][tokens_NC].astype(dtype)
  keys, values = [], []
  for layer, k, v in zip(params['layers'], cache.k, cache.v, strict=True):
    normed = layers.rms_norm(
        x_NCD, layer['attention_norm']['scale'], config.rms_norm_eps
    )
    q, k_new, v_new = _project(layer['qkv'], config, normed, rotary)
    k, v = cache_rows.write(k, v, k_new, v_new, row_N, place_NC)
    keys.append(k)
    values.append(v)
    if row_N is None:
      mask_NCA = jnp.arange(entries) <= place_NC[:, :, None]
      out = _attend(q, k[: len(q)], v[: len(q)], mask_NCA)
    else:
      out = _attend_to_rows(q, k, v, row_N, place_NC)
    x_NCD = x_NCD + _dot('nci,id->ncd', out, layer['o']['kernel'])
    x_NCD = _constrain(x_NCD + _mlp(layer, config, x_NCD))
  hidden = layers.rms_norm(
      x_NCD, params['final_norm']['scale'], config.rms_norm_eps
  )
  # A write past the end is dropped: loud, never over other entries.
  inside_NC1 = place_NC[:, :, None] < entries
  hidden = jnp.where(inside_NC1, hidden, jnp.nan)
  cache = base.KVCache(tuple(keys), tuple(values))
  return hidden, jax.tree.map(cache_rows.pin, cache)


def _by_kv_head(
    attention: Mapping[str, Mapping[str, jax.Array]],
    leaf: str,
    config: base.ModelConfig,
) -> jax.Array:
  """q, k and v side by side for each key/value head."""
  parts = [
      x.reshape(*x.shape[:-1], config.num_kv_heads, -1, config.head_dim)
      for x in (attention[name][leaf] for name in 'qkv')
  ]
  return jnp.concatenate(parts, axis=-2)


def _project(
    qkv: Mapping[str, jax.Array],
    config: base.ModelConfig,
    x_NCD: jax.Array,
    rotary: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Rotated queries [N, C, K, G, h] and keys, and values, [N, C, K, h]."""
  y = _dot('ncd,dkgh->nckgh', x_NCD, qkv['kernel']) + qkv['bias']
  rotated = layers.rotate(
      y[..., :-1, :].reshape(*y.shape[:2], -1, config.head_dim), rotary
  ).reshape(*y.shape[:3], -1, config.head_dim)
  return rotated[..., :-1, :], rotated[..., -1, :], y[..., -1, :]


def _mlp(
    layer: base.Params, config: base.ModelConfig, x_NCD: jax.Array
) -> jax.Array:
  normed = layers.rms_norm(
      x_NCD, layer['mlp_norm']['scale'], config.rms_norm_eps
  )
  both = _dot('ncd,dif->ncif', normed, layer['gate_up'])
  inner = jax.nn.silu(both[..., 0, :]) * both[..., 1, :]
  return _dot('ncf,fd->ncd', inner, layer['down']['kernel'])


def _attend_to_rows(
    q_NCKGh: jax.Array,
    k_SKThE: jax.Array,
    v_SKAh: jax.Array,
    row_N: jax.Array,
    place_NC: jax.Array,
) -> jax.Array:
  """`_attend` of blocks to their rows; to half the entries if that is enough.

  Early blocks of prompts see few entries, and are many. Those past the end are
  of no account, whatever they see.
  """
  entries = v_SKAh.shape[2]
  half = -(-entries // 2 // _UNIT) * _UNIT

  def attend(count):
    some = cache_rows.first(k_SKThE, v_SKAh, count)
    k, v = (cache_rows.read(x, row_N) for x in some)
    return _attend(q_NCKGh, k, v, jnp.arange(count) <= place_NC[:, :, None])

  if half >= entries:
    return attend(entries)
  beyond = ((place_NC >= half) & (place_NC < entries)).any()
  return jax.lax.cond(beyond, lambda: attend(entries), lambda: attend(half))


def _attend(
    q_NCKGh: jax.Array,
    k_NKThE: jax.Array,
    v_NKAh: jax.Array,
    mask_NCA: jax.Array,
) -> jax.Array:
  """Grouped-query attention, softmax in float32; returns [N, C, H * h].

  What is masked gets a weight of exactly 0, and sums run over entries in their
  order: a longer cache gives the same result, bit by bit on CPU.
  """
  blocks, length, kv_heads, groups, head_dim = q_NCKGh.shape
  q = q_NCKGh.transpose(0, 2, 3, 1, 4).reshape(
      blocks, kv_heads, groups * length, head_dim
  )
  # Tiles are a dimension of the batch: each is a product by itself.
  tiled = *q.shape[:2], k_NKThE.shape[2], *q.shape[2:]
  q_tiled = jnp.broadcast_to(q[:, :, None], tiled)
  scores = _dot('nktqh,nkthe->nktqe', q_tiled, k_NKThE, jnp.float32)
  scores = scores.swapaxes(2, 3) * head_dim**-0.5
  scores = scores.reshape(blocks, kv_heads, groups, length, -1)
  scores = jnp.where(mask_NCA[:, None, None], scores, _MASKED)
  weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
  total = weights.sum(axis=-1)
  out = _dot(
      'nkqa,nkah->nkqh',
      weights.astype(v_NKAh.dtype).reshape(*q.shape[:3], -1),
      v_NKAh,
      jnp.float32,
  ).reshape(*total.shape, head_dim)
  out = (out / total[..., None]).astype(q_NCKGh.dtype)
  return out.transpose(0, 3, 1, 2, 4).reshape(blocks, length, -1)


def _dot(
    equation: str,
    x: jax.Array,
    y: jax.Array | quantize.Int8,
    out: Any = None,
) -> jax.Array:
  # Accelerators multiply float32 in fewer bits unless told otherwise.
  exact = x.dtype == jnp.float32
  return quantize.dot(
      equation,
      x,
      y,
      precision=jax.lax.Precision.HIGHEST if exact else None,
      preferred_element_type=out or x.dtype,
  )


def _constrain(x_NCD: jax.Array) -> jax.Array:
  return sharding.constrain(x_NCD, 'batch', 'sequence', 'activation')
