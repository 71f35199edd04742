"""Blocks of prompts in a cache whose rows a mesh splits."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax import sharding
from hgpo_jax.models import base
from hgpo_jax.models import cache_rows
from hgpo_jax.rollout import programs
from tests.learner import common

# Two rows a share of eight; half of the entries may be enough.
_ROWS, _ENTRIES, _SIZE = 16, 128, 8
_COLLECTIVES = (
    'all-gather',
    'all-reduce',
    'all-to-all',
    'collective-permute',
    'reduce-scatter',
)


@pytest.fixture(scope='module', autouse=True)
def _eight_devices():
  if jax.device_count() != 8:
    pytest.skip('needs 8 devices')


@pytest.fixture(params=[True, False], ids=['tiles', 'whole'])
def tiled(request, monkeypatch) -> bool:
  """Whether keys stand in tiles, or in whole rows as on accelerators."""
  if not request.param:
    monkeypatch.setattr(cache_rows, 'tiles', lambda entries: (1, entries))
  return request.param


_extend = functools.partial(
    jax.jit, compiler_options={'xla_backend_optimization_level': 0}
)(common.MODEL.extend)
_made = jax.jit(lambda key: common.MODEL.decode_params(common.MODEL.init(key)))


def _mesh(data: int, tensor: int = 1) -> jax.sharding.Mesh:
  return sharding.Mesh(data, 1, tensor).make_mesh(jax.devices()[:8])


@functools.cache
def _weights(mesh: jax.sharding.Mesh | None = None):
  weights = _made(jax.random.key(0))
  if mesh is None:
    return weights
  where = sharding.param_shardings(mesh, common.MODEL.decode_axes())
  return jax.device_put(weights, where)


def _cache(mesh: jax.sharding.Mesh | None = None) -> base.KVCache:
  """Rows that are full already of what must not be disturbed."""
  drawn = np.random.default_rng(0)
  cache = jax.tree.map(
      lambda x: jnp.asarray(drawn.normal(size=x.shape), x.dtype),
      common.MODEL.init_cache(_ROWS, _ENTRIES),
  )
  return cache if mesh is None else jax.device_put(cache, _split(mesh))


def _by_entry(cache: base.KVCache) -> list[np.ndarray]:
  """Keys and values of all layers, [S, K, h, A]."""
  keys = [np.moveaxis(x, 3, 2) for x in cache.k]
  keys = [x.reshape(*x.shape[:3], -1) for x in keys]
  return keys + [np.swapaxes(x, 2, 3) for x in cache.v]


def _split(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
  axes = 'batch', 'kv_heads'
  return jax.sharding.NamedSharding(mesh, sharding.spec(axes))


def _tokens(blocks: int) -> np.ndarray:
  return np.random.default_rng(1).integers(0, 64, (blocks, _SIZE))


@pytest.mark.parametrize('start', [16, 72])
def test_blocks_of_few_shares_leave_all_else_as_it_is(start, tiled):
  # Of row 4, in share 2, one after the other; and one of row 15, in share 7.
  place = {4: (4, start), 5: (4, start + _SIZE), 14: (15, start)}
  row_N = np.repeat(np.arange(8) * 2, 2)
  start_N = np.full(16, _ENTRIES)
  for block, (row, first) in place.items():
    row_N[block], start_N[block] = row, first
  tokens_NC, real = _tokens(16), list(place)
  expected, kept = _extend(
      *(_weights(), _cache(), tokens_NC[real], start_N[real], row_N[real])
  )
  mesh = _mesh(8)
  with jax.set_mesh(mesh):
    found, cache = _extend(
        *(_weights(mesh), _cache(mesh), tokens_NC, start_N, row_N)
    )
  np.testing.assert_allclose(found[np.asarray(real)], expected, atol=1e-5)
  nothing = np.setdiff1d(np.arange(16), real)
  assert np.isnan(found[nothing]).all()
  before = _cache()
  written = np.zeros((_ROWS, _ENTRIES), bool)
  written[4, start : start + 2 * _SIZE] = True
  written[15, start : start + _SIZE] = True
  for x in jax.tree.leaves(cache):
    assert x.sharding.shard_shape(x.shape)[0] == 2
  for x, y, z in zip(*map(_by_entry, (cache, kept, before)), strict=True):
    np.testing.assert_allclose(x, y, atol=1e-5)
    same_RA = (np.asarray(x) == np.asarray(z)).all(axis=(1, 2))
    np.testing.assert_array_equal(same_RA, ~written)


def test_a_row_of_another_share_is_not_written_and_gives_nan():
  mesh, row_N = _mesh(8), np.arange(8) * 2
  row_N[3], row_N[6] = 1, 15
  with jax.set_mesh(mesh):
    found, cache = _extend(
        *(_weights(mesh), _cache(mesh), _tokens(8), np.zeros(8, int), row_N)
    )
  whole_N = np.isfinite(found).all(axis=(1, 2))
  np.testing.assert_array_equal(whole_N, ~np.isin(np.arange(8), (3, 6)))
  before = _cache()
  for row in (1, 6, 12, 15):
    for x, y in zip(jax.tree.leaves(cache), jax.tree.leaves(before)):
      np.testing.assert_array_equal(x[row], y[row])


def test_shares_have_equally_many_blocks():
  row_N = np.zeros(4, int)
  with jax.set_mesh(_mesh(8)):
    with pytest.raises(
        ValueError, match='4 blocks .* into 8 shares; expected as many for each'
    ):
      common.MODEL.extend(_weights(), _cache(), _tokens(4), row_N, row_N)


@pytest.mark.parametrize('tensor', [1, 2])
def test_prompts_bring_nothing_from_one_share_to_another(tensor, tiled):
  mesh = _mesh(8 // tensor, tensor)
  where_N = np.zeros(8, np.int32)
  prefill = jax.jit(
      functools.partial(programs.prefill, common.MODEL), donate_argnums=1
  )
  with jax.set_mesh(mesh):
    compiled = prefill.lower(
        *(_weights(mesh), _cache(mesh), _tokens(8), where_N, where_N)
    ).compile()
  lines = compiled.as_text().splitlines()
  names = '|'.join(_COLLECTIVES)
  found = [re.search(rf'= (.*?) ({names})(-start)?\(', x) for x in lines]
  found = [match.groups()[:2] for match in found if match]
  # Whether any block sees more than half of the entries is asked once.
  assert ('pred[]', 'all-reduce') in found
  found.remove(('pred[]', 'all-reduce'))
  # Tensor shares sum embeddings and the two products of the first layer; of
  # the last one only keys and values are wanted.
  assert [name for _, name in found] == ['all-reduce'] * (
      3 if tensor > 1 else 0
  )
  for shape, _ in found:
    assert shape.startswith(f'f32[{tensor},{_SIZE},16]')
  # The cache is written in place: no layer of it is copied.
  keys = f'{_ENTRIES // 64},4,64' if tiled else f'1,4,{_ENTRIES}'
  layer = rf'f32\[{2 * tensor},{2 // tensor},({keys}|{_ENTRIES},4)\]'
  assert sum(bool(re.search(f'= {layer}.* parameter', x)) for x in lines) >= 4
  assert not [x for x in lines if re.search(f'copy[^ ]* = {layer}', x)]


def test_tiles_change_rounding_at_most(monkeypatch):
  blocks, row_N = _tokens(8), np.repeat(np.arange(2), 4)
  start_N, last = np.tile(np.arange(4), 2) * _SIZE, blocks[:2, :1]
  found = []
  for tile in (64, 8, _ENTRIES):
    count = _ENTRIES // tile
    monkeypatch.setattr(cache_rows, 'tiles', lambda _, n=count, e=tile: (n, e))
    empty = common.MODEL.init_cache(_ROWS, _ENTRIES)
    prompts, cache = _extend(_weights(), empty, blocks, start_N, row_N)
    decoded, _ = _extend(_weights(), cache, last, np.full(2, 4 * _SIZE))
    assert cache.k[0].shape == (_ROWS, 2, count, 4, tile)
    found.append((prompts, decoded))
  for other in found[1:]:
    for x, y in zip(other, found[0]):
      np.testing.assert_allclose(x, y, rtol=0, atol=2e-6)
