"""Batches as pytrees, and their place on a mesh."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax

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


def put(batch: Batch, mesh: jax.sharding.Mesh | None) -> Batch:
  """Places arrays [B, ...] on the mesh, rows split over (data, fsdp).

  Raises:
    ValueError: the mesh does not divide B.
  """
  if mesh is None:
    return jax.tree.map(jax.numpy.asarray, batch)
  sharding.check_divides(mesh, {'batch': jax.tree.leaves(batch)[0].shape[0]})
  place = sharding.batch_sharding(mesh)
  return sharding.put(batch, jax.tree.map(lambda _: place, batch))
