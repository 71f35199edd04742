"""What the engine's programs hold while they are compiled and run."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from hgpo_jax import sharding
from hgpo_jax.rollout import compiled as compiled_lib
from tests.learner import common

_ROWS, _ENTRIES = 4, (64, 128)


@pytest.fixture(name='compiled')
def _compiled() -> compiled_lib.Compiled:
  return compiled_lib.Compiled(
      *(common.MODEL, (3,), 2, (_ROWS,), _ENTRIES, (1,), 8, (0, 0))
  )


def _size(entries: int) -> int:
  """Bytes of a cache of float32."""
  m = common.CONFIG
  return 8 * _ROWS * entries * m.num_layers * m.num_kv_heads * m.head_dim


def _held() -> int:
  """Bytes of arrays that are shaped as layers of a cache."""
  m = common.CONFIG
  lead = _ROWS, m.num_kv_heads
  found = [x for x in jax.live_arrays() if x.ndim > 3 and x.shape[:2] == lead]
  return sum(x.nbytes for x in found if not x.is_deleted())


def test_growing_keeps_what_is_there_and_uses_it_up(compiled):
  drawn = np.random.default_rng(0)
  cache = jax.tree.map(
      lambda x: jax.numpy.asarray(drawn.normal(size=x.shape), x.dtype),
      compiled.init_cache(64),
  )
  before = jax.tree.map(np.asarray, cache)
  grown = compiled.grow(cache, 128)
  assert all(x.is_deleted() for x in jax.tree.leaves(cache))
  for old, new in zip(before.k, grown.k, strict=True):
    assert new.shape[2] * new.shape[4] == 128
    np.testing.assert_array_equal(new[:, :, :1], old)
    assert not np.any(new[:, :, 1:])
  for old, new in zip(before.v, grown.v, strict=True):
    np.testing.assert_array_equal(new[:, :, :64], old)
    assert new.shape[2] == 128 and not np.any(new[:, :, 64:])


def test_warming_up_holds_one_cache_at_a_time(compiled, monkeypatch):
  peaks, nothing = [], _held()

  def watched(name):
    function = getattr(compiled, name)

    def call(*args):
      found = function(*args)
      peaks.append((name, _held() - nothing))
      return found

    monkeypatch.setattr(compiled, name, call)

  for name in ('init_cache', 'prefill', 'copy', 'decode', '_grow_layer'):
    watched(name)
  compiled.warm_up(compiled.lay_out(common.params()))
  assert _held() == nothing
  assert {name for name, _ in peaks} == {
      *('init_cache', 'prefill', 'copy', 'decode', '_grow_layer')
  }
  whole = max(size for name, size in peaks if name != '_grow_layer')
  assert whole == _size(128)
  # Both sizes of the layer that is being copied.
  layer = _size(128) / common.CONFIG.num_layers
  assert max(size for _, size in peaks) <= whole + layer


@pytest.mark.parametrize(
    ('sizes', 'shares', 'blocks'),
    [((8, 1, 1), 1, (1, 6)), ((2, 2, 2), 4, (4, 8)), ((2, 1, 4), 2, (2, 6))],
)
def test_every_share_of_a_mesh_has_as_many_blocks(sizes, shares, blocks):
  # Eight parts would not divide four rows.
  found = compiled_lib.Compiled(
      *(common.MODEL, (3,), 2, (_ROWS,), _ENTRIES, (1, 6), 8, (0, 0)),
      mesh=jax.sharding.AbstractMesh(sizes, sharding.MESH_AXES),
  )
  assert (found.shares, found.blocks) == (shares, blocks)
