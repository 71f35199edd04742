"""What training changes, and how it lies on a mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hgpo_jax import sharding

_HOST = 'pinned_host'


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
    moments_on: str = 'device',
) -> TrainState:
  """A fresh state for `params`, which lie where they shall lie.

  A subtree that mirrors the parameters (a moment) lies like them, so that the
  optimizer is split over fsdp as the parameters are; everything else (counts)
  is replicated. The parameters are copied: an update eats its state.

  Args:
    params: the parameters.
    optimizer: the optimizer.
    moments_on: as `AdamW.moments_on`.

  Raises:
    ValueError: the devices cannot keep moments on the host.
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
  state = jax.jit(init, out_shardings=shardings)(params)
  device, *_ = state.updates.devices()
  if not _on_host(moments_on, device):
    return state
  place = lambda x, where: (
      jax.tree.map(lambda y: y.with_memory_kind(_HOST), where)
      if mirrors(x)
      else where
  )
  shardings = jax.tree.map(
      place, state.opt_state, shardings.opt_state, is_leaf=mirrors
  )
  opt_state = jax.device_put(state.opt_state, shardings)
  return dataclasses.replace(state, opt_state=opt_state)


def move(tree: Any, shardings: Any) -> Any:
  """The arrays in other places; those that are there already as they are."""
  return jax.tree.map(
      lambda x, to: x if x.sharding == to else jax.device_put(x, to),
      tree,
      shardings,
  )


def device_sharding(where: jax.sharding.Sharding) -> jax.sharding.Sharding:
  """The same split, in the devices' own memory."""
  if where.memory_kind != _HOST:
    return where
  device, *_ = where.device_set
  return where.with_memory_kind(device.default_memory().kind)


def _on_host(moments_on: str, device: jax.Device) -> bool:
  can = _HOST in {memory.kind for memory in device.addressable_memories()}
  if moments_on == 'host' and not can:
    raise ValueError(
        f"AdamW.moments_on = 'host' needs devices with {_HOST!r} memory, which"
        f" {device.platform!r} devices have not; set it to 'device' or 'auto'"
    )
  # On CPU both memories are the same, and moving gains nothing.
  wanted = moments_on == 'host' or (
      moments_on == 'auto' and device.platform != 'cpu'
  )
  return wanted and can


def _replicated(shardings: Any) -> jax.sharding.Sharding:
  """A scalar's sharding over the devices of the others."""
  first = jax.tree.leaves(shardings)[0]
  if isinstance(first, jax.sharding.NamedSharding):
    return jax.sharding.NamedSharding(first.mesh, sharding.spec(()))
  return first
