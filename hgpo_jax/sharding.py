"""Meshes, and the one table from logical axes to mesh axes.

Parameters and activations name their axes ('heads', 'batch', ...). `RULES`
says which mesh axes each of them is split over; nothing else in the project
names a mesh axis. Meshes have Auto axis types: the compiler propagates
shardings, `constrain` pins them where propagation would lose them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

  @property
  def name(self) -> str:
    """Whose fields are to be set."""
    return type(self).__name__

  def shape(self, num_devices: int) -> tuple[int, int, int]:
    """Sizes of the axes for a number of devices; raises if they don't fit."""
    own, sizes = self.name, {name: getattr(self, name) for name in MESH_AXES}
    free = [name for name, size in sizes.items() if size == -1]
    bad = [name for name, size in sizes.items() if size < 1 and size != -1]
    if bad or len(free) > 1:
      raise ValueError(
          f'{own}({_assignments(sizes)}): every axis must be at least 1, and at'
          f' most one may be -1 (the remaining devices). Set {own}.data,'
          f' {own}.fsdp and {own}.tensor.'
      )
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if num_devices % fixed or (not free and fixed != num_devices):
      wanted = 'divide' if free else 'equal'
      raise ValueError(
          f'{own}({_assignments(sizes)}): the product {fixed} must {wanted} the'
          f' number of devices, {num_devices}. Change {own}.data, {own}.fsdp or'
          f' {own}.tensor; one of them may be -1 to take the rest.'
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


@config.configurable
@dataclasses.dataclass(frozen=True)
class RolloutMesh(Mesh):
  """How the same devices are arranged while responses are sampled.

  Attributes:
    data: copies of the weights; rows of the cache are split over it.
    fsdp: weights and rows are split over it. Above 1 every step of decoding
      gathers the weights.
    tensor: heads, MLP width and vocabulary are split over it. More than in
      training where a whole copy of the weights does not fit a device.
  """

  data: int = -1
  fsdp: int = 1
  tensor: int = 1


def rollout_shape(
    shape: Sequence[int], spec: Mesh | None = None
) -> tuple[int, int, int]:
  """Sizes of the axes for sampling, on the devices of a mesh for training.

  Args:
    shape: sizes of the training mesh.
    spec: what is wanted; None keeps `tensor` and makes data of what was fsdp,
      so that no step of decoding has to gather weights.
  """
  data, fsdp, tensor = shape
  if spec is None:
    return data * fsdp, 1, tensor
  return spec.shape(data * fsdp * tensor)


def rollout_mesh(
    mesh: jax.sharding.Mesh, spec: Mesh | None = None
) -> jax.sharding.Mesh:
  """The mesh for sampling: the devices of `mesh` in their order.

  The order lets one program take arrays of the one mesh and give those of the
  other, see `rollout_shape`.
  """
  shape = rollout_shape(mesh.devices.shape, spec)
  return jax.sharding.Mesh(
      mesh.devices.reshape(shape), MESH_AXES, axis_types=mesh.axis_types
  )


def use(
    mesh: jax.sharding.Mesh | None,
) -> contextlib.AbstractContextManager[Any]:
  """Where `constrain` finds the mesh; nothing without one."""
  return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


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


def parts(
    logical_axis: str, size: int, mesh: jax.sharding.Mesh | None = None
) -> int:
  """Into how many parts an axis is split; 1 where that is left whole.

  Args:
    logical_axis: its name.
    size: its size; what the mesh does not divide is left whole.
    mesh: by default the one in force, if any.
  """
  mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
  count = 1 if mesh.empty else ways(mesh, logical_axis)
  return 1 if size % count else count


def apart(
    function: Callable[..., Any], logical_axis: str
) -> Callable[..., Any]:
  """Does what `function` does in each part of the mesh alone.

  Axis 0 of what it takes and gives is the logical axis, which the mesh in force
  splits into equal parts. Other axes are left to the compiler.
  """
  names = RULES[logical_axis]
  split = spec((logical_axis,))
  return jax.shard_map(
      function, in_specs=split, out_specs=split, axis_names=frozenset(names)
  )


def check_divides(
    mesh: jax.sharding.Mesh, sizes: Mapping[str, int], name: str = 'Mesh'
) -> None:
  """Raises unless the mesh splits every logical axis into equal parts.

  Args:
    mesh: a mesh with the axes `MESH_AXES`.
    sizes: size of each logical axis, such as {'kv_heads': 2}.
    name: `Mesh.name` of what it was made from.
  """
  for axis, size in sizes.items():
    parts = ways(mesh, axis)
    if size % parts:
      over = ' x '.join(f'{a}={mesh.shape[a]}' for a in RULES[axis])
      knobs = ' or '.join(f'{name}.{a}' for a in RULES[axis])
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
      is_leaf=is_axes,
  )


def is_axes(x: Any) -> bool:
  """Whether `x` is the logical axes of one array, not a tuple of trees."""
  return isinstance(x, tuple) and all(
      axis is None or isinstance(axis, str) for axis in x
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
