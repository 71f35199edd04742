"""Kernels of decoder layers in int8, one scale an output: smaller and rounder.

For sampling alone: reading weights is what a decode step spends its time on.
Embedding, head, norms and biases stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from hgpo_jax.models import base
from hgpo_jax.models import layers

_SCALE = 'kernel_scale'
_LARGEST = 127.0


def quantize(params: base.Params) -> base.Params:
  """Parameters whose layers have int8 kernels; for either layout of layers.

  w is kept as round(w / s), with s = max |w| / 127 over the inputs of an
  output, so that no entry moves by more than s / 2. Merge adapters first;
  `decode_params` does so.

  Raises:
    ValueError: an adapter is attached, or kernels are int8 already.
  """
  given = params['layers']
  stacked = isinstance(given, Mapping)
  found = [_quantized(layer) for layer in ((given,) if stacked else given)]
  return {**params, 'layers': found[0] if stacked else tuple(found)}


def matmul(
    params: Mapping[str, jax.Array],
    x: jax.Array,
    precision: jax.lax.Precision | None = None,
) -> jax.Array:
  """x W of a projection, its kernel in int8 or not, in the dtype of x."""
  y = layers.project(x, params['kernel'].astype(x.dtype), precision)
  if _SCALE not in params:
    return y
  return (y * params[_SCALE]).astype(x.dtype)


def _quantized(part: base.Params) -> base.Params:
  if not isinstance(part, Mapping):
    return part
  if 'kernel' not in part:
    return {name: _quantized(x) for name, x in part.items()}
  extra = set(part) - {'kernel', 'bias'}
  if extra:
    raise ValueError(
        f'quantize: a projection has {sorted(extra)} beside its kernel and'
        ' bias; expected float weights without adapters, as'
        ' Qwen2.decode_params gives them'
    )
  kernel = part['kernel'].astype(jnp.float32)
  largest = jnp.max(jnp.abs(kernel), axis=-2, keepdims=True)
  # A column of zeros stays one.
  scale = jnp.where(largest > 0, largest / _LARGEST, 1.0)
  rounded = jnp.round(kernel / scale).astype(jnp.int8)
  return {**part, 'kernel': rounded, _SCALE: scale}
