"""The engine's programs, compiled for a fixed list of shapes, all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import functools
import itertools
from typing import Any

import jax
import numpy as np

from hgpo_jax import sharding
from hgpo_jax.models import base
from hgpo_jax.models import cache_rows
from hgpo_jax.rollout import programs
from hgpo_jax.rollout import requests

# Rows that one copy computes, at most.
_COPIED = 8


@functools.lru_cache(maxsize=16)
def shared(mesh: jax.sharding.Mesh | None, *args: object) -> Compiled:
  """The one `Compiled` of these arguments, on a mesh, in this process."""
  return Compiled(*args, mesh=mesh)


class Compiled:
  """Programs of one model; every call uses up the cache that it is given.

  They run on their mesh, whichever is in force.

  Attributes:
    rows: numbers of rows that decoding computes, increasing; the last is the
      number of rows of the cache.
    entries: numbers of entries that the cache may have, increasing.
    shares: into how many parts the mesh splits the rows of the cache.
    blocks: numbers of blocks that prefill computes, increasing; as many for
      each share.
    block: tokens of a block.
    copied: rows that one copy computes.
    admissible: (sequences, tokens) that a row is bound to at most; (0, 0)
      where rows are not bound.
    compilations: programs traced so far.
  """

  def __init__(
      self,
      model: base.LanguageModel,
      stop_ids: tuple[int, ...],
      steps: int,
      rows: tuple[int, ...],
      entries: tuple[int, ...],
      blocks: tuple[int, ...],
      block: int,
      admissible: tuple[int, int],
      mesh: jax.sharding.Mesh | None = None,
  ):
    """Compiles nothing yet.

    Args:
      model: functions of the model.
      stop_ids: ids that end a response.
      steps: tokens of a chunk of decoding at most.
      rows, entries, block, admissible: see above.
      blocks: likewise; made multiples of the shares, and no more of them.
      mesh: where weights are laid out, whichever mesh they come from, and
        rows are sampled; None for one device.
    """
    self.rows = rows
    self.entries = entries
    self.shares = sharding.parts('batch', rows[-1], mesh)
    self.blocks = _blocks_of(blocks, self.shares)
    self.block = block
    self.copied = min(_COPIED, self.rows[-1])
    self.admissible = admissible
    self.compilations = 0
    self._warm = False
    self._mesh = mesh
    static = dict(stop_ids=np.asarray(stop_ids, np.int32), steps=steps)
    empty = lambda entries: model.init_cache(self.rows[-1], entries)
    where = None
    if mesh is not None:
      where = sharding.param_shardings(mesh, model.decode_axes())
    # One program from the learner's layout and mesh to the sampler's. It casts
    # before it gathers. Donates nothing: what it makes outlives an update.
    self.lay_out = jax.jit(model.decode_params, out_shardings=where)
    self.init_cache = self._jit(empty, static_argnums=0)
    self._grow_layer = self._jit(cache_rows.grow, static_argnums=2)
    self.copy = self._jit(programs.copy, donate_argnums=0)
    self.prefill = self._jit(
        functools.partial(programs.prefill, model), donate_argnums=1
    )
    self.decode = self._jit(
        functools.partial(programs.decode, model, **static), donate_argnums=1
    )

  def warm_up(self, params: base.Params) -> None:
    """Compiles everything; from then on, to compile is an error.

    Args:
      params: from `lay_out`.
    """
    if self._warm:
      return
    for entries in self.entries:
      cache = None  # Not two of them at once.
      cache = self.init_cache(entries)
      for count in self.blocks:
        zeros_N = np.zeros(count, np.int32)
        tokens_NC = np.zeros((count, self.block), np.int32)
        cache = self.prefill(params, cache, tokens_NC, zeros_N, zeros_N)
      zeros_R = np.zeros(self.copied, np.int32)
      cache = self.copy(cache, zeros_R, zeros_R)
      for count in self.rows:
        rows = requests.empty_rows(count, self.admissible)
        cache, _ = self.decode(params, cache, rows)
    cache = None
    for first, second in itertools.combinations(self.entries, 2):
      self.grow(self.init_cache(first), second)
    self._warm = True

  def grow(self, cache: base.KVCache, entries: int) -> base.KVCache:
    """The cache with more entries a row.

    Layer by layer, and what has been copied is freed: hardly more than the new
    one is ever held.
    """
    layers = []
    for layer in zip(cache.k, cache.v):
      layers.append(self._grow_layer(*layer, entries))
      for old in layer:
        old.delete()
    return base.KVCache(*zip(*layers))

  def _jit(self, function: Callable[..., Any], **kwargs: Any) -> Any:
    @functools.wraps(function)
    def counted(*args):
      # Runs when traced, that is once for each shape.
      if self._warm:
        name = getattr(function, 'func', function).__name__
        raise RuntimeError(
            f'{name} met a shape that warm_up had not compiled; what calls it'
            ' must keep to the rows, entries and blocks of this object'
        )
      self.compilations += 1
      return function(*args)

    compiled = jax.jit(counted, **kwargs)

    def run(*args):
      with sharding.use(self._mesh):
        return compiled(*args)

    return run


def _blocks_of(blocks: Sequence[int], shares: int) -> tuple[int, ...]:
  """Numbers of blocks, each with as many for every share."""
  return tuple(sorted({-(-n // shares) * shares for n in blocks}))
