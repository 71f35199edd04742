"""Batches as pytrees, and their place on a mesh."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import numpy as np

from hgpo_jax import sharding
from hgpo_jax import types

Batch = TypeVar('Batch', types.RolloutBatch, types.PolicyBatch)

# Here and not in `types`, which knows nothing of jax.
for _record in (types.RolloutBatch, types.PolicyBatch):
  jax.tree_util.register_dataclass(
      _record,
      data_fields=[field.name for field in dataclasses.fields(_record)],
      meta_fields=[],
  )


def put_micro_batches(
    batch: Batch, rows: int, mesh: jax.sharding.Mesh | None
) -> Batch:
  """Places [B, ...] arrays as [B / rows, rows, ...], split over (data, fsdp).

  Every micro-batch is split over all data-parallel shares, not one share's
  rows after another's.

  Raises:
    ValueError: B is not a multiple of `rows`, or the mesh does not divide it.
  """
  total = jax.tree.leaves(batch)[0].shape[0]
  if total % rows:
    raise ValueError(
        f'a batch of {total} rows is not a multiple of the {rows} rows of one '
        'pass; pad it with rows of weight 0 (Minibatches.micro_batch_steps x '
        'data-parallel shares of the mesh).'
    )
  stack = lambda x: np.asarray(x).reshape(total // rows, rows, *x.shape[1:])
  batch = jax.tree.map(stack, batch)
  if mesh is None:
    return jax.tree.map(jax.numpy.asarray, batch)
  sharding.check_divides(mesh, {'batch': rows})
  place = jax.sharding.NamedSharding(mesh, sharding.spec((None, 'batch')))
  return sharding.put(batch, jax.tree.map(lambda _: place, batch))
