"""Kernels of decoder layers in int8, one scale an output: smaller and rounder.

For sampling alone: reading weights is what a decode step spends its time on.
Embedding, head, norms and biases stay as they are.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

_LARGEST = 127.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8:
  """A kernel [I, ...] as round(w / s), with s = max |w| / 127 over I.

  So no entry is off by more than s / 2.

  Attributes:
    values: int8 [I, ...].
    scale: float32 [...], one an output; 1 where all entries are 0.
  """

  values: jax.Array
  scale: jax.Array


def quantize(kernel: jax.Array) -> Int8:
  """A kernel in int8; its inputs lie on axis 0."""
  kernel = kernel.astype(jnp.float32)
  largest = jnp.max(jnp.abs(kernel), axis=0)
  scale = jnp.where(largest > 0, largest / _LARGEST, 1.0)
  return Int8(jnp.round(kernel / scale).astype(jnp.int8), scale)


def dot(
    equation: str, x: jax.Array, kernel: jax.Array | Int8, **settings: Any
) -> jax.Array:
  """`jnp.einsum` of x and a kernel whose inputs lie on axis 0.

  Outputs of the equation have to end with those of the kernel, in order.
  """
  if not isinstance(kernel, Int8):
    return jnp.einsum(equation, x, kernel, **settings)
  y = jnp.einsum(equation, x, kernel.values.astype(x.dtype), **settings)
  return (y * kernel.scale).astype(y.dtype)
