"""Reads and writes rows of a cache; on a mesh, each share its own.

A mesh may split the rows of a cache into shares. The compiler knows nothing of
the rows that a number picks, and brings those of all shares to every one of
them; so blocks come share by share, and each picks among the rows of its own.

Keys stand in tiles, [S, K, T, h, E]: E entries after E entries, each with all
of the head dimension h. Accelerators take whole rows, T = 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from hgpo_jax import sharding

# Entries of a tile on CPU. In whole rows the numbers that it reads one after the
# other are far apart: scores of decoding took 2.5 ms there, 0.9 ms in tiles.
_CPU_TILE = 64


def tiles(entries: int) -> tuple[int, int]:
  """How many tiles of keys so many entries are, and the entries of one."""
  split = jax.default_backend() == 'cpu' and entries % _CPU_TILE == 0
  return (entries // _CPU_TILE, _CPU_TILE) if split else (1, entries)


def first(
    k_SKThE: jax.Array, v_SKAh: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
  """The first entries of each row: as many as `tiles` makes whole tiles of."""
  tile = min(count, k_SKThE.shape[4])
  return k_SKThE[:, :, : count // tile, :, :tile], v_SKAh[:, :, :count]


def grow(
    k_SKThE: jax.Array, v_SKAh: jax.Array, entries: int
) -> tuple[jax.Array, jax.Array]:
  """Keys and values of a layer with more entries a row, of zeros."""
  count, tile = tiles(entries)
  more_tiles, longer = count - k_SKThE.shape[2], tile - k_SKThE.shape[4]
  even = (0, 0)
  k = jnp.pad(k_SKThE, (even, even, (0, more_tiles), even, (0, longer)))
  v = jnp.pad(v_SKAh, (even, even, (0, entries - v_SKAh.shape[2]), even))
  return pin(k), pin(v)


def pin(x_SK: jax.Array) -> jax.Array:
  """Pins rows and heads to the axes of the mesh that split them."""
  return sharding.constrain(
      x_SK, 'batch', 'kv_heads', *[None] * (x_SK.ndim - 2)
  )


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


def read(x_S: jax.Array, row_N: jax.Array) -> jax.Array:
  """Rows of keys or values, see `in_share`."""
  shares = shares_of(len(x_S))
  if shares == 1:
    return x_S[row_N]
  pick = lambda x, row: x[row]
  return sharding.apart(pick, 'batch')(x_S, row_N)


def write(
    k_SKThE: jax.Array,
    v_SKAh: jax.Array,
    k_NCKh: jax.Array,
    v_NCKh: jax.Array,
    row_N: jax.Array | None,
    place_NC: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """The cache with new entries; those past the end of a row are dropped.

  Args:
    k_SKThE: keys of a layer.
    v_SKAh: values of it.
    k_NCKh: new keys.
    v_NCKh: new values.
    row_N: their rows, see `in_share`; None for the first N.
    place_NC: their entries.
  """
  shares, tile = shares_of(len(k_SKThE)), k_SKThE.shape[4]
  if row_N is None and len(place_NC) == len(k_SKThE) and shares > 1:
    # Each row writes to itself, which the compiler sees of a batched write
    # alone: of the other it gathers what is written. On CPU that one is faster.
    put_k = lambda old, new, place: old.at[
        :, place // tile, :, place % tile
    ].set(new, mode='drop')
    put_v = lambda old, new, place: old.at[:, place].set(new, mode='drop')
    return (
        jax.vmap(put_k)(k_SKThE, k_NCKh, place_NC),
        jax.vmap(put_v)(v_SKAh, v_NCKh.swapaxes(1, 2), place_NC),
    )
  if row_N is None or shares == 1:
    row_N = jnp.arange(len(place_NC)) if row_N is None else row_N
    return _put(k_SKThE, v_SKAh, k_NCKh, v_NCKh, row_N, place_NC)
  put = sharding.apart(_put, 'batch')
  return put(k_SKThE, v_SKAh, k_NCKh, v_NCKh, row_N, place_NC)


def _put(
    k_SKThE: jax.Array,
    v_SKAh: jax.Array,
    k_NCKh: jax.Array,
    v_NCKh: jax.Array,
    row_N: jax.Array,
    place_NC: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  row_N1, every, tile = row_N[:, None], slice(None), k_SKThE.shape[4]
  k_at = k_SKThE.at[row_N1, every, place_NC // tile, every, place_NC % tile]
  v_at = v_SKAh.at[row_N1, every, place_NC]
  return k_at.set(k_NCKh, mode='drop'), v_at.set(v_NCKh, mode='drop')
