"""The plan against arrays that exist and against the compiler."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks import memory as benchmark
from hgpo_jax import sharding
from hgpo_jax.learner import optimizer as optimizer_lib
from hgpo_jax.learner import train_state
from hgpo_jax.models import base
from hgpo_jax.models import configs
from hgpo_jax.models import lora
from hgpo_jax.models import qwen2
from hgpo_jax.planning import memory
from hgpo_jax.planning import rollout
from hgpo_jax.planning import workload

_SMALL = base.ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)


def _on_first_device(tree) -> int:
  return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


@pytest.mark.parametrize('adapter', [None, lora.LoRA(rank=4)])
@pytest.mark.parametrize('moment', ['float32', 'bfloat16'])
def test_weights_and_moments_are_what_a_device_holds(adapter, moment):
  if jax.device_count() < 8:
    pytest.skip('needs 8 devices')
  mesh = sharding.Mesh(data=2, fsdp=2, tensor=2).make_mesh()
  model = qwen2.Qwen2(_SMALL)
  axes = model.logical_axes()
  base_params = jax.tree.map(np.asarray, model.init(jax.random.key(0)))
  params = base_params
  if adapter is not None:
    params = adapter.init(params, jax.random.key(0))
    axes = adapter.logical_axes(axes)
  placed = sharding.put(params, sharding.param_shardings(mesh, axes))
  spec = optimizer_lib.AdamW(first_moment_dtype=moment)
  state = train_state.create(placed, spec.make())
  work = workload.Workload(
      _SMALL, (2, 2, 2), lora=adapter, moment_dtype=moment, reference=False
  )
  parts = memory.need(work)['gradient'].parts
  held = _on_first_device(state.params)
  if adapter is not None:
    where = sharding.param_shardings(mesh, model.logical_axes())
    held += _on_first_device(sharding.put(base_params, where))
  assert parts['weights'] == held
  counts = 3 * 4  # Steps of the optimizer, of the schedule, and skipped ones.
  assert parts['moments'] == _on_first_device(state.opt_state) - counts


@pytest.mark.parametrize(
    ('name', 'mesh'), [('1.5b', (1, 8, 1)), ('7b', (1, 2, 4))]
)
def test_an_update_needs_what_the_compiler_says(name, mesh):
  if jax.device_count() < 8:
    pytest.skip('needs 8 devices')
  row = benchmark.measure(name, mesh, layers=2)
  for part, compiled in row['compiled'].items():
    planned = row['planned'][part]
    assert abs(planned / compiled - 1) < 0.15, (part, compiled, planned)


@pytest.mark.parametrize(
    ('name', 'mesh', 'sampled_on', 'int8'),
    [
        ('1.5b', (1, 8, 1), (8, 1, 1), False),
        ('7b', (1, 2, 4), (2, 1, 4), True),
    ],
)
def test_a_sync_and_a_rollout_need_what_the_compiler_says(
    name, mesh, sampled_on, int8
):
  if jax.device_count() < 8:
    pytest.skip('needs 8 devices')
  row = benchmark.measure_rollout(name, mesh, 2, sampled_on, int8)
  for what in ('', 'sync '):
    planned, compiled = row[f'{what}planned'], row[f'{what}compiled']
    assert abs(planned / compiled - 1) < 0.15, row


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('int8', [False, True])
@pytest.mark.parametrize('tied', [False, True])
def test_weights_to_decode_with_are_what_a_device_holds(dtype, int8, tied):
  if jax.device_count() < 8:
    pytest.skip('needs 8 devices')
  config = dataclasses.replace(_SMALL, tie_word_embeddings=tied)
  model = qwen2.Qwen2(config, compute_dtype=dtype, int8_rollout=int8)
  mesh = sharding.Mesh(data=2, fsdp=2, tensor=2).make_mesh()
  where = sharding.param_shardings(mesh, model.decode_axes())
  made = jax.jit(model.decode_params, out_shardings=where)(
      model.init(jax.random.key(0))
  )
  work = workload.Workload(
      *(config, (1, 4, 2), dtype),
      rollout_mesh=(2, 2, 2),
      int8_rollout=int8,
  )
  found = rollout.weights(work)
  assert found.held == _on_first_device(made)
  half = dataclasses.replace(work, rollout_mesh=(4, 1, 2))
  assert found.whole == rollout.weights(half).held
  table = 0 if tied else made['embed']['embedding'].nbytes / 2
  assert found.whole - found.read == table


def test_sampling_needs_what_its_own_mesh_makes():
  work = workload.Workload(configs.CONFIGS['7b'], (1, 8, 1))
  assert work.sampled_on == (8, 1, 1)
  split = dataclasses.replace(work, rollout_mesh=(2, 1, 4))
  gathering = dataclasses.replace(work, rollout_mesh=(1, 8, 1))
  of = lambda w: memory.need(w)['rollout'].parts
  # 7.6 G numbers of 2 bytes on each device, or on every four.
  assert of(work)['decode weights'] == pytest.approx(15.23e9, rel=1e-3)
  assert of(split)['decode weights'] == pytest.approx(3.81e9, rel=1e-3)
  assert 'gathered weights' not in of(split)
  assert of(gathering)['gathered weights'] == pytest.approx(15.23e9, rel=1e-3)
  for phase in ('score', 'gradient', 'step'):
    assert memory.need(split)[phase] == memory.need(work)[phase]


def test_published_sizes():
  """Parameters of the models as their makers give them."""
  for name, billions in (
      ('0.5b', 0.494),
      ('1.5b', 1.544),
      ('3b', 3.086),
      ('7b', 7.616),
      ('14b', 14.77),
  ):
    work = workload.Workload(configs.CONFIGS[name], (1, 1, 1))
    assert work.parameters().whole / 1e9 == pytest.approx(billions, rel=1e-3)


def test_what_makes_which_part_smaller():
  work = workload.Workload(configs.CONFIGS['1.5b'], (1, 8, 1), rows=4)

  def parts(phase, **fields):
    return memory.need(dataclasses.replace(work, **fields))[phase].parts

  gradient = parts('gradient')
  assert parts('gradient', mesh=(1, 16, 1))['moments'] == pytest.approx(
      gradient['moments'] / 2, rel=1e-3
  )
  assert 'reference' not in parts('gradient', reference=False)
  kept = parts('gradient', rows=2)['kept activations']
  assert kept == gradient['kept activations'] / 2
  assert (
      gradient['kept activations']
      > parts('gradient', keep_attention=False)['kept activations']
  )
  kept = parts('gradient', remat=False)['kept activations']
  assert kept > 10 * gradient['kept activations']
  by_parts = parts('gradient', mlp_parts=8)
  assert sum(by_parts.values()) < sum(gradient.values())
  adapter = parts('gradient', lora=lora.LoRA(base_dtype='bfloat16'))
  assert adapter['weights'] < 0.6 * gradient['weights']
  assert adapter['moments'] < 0.1 * gradient['moments']
  # 28 KiB a token: 2 x 28 layers x 2 heads x 128 numbers of 2 bytes.
  cache = rollout.sampling(work, 'tpu')['KV cache']
  assert cache == 128 / 8 * 2560 * 28 * 1024
  single = dataclasses.replace(work, compute_dtype='float32')
  assert rollout.sampling(single, 'tpu')['KV cache'] == 2 * cache


def test_moments_on_the_host_are_there_for_the_step_alone():
  """As `update.Update` moves them; on CPU both memories are one."""
  work = workload.Workload(configs.CONFIGS['1.5b'], (1, 8, 1), rows=4)
  for moments_on in ('host', 'auto'):
    other = dataclasses.replace(work, moments_on=moments_on)
    assert memory.need(other, 'cpu') == memory.need(work, 'cpu')
    here, there = memory.need(work, 'gpu'), memory.need(other, 'gpu')
    assert there['step'].parts == here['step'].parts
    for phase in ('rollout', 'score', 'gradient'):
      parts = dict(here[phase].parts)
      assert parts.pop('moments') == 8 * work.trained().share
      assert there[phase].parts == parts


def test_int8_is_smaller_where_products_read_it():
  work = workload.Workload(configs.CONFIGS['7b'], (1, 8, 1))
  int8 = dataclasses.replace(work, int8_rollout=True)
  total = lambda work, platform: sum(rollout.sampling(work, platform).values())
  saved = total(work, 'gpu') - total(int8, 'gpu')
  # A byte a number of the 6.5 G in kernels, less a scale for each output.
  assert saved == pytest.approx(6.525e9, rel=2e-3)
  assert total(int8, 'cpu') > total(work, 'cpu')  # Floats lie beside it.
  peaks = [memory.need(w, 'gpu')['rollout'].total for w in (work, int8)]
  assert peaks[1] < peaks[0]


def test_meshes_that_do_not_fit_each_other_are_refused():
  work = workload.Workload(configs.CONFIGS['1.5b'], (1, 8, 1))
  assert work.sampled_on == (8, 1, 1)
  other = dataclasses.replace(work, rollout_mesh=(2, 1, 2))
  with pytest.raises(ValueError, match='has 4 devices, the mesh .* 8; expec'):
    other.check()
  few = dataclasses.replace(work, sampler_rows=12)
  with pytest.raises(ValueError, match='12 rows are sampled on 8 .* set Sam'):
    few.check()


def test_playing_ahead_keeps_what_a_rollout_needs_beside_the_learner():
  work = workload.Workload(configs.CONFIGS['1.5b'], (1, 8, 1), rows=4)
  alone = memory.need(work)
  both = memory.need(dataclasses.replace(work, ahead=True))
  assert both['rollout'] == alone['rollout']
  resting = sum(alone['score'].parts[n] for n in ('weights', 'moments'))
  resting += alone['score'].parts['reference']
  for phase in ('score', 'gradient', 'step'):
    more = both[phase].total - alone[phase].total
    assert more == pytest.approx(alone['rollout'].total - resting)
    fixed = both[phase].resident - alone[phase].resident
    names = ('decode weights', 'KV cache')
    held = sum(alone['rollout'].parts[name] for name in names)
    assert fixed == pytest.approx(held)
