"""The sampler's weights are the learner's, and if they are not it is told."""

from __future__ import annotations

import dataclasses
import math

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax import sharding
from hgpo_jax.experiment import arithmetic
from hgpo_jax.experiment import sync as sync_lib
from hgpo_jax.models import lora
from hgpo_jax.rollout import sampler as sampler_lib
from tests.experiment import runs
from tests.learner import common

_SAMPLER = sampler_lib.Sampler(4, (8,), (8,), (16,), prefill_block=8)
_PROBE = sync_lib.SyncProbe(rows=2, tokens=16)
# float32, bfloat16, and bfloat16 with int8 kernels.
_WAYS = (('float32', False), ('bfloat16', False), ('bfloat16', True))


@pytest.fixture(name='told')
def _told(monkeypatch) -> list[str]:
  told = []
  monkeypatch.setattr(logging, 'warning', lambda m, *a: told.append(m % a))
  return told


def _sync(dtype='float32', int8=False, mesh=None, there=None, probe=_PROBE):
  model = dataclasses.replace(
      common.MODEL, compute_dtype=dtype, int8_rollout=int8
  )
  mesh = mesh or sharding.Mesh(1, 1, 1).make_mesh(jax.devices()[:1])
  rollout = sharding.rollout_mesh(mesh, there)
  sampler = _SAMPLER.bind(model, (3,), rollout)
  return sync_lib.Sync(probe, model, sampler, mesh)


def _put(params, mesh):
  axes = common.MODEL.logical_axes()
  return sharding.put(params, sharding.param_shardings(mesh, axes))


def _roll_o(layer):
  """The output kernel with every input where its neighbour belongs."""
  roll = lambda x: jnp.roll(x, 1, axis=0) if x.ndim > 1 else x
  return layer | {'o': jax.tree.map(roll, layer['o'])}


def _swap_gate(layer):
  swap = lambda x: x[..., ::-1, :] if x.shape[-2] == 2 else x
  return layer | {'gate_up': jax.tree.map(swap, layer['gate_up'])}


@pytest.mark.parametrize('wrong', [_roll_o, _swap_gate])
@pytest.mark.parametrize(('dtype', 'int8'), _WAYS)
def test_one_wrong_kernel_of_one_layer_is_told(dtype, int8, wrong, told):
  sync = _sync(dtype, int8)
  weights, found = sync(common.params())
  assert not told
  expected = {'float32': 1e-5, 'bfloat16': 0.02}[dtype] if not int8 else 0.06
  assert 0 <= found['sync/error'] < expected
  for index in range(len(weights['layers'])):
    layers = list(weights['layers'])
    layers[index] = wrong(layers[index])
    other = sync.check(common.params(), weights | {'layers': tuple(layers)})
    assert other['sync/error'] > 5 * found['sync/error']
    assert other['sync/kl'] > 20 * found['sync/kl']
    assert len(told) == index + 1
  assert 'SyncProbe.alarm_error = ' in told[0]
  assert 'PolicySource.compute_dtype' in told[0]


def test_weights_of_another_policy_are_told(told):
  sync = _sync()
  stale, _ = sync(common.params())
  update = lambda x: x * (1 + 1e-3)
  found = sync.check(jax.tree.map(update, common.params()), stale)
  assert 1e-4 < found['sync/error'] < 0.1 and len(told) == 1


def test_nan_is_told_and_0_is_silence(told):
  broken = jax.tree.map(lambda x: x * jnp.nan, common.params())
  weights, found = _sync()(broken)
  assert math.isnan(found['sync/error']) and len(told) == 1
  silent = dataclasses.replace(_PROBE, alarm_error=0.0)
  _sync(probe=silent).check(broken, weights)
  assert len(told) == 1
  strict = dataclasses.replace(_PROBE, alarm_error=1e-12)
  _sync(probe=strict)(common.params())
  assert 'at least SyncProbe.alarm_error = 1e-12' in told[1]


def test_figures_are_those_of_float64():
  rng = np.random.default_rng(0)
  ours, theirs = rng.normal(size=(2, 3, 2, 7)) * 3 + 100
  found = sync_lib._compare(ours.astype('f4'), theirs.astype('f4'))
  p, q = (np.exp(x - x.max(-1, keepdims=True)) for x in (ours, theirs))
  p, q = (x / x.sum(-1, keepdims=True) for x in (p, q))
  gap = np.abs(np.log(p / q))[p == p.max(-1, keepdims=True)]
  x, y = (z - z.mean(-1, keepdims=True) for z in (ours, theirs))
  expected = {
      'error': np.linalg.norm(x - y) / np.linalg.norm(x),
      'kl': (p * np.log(p / q)).sum(-1).mean(),
      'gap_mean': gap.mean(),
      'gap_max': gap.max(),
  }
  assert found.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-4, err_msg=name)


def test_meshes_agree_and_nothing_is_compiled_twice(told):
  if jax.device_count() < 8:
    pytest.skip('needs 8 devices')
  mesh = sharding.Mesh(2, 2, 2).make_mesh()
  sync = _sync(mesh=mesh, there=sharding.RolloutMesh(tensor=1))
  params = _put(common.params(), mesh)
  with jax.set_mesh(mesh):
    found = sync(params)[1]
    assert 0 < found['sync/error'] < 1e-5 and not told
    made = _traced()
    other = sync(_put(common.params(1), mesh))[1]
  assert other != found and _traced() == made


def _traced() -> list[int]:
  functions = (
      sync_lib._learner_logits,
      sync_lib._sampler_logits,
      sync_lib._compare,
  )
  return [function._cache_size() for function in functions]


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('shape', [(1, 1, 1), (1, 8, 1), (2, 2, 2)])
def test_what_plays_outlives_what_an_update_takes(shape, dtype):
  if jax.device_count() < 8:
    pytest.skip('needs 8 devices')
  devices = jax.devices()[: math.prod(shape)]
  mesh = sharding.Mesh(*shape).make_mesh(devices)
  sync = _sync(dtype, mesh=mesh)
  params = _put(common.params(), mesh)
  with jax.set_mesh(mesh):
    weights = sync(params)[0]
    before = jax.device_get(weights)
    take = jax.jit(
        lambda p: jax.tree.map(lambda x: x - 1.0, p), donate_argnums=0
    )
    jax.block_until_ready(take(params))
  assert all(x.is_deleted() for x in jax.tree.leaves(params))
  jax.tree.map(np.testing.assert_array_equal, weights, before)


def test_an_adapter_is_merged_into_what_samples(told):
  spec = lora.LoRA(rank=2)
  base = common.params()
  zeros = spec.init(base, jax.random.key(0))
  drawn = jax.tree.map(
      lambda x: 0.3 * jax.random.normal(jax.random.key(x.size), x.shape), zeros
  )
  sync = _sync()
  weights, found = sync(spec.attach(base, drawn))
  assert found['sync/error'] < 1e-5 and not told
  # The base without it is another policy.
  assert sync.check(base, weights)['sync/error'] > 0.1


def test_rows_of_the_probe_are_what_every_mesh_divides():
  mesh = lambda *shape: jax.sharding.AbstractMesh(shape, sharding.MESH_AXES)
  spec = sync_lib.SyncProbe(rows=5, tokens=8)
  shape = lambda *m: sync_lib.probe_tokens(spec, common.MODEL, *m).shape
  assert shape(None) == (5, 8)
  assert shape(mesh(1, 4, 1), mesh(6, 1, 1)) == (12, 8)
  one, other = (
      sync_lib.probe_tokens(spec, common.MODEL, None) for _ in range(2)
  )
  np.testing.assert_array_equal(one, other)


def test_what_makes_no_probe_is_refused():
  with pytest.raises(ValueError, match='rows=0 and tokens=64; expected at le'):
    sync_lib.SyncProbe(rows=0)
  with pytest.raises(ValueError, match='tokens=6; .* a multiple of 4 tokens'):
    sync_lib.SyncProbe(tokens=6)
  with pytest.raises(ValueError, match='SyncProbe.alarm_error is -1.0; expect'):
    sync_lib.SyncProbe(alarm_error=-1.0)


def test_every_iteration_of_a_run_says_how_far(finished):
  first, second, last = runs.lines(finished)
  for line in (first, second):
    assert 0 <= line['sync/error'] < 1e-5 and line['sync/gap_max'] < 1e-4
  assert 'sync/error' not in last  # An evaluation alone.


_ON = 'Experiment.rollout_mesh = @RolloutMesh()'
_FEW = 'Minibatches.micro_batch_steps = 2'


def test_the_plan_names_the_mesh_of_sampling(policy):
  if jax.device_count() < 8:
    pytest.skip('needs 8 devices')

  def said(*bindings):
    text = arithmetic.check(runs.load(policy, _FEW, 'Mesh.data = 2', *bindings))
    return next(x for x in text.splitlines() if x.startswith('mesh'))

  assert said() == (
      'mesh         data=2 fsdp=4 tensor=1, sampling on data=8 fsdp=1 tensor=1'
  )
  other = said(_ON, 'RolloutMesh.tensor = 2')
  assert other.endswith('sampling on data=4 fsdp=1 tensor=2')
  gathering = said(_ON, 'RolloutMesh.fsdp = 2')
  assert gathering.endswith('fsdp=2 tensor=1, weights gathered in every step')


@pytest.mark.parametrize(
    ('binding', 'message'),
    [
        ('RolloutMesh.tensor = 8', "'heads' .4. over tensor=8.*RolloutMesh"),
        ('RolloutMesh.tensor = 3', r'RolloutMesh\(.*must divide the number of'),
        ('RolloutMesh.data = 4', r'the product 4 must equal .* devices, 8'),
        (
            'Sampler.row_buckets = (12,)',
            r'12, which the 8 .* \(RolloutMesh.data x RolloutMesh.fsdp\) do not',
        ),
    ],
)
def test_a_mesh_of_sampling_that_does_not_fit_is_refused(
    policy, binding, message
):
  if jax.device_count() < 8:
    pytest.skip('needs 8 devices')
  with pytest.raises(ValueError, match=message):
    arithmetic.check(runs.load(policy, _FEW, _ON, binding))
