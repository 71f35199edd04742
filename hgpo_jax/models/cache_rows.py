"""Reads and writes rows of a cache; on a mesh, each share its own.

A mesh may split the rows of a cache into shares. The compiler knows nothing of
the rows that a number picks, and brings those of all shares to every one of
them; so blocks come share by share, and each picks among the rows of its own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax import sharding


def shares_of(rows: int) -> int:
  """Into how many shares the mesh in force splits the rows of a cache."""
  return sharding.parts('batch', rows)


def in_share(
    row_N: jax.Array, start_N: jax.Array, rows: int, entries: int
) -> tuple[jax.Array, jax.Array]:
  """Rows as `read` and `write` take them, and starts of their blocks.

  Args:
    row_N: of each block, among all rows; equal parts, one a share.
    start_N: first entry of each block.
    rows: of the cache.
    entries: of a row.

  Returns:
    (rows, each counted from the first of its share; starts, past the end for
    rows that are not of the block's share).

  Raises:
    ValueError: the shares do not divide the blocks.
  """
  shares = shares_of(rows)
  if shares == 1:
    return row_N, start_N
  blocks, size = len(row_N), rows // shares
  if blocks % shares:
    raise ValueError(
        f'{blocks} blocks for the rows of a cache that the mesh splits into'
        f' {shares} shares; expected as many for each share: fill them up with'
        ' blocks that start past the last entry'
    )
  row_N = row_N - jnp.repeat(jnp.arange(shares) * size, blocks // shares)
  own_N = (row_N >= 0) & (row_N < size)
  return jnp.where(own_N, row_N, 0), jnp.where(own_N, start_N, entries)


def read(x_SKyz: jax.Array, row_N: jax.Array) -> jax.Array:
  """Rows [N, K, y, z] of keys or values, see `in_share`."""
  shares = shares_of(len(x_SKyz))
  if shares == 1:
    return x_SKyz[row_N]
  pick = lambda x, row: x[row]
  return sharding.apart(pick, 'batch')(x_SKyz, row_N)


def write(
    k_SKhA: jax.Array,
    v_SKAh: jax.Array,
    k_NCKh: jax.Array,
    v_NCKh: jax.Array,
    row_N: jax.Array | None,
    place_NC: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """The cache with new entries; those past the end of a row are dropped.

  Args:
    k_SKhA: keys of a layer.
    v_SKAh: values of it.
    k_NCKh: new keys.
    v_NCKh: new values.
    row_N: their rows, see `in_share`; None for the first N.
    place_NC: their entries.
  """
  shares = shares_of(len(k_SKhA))
  if row_N is None and len(place_NC) == len(k_SKhA) and shares > 1:
    # Each row writes to itself, which the compiler sees of a batched write
    # alone: of the other it gathers what is written. On CPU that one is faster.
    put_k = lambda old, new, place: old.at[:, :, place].set(new, mode='drop')
    put_v = lambda old, new, place: old.at[:, place].set(new, mode='drop')
    return (
        jax.vmap(put_k)(k_SKhA, k_NCKh.transpose(0, 2, 3, 1), place_NC),
        jax.vmap(put_v)(v_SKAh, v_NCKh.swapaxes(1, 2), place_NC),
    )
  if row_N is None or shares == 1:
    row_N = jnp.arange(len(place_NC)) if row_N is None else row_N
    return _put(k_SKhA, v_SKAh, k_NCKh, v_NCKh, row_N, place_NC)
  put = sharding.apart(_put, 'batch')
  return put(k_SKhA, v_SKAh, k_NCKh, v_NCKh, row_N, place_NC)


def _put(
    k_SKhA: jax.Array,
    v_SKAh: jax.Array,
    k_NCKh: jax.Array,
    v_NCKh: jax.Array,
    row_N: jax.Array,
    place_NC: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  at = lambda x, *middle: x.at[row_N[:, None], *middle, place_NC]
  every = slice(None)
  return (
      at(k_SKhA, every, every).set(k_NCKh, mode='drop'),
      at(v_SKAh, every).set(v_NCKh, mode='drop'),
  )
