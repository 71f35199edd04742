"""Checkpoints: the whole train state and the counters, atomic, any mesh.

A checkpoint is a folder named by its iteration. Each field of the state is an
item of its own; the item `meta` is JSON with the counters and, for each array,
its type, shape and digest, so that a damaged file is noticed and not trained
on. Orbax writes to a temporary folder and renames it, so that a checkpoint is
there whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
import contextlib
import dataclasses
import hashlib
import json
import os
import time
from typing import Any, Generic, TypeVar

from absl import logging
from etils import epath
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

State = TypeVar('State')
_META = 'meta'
_UINTS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


class CheckpointError(RuntimeError):
  """A checkpoint could not be saved, read, or used for this run."""


class _DamagedError(Exception):
  """A checkpoint that cannot be read; an older one may do."""


@dataclasses.dataclass(frozen=True)
class Restored(Generic[State]):
  """A checkpoint read back: its iteration, the state and the counters."""

  iteration: int
  state: State
  counters: Mapping[str, Any]


class Checkpoints:
  """The checkpoints of one run; keeps the newest `keep` of them.

  With `read_only` nothing in the folder is touched: for looking at a run that
  may be saving at this moment.
  """

  def __init__(
      self,
      folder: str | os.PathLike[str],
      keep: int = 2,
      read_only: bool = False,
  ):
    if keep < 1:
      raise ValueError(f'keep={keep}; expected at least 1 checkpoint to keep.')
    self._folder = epath.Path(os.fspath(folder)).absolute()
    self._read_only = read_only
    options = ocp.CheckpointManagerOptions(
        max_to_keep=None if read_only else keep,
        cleanup_tmp_directories=not read_only,
        enable_async_checkpointing=False,
        create=not read_only,
        read_only=read_only,
    )
    self._manager = ocp.CheckpointManager(self._folder, options=options)

  def iterations(self) -> list[int]:
    """Iterations of the complete checkpoints, oldest first."""
    return sorted(self._manager.all_steps())

  def save(
      self, iteration: int, state: Any, counters: Mapping[str, Any]
  ) -> None:
    """Saves `state` (a dataclass of pytrees) and `counters` (JSON values).

    Raises:
      CheckpointError: it could not be written; older ones are untouched.
    """
    items = _items(state)
    meta = {'counters': dict(counters), 'arrays': _describe(items)}
    saves = {k: ocp.args.StandardSave(_wrap(v)) for k, v in items.items()}
    saves[_META] = ocp.args.JsonSave(meta)
    try:
      self._manager.save(
          iteration, args=ocp.args.Composite(**saves), force=True
      )
    except Exception as error:  # Orbax raises many kinds, bare Exception too.
      self._drop_partial(iteration)
      raise CheckpointError(
          f'{self._folder}: the checkpoint of iteration {iteration} could not '
          f'be saved ({_first_line(error)}). Complete checkpoints: '
          f'{self.iterations()}; they are untouched. Free disk space or lower '
          'the number of checkpoints to keep, then run the same command again.'
      ) from error

  def restore(self, like: State) -> Restored[State] | None:
    """Reads the newest checkpoint that is whole; None if there is none.

    `like` is the state with arrays or `jax.ShapeDtypeStruct`s as leaves; each
    names the sharding to restore onto, whatever mesh the checkpoint was saved
    from. If a checkpoint is damaged, the one before it is taken, with a
    warning, and the damaged one renamed to `damaged-<iteration>`.

    Raises:
      CheckpointError: no checkpoint can be read, or it is not one of this
        state: an item or array is missing or of another shape, or the
        optimizer's moments are all zero after updates.
    """
    damaged: dict[int, str] = {}
    for iteration in reversed(self.iterations()):
      try:
        restored = self._read(iteration, like)
      except _DamagedError as error:
        damaged[iteration] = str(error)
        logging.warning(
            '%s: the checkpoint of iteration %d cannot be read (%s); trying '
            'the one before it.',
            *(self._folder, iteration, error),
        )
        continue
      self._set_aside(damaged)
      return restored
    if damaged:
      raise CheckpointError(
          f'{self._folder}: no checkpoint can be read: {damaged}. Restore the '
          'folder from a copy, or start over in an empty run folder.'
      )
    return None

  def close(self) -> None:
    """Frees what orbax holds."""
    self._manager.close()

  def _read(self, iteration: int, like: State) -> Restored[State]:
    items = jax.tree.map(_target, _items(like))
    where = f'{self._folder / str(iteration)}'
    missing = [
        name
        for name in (*items, _META)
        if not (self._folder / str(iteration) / name).is_dir()
    ]
    if missing:
      raise CheckpointError(
          f'{where}: the checkpoint has no {", ".join(missing)}; expected the '
          f'items {", ".join((*items, _META))}. Going on without them would '
          'train another run; restore the folder from a copy, or remove it.'
      )
    meta = self._load(iteration, {_META: ocp.args.JsonRestore()})[_META]
    _check_arrays(where, items, meta['arrays'])
    targets = {k: ocp.args.StandardRestore(_wrap(v)) for k, v in items.items()}
    loaded = self._load(iteration, targets)
    loaded = {name: tree['tree'] for name, tree in loaded.items()}
    broken = _differences(meta['arrays'], _describe(loaded))
    if broken:
      raise _DamagedError(f'digests differ: {", ".join(broken)}')
    state = dataclasses.replace(like, **loaded)
    _check_moments(where, state)
    return Restored(iteration, state, meta['counters'])

  def _load(self, iteration: int, targets: Mapping[str, Any]) -> dict[str, Any]:
    try:
      loaded = self._manager.restore(
          iteration, args=ocp.args.Composite(**targets)
      )
      return {name: loaded[name] for name in targets}
    except Exception as error:  # Orbax raises many kinds, bare Exception too.
      raise _DamagedError(_first_line(error)) from error

  def _set_aside(self, iterations: Mapping[int, str]) -> None:
    """Frees the places of damaged checkpoints: the run will save there."""
    if self._read_only or not iterations:
      return
    if jax.process_index() == 0:
      for iteration in iterations:
        source = self._folder / str(iteration)
        source.rename(self._folder / f'damaged-{iteration}')
    self._manager.reload()

  def _drop_partial(self, iteration: int) -> None:
    if jax.process_index() == 0:
      for partial in self._folder.glob(f'{iteration}.*tmp*'):
        for _ in range(20):  # Writes of other items may still be under way.
          with contextlib.suppress(OSError):
            partial.rmtree()
          if not partial.exists():
            break
          time.sleep(0.1)
        else:  # Opening the folder again removes it too.
          logging.warning('%s could not be removed', partial)


def _items(state: Any) -> dict[str, Any]:
  return {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}


def _wrap(tree: Any) -> dict[str, Any]:
  """Orbax takes no bare array as an item."""
  return {'tree': tree}


def _target(leaf: Any) -> jax.ShapeDtypeStruct:
  sharding = getattr(leaf, 'sharding', None)
  if sharding is None:
    raise ValueError(
        f'a leaf to restore into is {type(leaf).__name__} of shape '
        f'{np.shape(leaf)} without a sharding; expected jax arrays or '
        'jax.ShapeDtypeStructs with sharding=.'
    )
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


@jax.jit
def _digest(x: jax.Array) -> jax.Array:
  """Sum of the bit patterns modulo 2^32; the same under every sharding."""
  uint = _UINTS[x.dtype.itemsize]
  bits = (
      x.astype(uint)
      if x.dtype == bool
      else jax.lax.bitcast_convert_type(x, uint)
  )
  return jnp.sum(bits.astype(jnp.uint32), dtype=jnp.uint32)


def digest(tree: Any) -> str:
  """A short name of the values in `tree`; the same under every sharding."""
  text = json.dumps(_describe({'tree': tree}), sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def _describe(items: Mapping[str, Any]) -> dict[str, list[Any]]:
  """For each array: type, shape, digest."""
  flat = jax.tree_util.tree_flatten_with_path(dict(items))[0]
  # One after the other: many collectives at once starve virtual devices.
  digests = [jax.device_get(_digest(leaf)) for _, leaf in flat]
  return {
      jax.tree_util.keystr(path): [str(x.dtype), list(x.shape), int(digest)]
      for (path, x), digest in zip(flat, digests)
  }


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
  return sorted(k for k in a.keys() | b.keys() if a.get(k) != b.get(k))


def _check_arrays(
    where: str, items: Mapping[str, Any], saved: Mapping[str, Any]
) -> None:
  flat = jax.tree_util.tree_flatten_with_path(dict(items))[0]
  wanted = {
      jax.tree_util.keystr(path): [str(x.dtype), list(x.shape)]
      for path, x in flat
  }
  found = {name: entry[:2] for name, entry in saved.items()}
  differing = _differences(wanted, found)
  if differing:
    name = differing[0]
    raise CheckpointError(
        f'{where}: {len(differing)} arrays differ from those of this run, the '
        f'first is {name}: the checkpoint has {found.get(name)}, expected '
        f'{wanted.get(name)}. The model or the optimizer was configured '
        'otherwise; use the configuration of the run folder, or another one.'
    )


def _check_moments(where: str, state: Any) -> None:
  """Refuses zero optimizer moments after updates; not for other states."""
  updates = getattr(state, 'updates', None)
  if updates is None or int(updates) == 0:
    return
  moments = [
      leaf
      for leaf in jax.tree.leaves(state.opt_state)
      if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.ndim
  ]
  if moments and not any(bool(jnp.any(leaf != 0)) for leaf in moments):
    raise CheckpointError(
        f'{where}: all optimizer moments are zero after {int(updates)} '
        'updates; expected what the optimizer had gathered. The checkpoint '
        'was made without its optimizer state; restore the folder from a copy.'
    )


def _first_line(error: Exception) -> str:
  lines = str(error).strip().splitlines()
  return f'{type(error).__name__}: {lines[0] if lines else ""}'
