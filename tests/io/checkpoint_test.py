from __future__ import annotations

import contextlib
import dataclasses
import logging
import pathlib
import resource
import shutil
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from hgpo_jax.io import checkpoint


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _State:
  params: Any
  opt_state: Any
  updates: Any


def _state(seed: int = 0, updates: int = 3) -> _State:
  a, b, c = jax.random.split(jax.random.key(seed), 3)
  params = {'w': jax.random.normal(a, (64, 32)), 'b': jnp.ones((8,))}
  moments = {'w': jax.random.normal(b, (64, 32)), 'b': jnp.zeros((8,))}
  if not updates:
    moments = jax.tree.map(jnp.zeros_like, moments)
  return _State(params, (moments, (), jnp.int32(updates)), jnp.int32(updates))


def _assert_equal(a: _State, b: _State) -> None:
  jax.tree.map(np.testing.assert_array_equal, a, b)


def _largest_file(folder: pathlib.Path) -> pathlib.Path:
  files = [p for p in folder.rglob('*') if p.is_file()]
  return max(files, key=lambda p: p.stat().st_size)


def _mesh(count: int) -> jax.sharding.Mesh:
  if len(jax.devices()) < count:
    pytest.skip(f'needs {count} devices')
  return jax.make_mesh(
      (count,),
      ('fsdp',),
      axis_types=(jax.sharding.AxisType.Auto,),
      devices=jax.devices()[:count],
  )


def _on(state: _State, count: int) -> _State:
  """`state` split over `count` devices along every first axis."""
  mesh = _mesh(count)

  def place(x):
    spec = PartitionSpec('fsdp') if x.ndim else PartitionSpec()
    return jax.device_put(x, NamedSharding(mesh, spec))

  return jax.tree.map(place, state)


def _saved(folder, *iterations: int) -> checkpoint.Checkpoints:
  checkpoints = checkpoint.Checkpoints(folder, keep=3)
  for i in iterations:
    checkpoints.save(i, _state(seed=i), {'seed': 5, 'best': 0.1 + i})
  return checkpoints


@contextlib.contextmanager
def _disk_that_takes(limit: int):
  """Every file written meanwhile fails beyond `limit` bytes."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_round_trip_is_exact_and_old_ones_go(tmp_path):
  _saved(tmp_path, 0, 1, 2, 3).close()
  checkpoints = checkpoint.Checkpoints(tmp_path, keep=3)
  assert checkpoints.iterations() == [1, 2, 3]
  restored = checkpoints.restore(_state(seed=9))
  assert restored.iteration == 3
  assert restored.counters == {'seed': 5, 'best': 0.1 + 3}
  _assert_equal(restored.state, _state(seed=3))


def test_an_empty_folder_restores_nothing(tmp_path):
  assert checkpoint.Checkpoints(tmp_path / 'new').restore(_state()) is None


@pytest.mark.parametrize('saved_on, restored_on', [(8, 1), (1, 8), (8, 4)])
def test_any_mesh_restores_onto_any_other(tmp_path, saved_on, restored_on):
  checkpoints = checkpoint.Checkpoints(tmp_path)
  checkpoints.save(0, _on(_state(), saved_on), {})
  target = _on(_state(seed=1), restored_on)
  abstract = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      target,
  )
  restored = checkpoints.restore(abstract).state
  _assert_equal(restored, _state())
  shardings = lambda tree: [x.sharding for x in jax.tree.leaves(tree)]
  assert shardings(restored) == shardings(target)


def test_a_target_without_sharding_is_refused(tmp_path):
  checkpoints = _saved(tmp_path, 0)
  abstract = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), _state()
  )
  with pytest.raises(ValueError, match='without a sharding'):
    checkpoints.restore(abstract)


@pytest.mark.parametrize('item', ['params', 'opt_state', 'meta'])
def test_a_missing_item_is_an_error(tmp_path, item):
  checkpoints = _saved(tmp_path, 0, 1)
  shutil.rmtree(tmp_path / '1' / item)
  with pytest.raises(checkpoint.CheckpointError, match=f'has no {item}'):
    checkpoints.restore(_state())


def test_zero_moments_after_updates_are_an_error(tmp_path):
  checkpoints = checkpoint.Checkpoints(tmp_path)
  checkpoints.save(0, _state(updates=0), {})
  assert checkpoints.restore(_state()).iteration == 0
  state = dataclasses.replace(_state(updates=0), updates=jnp.int32(4))
  checkpoints.save(1, state, {})
  with pytest.raises(
      checkpoint.CheckpointError, match='moments are all|are zero after 4'
  ):
    checkpoints.restore(_state())


def test_another_shape_is_an_error_that_names_the_array(tmp_path):
  checkpoints = _saved(tmp_path, 0)
  other = dataclasses.replace(
      _state(), params={'w': jnp.ones((64, 16)), 'b': jnp.ones((8,))}
  )
  with pytest.raises(
      checkpoint.CheckpointError,
      match=r"'params'\]\['w'\]: the checkpoint has \['float32', \[64, 32\]\]",
  ):
    checkpoints.restore(other)


@pytest.mark.parametrize('damage', ['truncated', 'flipped', 'removed', 'json'])
def test_a_damaged_checkpoint_falls_back_with_a_warning(
    tmp_path, caplog, damage
):
  checkpoints = _saved(tmp_path, 0, 1)
  path = _largest_file(tmp_path / '1' / 'params')
  data = bytearray(path.read_bytes())
  if damage == 'truncated':
    path.write_bytes(data[: len(data) // 2])
  elif damage == 'flipped':
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
  elif damage == 'removed':
    path.unlink()
  else:
    (tmp_path / '1' / 'meta' / 'metadata').write_text('{"counters": ')
  with caplog.at_level(logging.WARNING, 'absl'):
    restored = checkpoints.restore(_state(seed=9))
  assert restored.iteration == 0
  _assert_equal(restored.state, _state(seed=0))
  assert 'checkpoint of iteration 1 cannot be read' in caplog.text
  checkpoints.save(1, _state(seed=1), {})  # The run comes by here again.
  assert checkpoints.restore(_state()).iteration == 1
  assert (tmp_path / 'damaged-1').is_dir()


def test_only_damaged_checkpoints_are_an_error_not_a_fresh_start(tmp_path):
  checkpoints = _saved(tmp_path, 0)
  _largest_file(tmp_path / '0' / 'params').unlink()
  with pytest.raises(
      checkpoint.CheckpointError, match='no checkpoint can be read'
  ):
    checkpoints.restore(_state())
  assert checkpoints.iterations() == [0]


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path):
  checkpoints = _saved(tmp_path, 0)
  with _disk_that_takes(4096):
    with pytest.raises(
        checkpoint.CheckpointError,
        match=r'iteration 1 could not .*File too large.*\[0\].*Free disk space',
    ):
      checkpoints.save(1, _state(seed=1), {})
  assert checkpoints.iterations() == [0]
  _assert_equal(checkpoints.restore(_state()).state, _state(seed=0))
  checkpoints.save(1, _state(seed=1), {})
  reopened = checkpoint.Checkpoints(tmp_path)
  assert reopened.restore(_state()).iteration == 1
  assert sorted(p.name for p in tmp_path.iterdir()) == ['0', '1']


def test_what_a_killed_save_left_is_not_a_checkpoint(tmp_path):
  checkpoints = _saved(tmp_path, 0)
  shutil.copytree(tmp_path / '0', tmp_path / '1.orbax-checkpoint-tmp')
  checkpoints.close()
  reopened = checkpoint.Checkpoints(tmp_path)
  assert reopened.restore(_state()).iteration == 0
  # Orbax removes it in a thread, which it waits for before it saves.
  reopened.save(1, _state(), {})
  assert not (tmp_path / '1.orbax-checkpoint-tmp').exists()
  assert reopened.iterations() == [0, 1]


def test_reading_only_touches_nothing(tmp_path):
  _saved(tmp_path, 0, 1).close()
  shutil.copytree(tmp_path / '1', tmp_path / '2.orbax-checkpoint-tmp')
  _largest_file(tmp_path / '1' / 'params').unlink()
  before = sorted(tmp_path.rglob('*'))
  reader = checkpoint.Checkpoints(tmp_path, read_only=True)
  assert reader.restore(_state()).iteration == 0
  assert sorted(tmp_path.rglob('*')) == before
