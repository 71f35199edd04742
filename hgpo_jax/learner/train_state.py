"""What training changes, and how it lies on a mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hgpo_jax import sharding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Parameters and the optimizer; saved whole.

  Attributes:
    params: float32 parameters of the policy.
    opt_state: state of the optimizer.
    updates: int32, optimizer updates applied; skipped ones do not count.
  """

  params: Any
  opt_state: Any
  updates: jax.Array


def create(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
  """A fresh state for `params`, which lie where they shall lie.

  A subtree that mirrors the parameters (a moment) lies like them, so that the
  optimizer is split over fsdp as the parameters are; everything else (counts)
  is replicated. The parameters are copied: an update eats its state.
  """
  init = lambda p: TrainState(
      jax.tree.map(jnp.copy, p), optimizer.init(p), jnp.zeros((), jnp.int32)
  )
  like_params = jax.tree.map(lambda p: p.sharding, params)
  treedef = jax.tree.structure(params)
  mirrors = lambda x: jax.tree.structure(x) == treedef
  shardings = jax.tree.map(
      lambda x: like_params if mirrors(x) else _replicated(like_params),
      jax.eval_shape(init, params),
      is_leaf=mirrors,
  )
  return jax.jit(init, out_shardings=shardings)(params)


def _replicated(shardings: Any) -> jax.sharding.Sharding:
  """A scalar's sharding over the devices of the others."""
  first = jax.tree.leaves(shardings)[0]
  if isinstance(first, jax.sharding.NamedSharding):
    return jax.sharding.NamedSharding(first.mesh, sharding.spec(()))
  return first
