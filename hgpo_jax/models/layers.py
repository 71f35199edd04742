"""The pieces of a decoder layer that have no parameters of their own."""

from __future__ import annotations

from collections.abc import Callable
import functools

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.models import base


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """x / sqrt(mean(x^2) + eps) * scale, the mean in float32."""
  x32 = x.astype(jnp.float32)
  mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
  normed = x32 * jax.lax.rsqrt(mean_square + eps)
  return normed.astype(x.dtype) * scale.astype(x.dtype)


def rotary_angles(
    config: base.ModelConfig, positions_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Cosines and sines [B, T, 1, h/2] of position * theta^(-2i/h)."""
  half = np.arange(0, config.head_dim, 2, dtype=np.float64)
  frequency = config.rope_theta ** -(half / config.head_dim)
  angle = positions_BT[:, :, None, None].astype(jnp.float32) * jnp.asarray(
      frequency, jnp.float32
  )
  return jnp.cos(angle), jnp.sin(angle)


def rotate(x_BTHh: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Rotates the pairs (i, i + h/2), the half-rotation of Hugging Face."""
  cos, sin = (r.astype(x_BTHh.dtype) for r in rotary)
  low, high = jnp.split(x_BTHh, 2, axis=-1)
  return jnp.concatenate(
      [low * cos - high * sin, high * cos + low * sin], axis=-1
  )


def project(
    x: jax.Array, kernel_IO: jax.Array, precision: jax.lax.Precision | None
) -> jax.Array:
  """x W over the last axis of x, in its dtype, with few copies backwards."""
  x_NI = x.reshape(-1, x.shape[-1])
  return _project(x_NI, kernel_IO, precision).reshape(*x.shape[:-1], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _project(x_NI, kernel_IO, precision):
  return jnp.matmul(x_NI, kernel_IO, precision=precision)


def _project_forward(x_NI, kernel_IO, precision):
  return _project(x_NI, kernel_IO, precision), (x_NI, kernel_IO)


def _project_backward(precision, residuals, d_NO):
  # The derived gradient of the kernel is made transposed, for which XLA copies
  # its operands transposed: on CPU that doubles the time of the backward pass.
  x_NI, kernel_IO = residuals
  contract = lambda x, y, axis: jax.lax.dot_general(
      x, y, (((axis,), (axis,)), ((), ())), precision=precision
  )
  return contract(d_NO, kernel_IO, 1), contract(x_NI, d_NO, 0)


_project.defvjp(_project_forward, _project_backward)


def in_parts(
    run: Callable[[jax.Array], jax.Array], x_BTD: jax.Array, parts: int
) -> jax.Array:
  """`run` of [B, T, D] a part of T at a time, again in the backward pass.

  Rows that are shorter than that, such as a single token, are one part.
  """
  batch, length, width = x_BTD.shape
  size = -(-length // parts)
  if parts == 1 or length < 2 * parts:
    return run(x_BTD)
  padded = jnp.pad(x_BTD, ((0, 0), (0, parts * size - length), (0, 0)))
  split = padded.reshape(batch, parts, size, width).swapaxes(0, 1)
  done = jax.lax.map(jax.checkpoint(run), split)
  return done.swapaxes(0, 1).reshape(batch, -1, width)[:, :length]
