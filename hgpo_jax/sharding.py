"""Meshes, and the one table from logical axes to mesh axes.

Parameters and activations name their axes ('heads', 'batch', ...). `RULES`
says which mesh axes each of them is split over; nothing else in the project
names a mesh axis. Meshes have Auto axis types: the compiler propagates
shardings, `constrain` pins them where propagation would lose them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
import math
import threading
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from hgpo_jax import config

MESH_AXES = ('data', 'fsdp', 'tensor')

# Logical axis -> the mesh axes that split it; () is replicated.
RULES: Mapping[str, tuple[str, ...]] = {
    'batch': ('data', 'fsdp'),
    'sequence': (),
    'activation': (),
    'layers': (),
    'norm': (),
    'embed': ('fsdp',),
    'heads': ('tensor',),
    'kv_heads': ('tensor',),
    'mlp': ('tensor',),
    'vocab': ('tensor',),
}

_launching = threading.RLock()

# A tree that mirrors parameters, with a tuple of logical axes at each leaf.
LogicalAxes = Any


@config.configurable
@dataclasses.dataclass(frozen=True)
class Mesh:
  """How devices are arranged; one of the three may be -1: all the rest.

  Attributes:
    data: copies of the parameters; rows of a batch are split over it.
    fsdp: parameters, optimizer state and rows are split over it.
    tensor: heads, MLP width and vocabulary are split over it.
  """

  data: int = 1
  fsdp: int = -1
  tensor: int = 1

  def shape(self, num_devices: int) -> tuple[int, int, int]:
    """Sizes of the axes for a number of devices; raises if they don't fit."""
    sizes = {name: getattr(self, name) for name in MESH_AXES}
    free = [name for name, size in sizes.items() if size == -1]
    bad = [name for name, size in sizes.items() if size < 1 and size != -1]
    if bad or len(free) > 1:
      raise ValueError(
          f'Mesh({_assignments(sizes)}): every axis must be at least 1, and at'
          ' most one may be -1 (the remaining devices). Set Mesh.data,'
          ' Mesh.fsdp and Mesh.tensor.'
      )
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if num_devices % fixed or (not free and fixed != num_devices):
      wanted = 'divide' if free else 'equal'
      raise ValueError(
          f'Mesh({_assignments(sizes)}): the product {fixed} must {wanted} the'
          f' number of devices, {num_devices}. Change Mesh.data, Mesh.fsdp or'
          ' Mesh.tensor; one of them may be -1 to take the rest.'
      )
    for name in free:
      sizes[name] = num_devices // fixed
    return tuple(sizes[name] for name in MESH_AXES)

  def make_mesh(
      self, devices: Sequence[jax.Device] | None = None
  ) -> jax.sharding.Mesh:
    """The mesh over `devices`, by default all of them, with Auto axes."""
    devices = list(jax.devices() if devices is None else devices)
    return jax.make_mesh(
        self.shape(len(devices)),
        MESH_AXES,
        axis_types=(AxisType.Auto,) * len(MESH_AXES),
        devices=devices,
    )


def _assignments(sizes: Mapping[str, int]) -> str:
  return ', '.join(f'{name}={size}' for name, size in sizes.items())


def spec(logical_axes: Sequence[str | None]) -> PartitionSpec:
  """The partition of an array with these logical axes; None: replicated."""
  unknown = [a for a in logical_axes if a is not None and a not in RULES]
  if unknown:
    raise ValueError(
        f'Unknown logical axes {unknown} in {tuple(logical_axes)}; expected'
        f' None or one of {sorted(RULES)}. Add a rule to sharding.RULES.'
    )
  entries = [RULES[a] if a is not None else () for a in logical_axes]
  # A one-axis entry is spelled by its name, the form that jax reports back.
  return PartitionSpec(*(e[0] if len(e) == 1 else (e or None) for e in entries))


def ways(mesh: jax.sharding.Mesh, logical_axis: str) -> int:
  """Into how many parts the mesh splits a logical axis."""
  return math.prod(mesh.shape[axis] for axis in RULES[logical_axis])


def check_divides(mesh: jax.sharding.Mesh, sizes: Mapping[str, int]) -> None:
  """Raises unless the mesh splits every logical axis into equal parts.

  Args:
    mesh: a mesh with the axes `MESH_AXES`.
    sizes: size of each logical axis, such as {'kv_heads': 2}.
  """
  for axis, size in sizes.items():
    parts = ways(mesh, axis)
    if size % parts:
      over = ' x '.join(f'{a}={mesh.shape[a]}' for a in RULES[axis])
      knobs = ' or '.join(f'Mesh.{a}' for a in RULES[axis])
      raise ValueError(
          f'The mesh splits {axis!r} ({size}) over {over}, but {size} is not'
          f' divisible by {parts}. Set {knobs} so that the product divides'
          f' {size}.'
      )


def param_shardings(mesh: jax.sharding.Mesh, logical_axes: LogicalAxes) -> Any:
  """A tree of shardings for a tree of logical axes (tuples at the leaves)."""
  return jax.tree.map(
      lambda axes: NamedSharding(mesh, spec(axes)),
      logical_axes,
      is_leaf=lambda x: isinstance(x, tuple),
  )


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
  """Rows over (data, fsdp), every other axis whole; for arrays [B, ...]."""
  return NamedSharding(mesh, spec(('batch',)))


def constrain(x: jax.Array, *logical_axes: str | None) -> jax.Array:
  """Pins the sharding of `x`; without a mesh (`jax.set_mesh`) it is `x`.

  An axis whose size the mesh does not divide is left whole, so that a single
  row passes through a program that is otherwise split by rows.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return x
  if x.ndim != len(logical_axes):
    raise ValueError(
        f'constrain: array of shape {x.shape} has {x.ndim} axes, but'
        f' {len(logical_axes)} logical axes were given: {logical_axes}.'
    )
  fitting = [
      axis if axis is None or not size % ways(mesh, axis) else None
      for axis, size in zip(logical_axes, x.shape)
  ]
  return jax.lax.with_sharding_constraint(x, spec(fitting))


def launching() -> contextlib.AbstractContextManager[Any]:
  """Launch programs of the current mesh inside it if two threads do so.

  A program that is split starts on every device and there waits for the others.
  Two that are launched at once may come in another order on each device, and
  wait for each other for good; so one thread launches after the other. What
  they compute is not waited for. On one device there is nothing to order.
  """
  mesh = jax.sharding.get_abstract_mesh()
  alone = mesh.empty or mesh.size == 1
  return contextlib.nullcontext() if alone else _launching


def put(tree: Any, shardings: Any) -> Any:
  """Places host arrays on the mesh; each process gives the whole array."""

  def place(leaf: Any, sharding: NamedSharding) -> jax.Array:
    array = np.asarray(leaf)
    return jax.make_array_from_callback(
        array.shape, sharding, lambda index: array[index]
    )

  return jax.tree.map(place, tree, shardings)
