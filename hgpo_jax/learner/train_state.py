"""What training changes, and how it lies on a mesh."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Any

from hgpo_jax import sharding
import jax
import jax.numpy as jnp
import optax


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


def create(
    params: Any,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh | None = None,
) -> TrainState:
  """A fresh state for `params`; moments lie where their parameters lie.

  On a mesh, `params` are expected to be there already; everything without a
  parameter of its own (counts) is replicated.
  """
  init = lambda p: TrainState(p, optimizer.init(p), jnp.zeros((), jnp.int32))
  if mesh is None:
    return jax.jit(init)(params)
  return jax.jit(init, out_shardings=shardings(params, init, mesh))(params)


def shardings(
    params: Any, init: Callable[[Any], TrainState], mesh: jax.sharding.Mesh
) -> TrainState:
  """The sharding of each leaf of `init(params)`.

  A subtree that mirrors the parameters (a moment) takes their shardings, so
  that the optimizer is split over fsdp like the parameters themselves.
  """
  replicated = jax.sharding.NamedSharding(mesh, sharding.spec(()))
  like_params = jax.tree.map(lambda p: p.sharding, params)
  treedef = jax.tree.structure(params)
  mirrors = lambda x: jax.tree.structure(x) == treedef
  return jax.tree.map(
      lambda x: like_params if mirrors(x) else replicated,
      jax.eval_shape(init, params),
      is_leaf=mirrors,
  )
