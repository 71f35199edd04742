"""Meshes, rules, and the model split over eight virtual devices."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import threading

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec
import numpy as np
import pytest

from hgpo_jax import sharding
from hgpo_jax.learner import arrays
from hgpo_jax.learner import update
from hgpo_jax.losses import ppo
from hgpo_jax.models import base
from hgpo_jax.models import qwen2
from hgpo_jax.rollout import draw
from hgpo_jax.rollout import programs
from hgpo_jax.rollout import sampler
from tests.learner import common

_CONFIG = base.ModelConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)


@pytest.fixture(scope='module', autouse=True)
def _eight_devices():
  if jax.device_count() != 8:
    pytest.skip('needs 8 devices')


@pytest.fixture(scope='module')
def mesh() -> jax.sharding.Mesh:
  return sharding.Mesh(data=2, fsdp=2, tensor=2).make_mesh()


@pytest.mark.parametrize(
    ('spec', 'devices', 'shape'),
    [
        (sharding.Mesh(), 8, (1, 8, 1)),
        (sharding.Mesh(), 1, (1, 1, 1)),
        (sharding.Mesh(data=-1, fsdp=2, tensor=2), 8, (2, 2, 2)),
        (sharding.Mesh(data=2, fsdp=1, tensor=-1), 6, (2, 1, 3)),
        (sharding.Mesh(data=2, fsdp=2, tensor=2), 8, (2, 2, 2)),
    ],
)
def test_one_axis_takes_the_rest(spec, devices, shape):
  assert spec.shape(devices) == shape


@pytest.mark.parametrize(
    ('spec', 'message'),
    [
        (sharding.Mesh(tensor=3), 'product 3 must divide .* devices, 8'),
        (sharding.Mesh(fsdp=2), 'product 2 must equal .* devices, 8'),
        (sharding.Mesh(fsdp=16), 'product 16 must equal .* Change Mesh.data'),
        (sharding.Mesh(data=-1), 'at most one may be -1'),
        (sharding.Mesh(tensor=0), 'every axis must be at least 1'),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(spec, message):
  with pytest.raises(ValueError, match=message):
    spec.make_mesh()


def test_axes_are_auto(mesh):
  assert mesh.axis_types == (AxisType.Auto,) * 3


def test_two_threads_launch_one_after_the_other_on_a_mesh(mesh):
  def launches_at_once() -> bool:
    """Whether a second thread comes in while this one is inside."""
    inside = threading.Event()

    def second():
      with jax.set_mesh(mesh), sharding.launching():
        inside.set()

    thread = threading.Thread(target=second)
    with jax.set_mesh(mesh), sharding.launching():
      thread.start()
      found = inside.wait(0.2)
    thread.join()
    assert inside.is_set()
    return found

  assert not launches_at_once()
  mesh = sharding.Mesh(fsdp=1).make_mesh(jax.devices()[:1])
  assert launches_at_once()


def test_tensor_axis_must_divide_heads():
  mesh = sharding.Mesh(fsdp=2, tensor=4).make_mesh()
  sizes = qwen2.Qwen2(_CONFIG).axis_sizes()
  with pytest.raises(
      ValueError, match="'kv_heads' .2. over tensor=4.* Set Mesh.tensor"
  ):
    sharding.check_divides(mesh, sizes)
  sharding.check_divides(mesh, {**sizes, 'kv_heads': 4})
  with pytest.raises(ValueError, match='data=1 x fsdp=2.*Mesh.data or Mesh.f'):
    sharding.check_divides(mesh, {'batch': 3})


def test_rules():
  assert sharding.spec(('layers', 'embed', 'heads')) == PartitionSpec(
      None, 'fsdp', 'tensor'
  )
  assert sharding.spec(('batch', None)) == PartitionSpec(('data', 'fsdp'), None)
  with pytest.raises(ValueError, match=r"Unknown logical axes \['head'\]"):
    sharding.spec(('head',))


def test_constrain(mesh):
  x = jnp.ones((4, 3))
  assert sharding.constrain(x, 'batch', 'embed') is x
  with jax.set_mesh(mesh):
    split = jax.jit(lambda y: sharding.constrain(y, 'batch', 'embed'))
    # The three columns are not divisible by fsdp=2 and stay whole.
    assert split(x).sharding.spec == PartitionSpec(('data', 'fsdp'))
    with pytest.raises(ValueError, match='has 2 axes, but 1 logical'):
      sharding.constrain(x, 'batch')


def _inputs():
  rng = np.random.default_rng(0)
  tokens_BT = rng.integers(0, _CONFIG.vocab_size, (8, 6))
  segment_ids_BT = np.ones((8, 6), np.int32)
  segment_ids_BT[3, 4:] = 0
  positions_BT = np.where(segment_ids_BT, np.arange(6), 0)
  return tokens_BT, positions_BT, segment_ids_BT


def _loss(model, params, tokens_BT, positions_BT, segment_ids_BT):
  hidden = model.hidden(params, tokens_BT, positions_BT, segment_ids_BT)
  logprobs = jax.nn.log_softmax(model.logits(params, hidden))
  real = segment_ids_BT[..., None] > 0
  return -jnp.sum(jnp.where(real, logprobs, 0.0)[..., 7]) / 10, hidden


def test_the_split_model_computes_the_same(mesh):
  model = qwen2.Qwen2(_CONFIG)
  params = jax.tree.map(np.asarray, model.init(jax.random.key(0)))
  run = jax.jit(jax.value_and_grad(lambda *a: _loss(model, *a), has_aux=True))
  (loss, hidden), grads = run(params, *_inputs())
  shardings = sharding.param_shardings(mesh, model.logical_axes())
  with jax.set_mesh(mesh):
    sharding.check_divides(mesh, model.axis_sizes())
    placed = sharding.put(params, shardings)
    jax.tree.map(np.testing.assert_array_equal, placed, params)
    rows = jax.device_put(_inputs(), sharding.batch_sharding(mesh))
    (split_loss, split_hidden), split_grads = jax.jit(
        jax.value_and_grad(lambda *a: _loss(model, *a), has_aux=True),
        out_shardings=((None, None), shardings),
    )(placed, *rows)
  kernel = placed['layers']['mlp']['gate']['kernel']
  assert kernel.addressable_shards[0].data.shape == (2, 16, 24)
  # Rows stay split through the embedding and every layer.
  assert split_hidden.addressable_shards[0].data.shape == (2, 6, 32)
  assert split_grads['embed']['embedding'].sharding.spec == PartitionSpec(
      'tensor', 'fsdp'
  )
  close = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
  close(split_loss, loss)
  close(split_hidden, hidden)
  jax.tree.map(close, split_grads, grads)


def test_the_split_cache_computes_the_same(mesh):
  model = qwen2.Qwen2(_CONFIG)
  params = jax.tree.map(np.asarray, model.init(jax.random.key(0)))
  tokens, _, _ = _inputs()

  def decode(params, tokens):
    params = model.decode_params(params)
    rows, zeros = np.arange(8), np.zeros(8, np.int32)
    out, cache = model.extend(
        params, model.init_cache(8, 6), tokens[:, :5], zeros, rows
    )
    last, cache = model.extend(params, cache, tokens[:, 5:], zeros + 5)
    return jnp.concatenate([out, last], axis=1), cache

  args = (tokens,)
  expected, _ = jax.jit(decode)(params, *args)
  shardings = sharding.param_shardings(mesh, model.logical_axes())
  with jax.set_mesh(mesh):
    rows = jax.device_put(args, sharding.batch_sharding(mesh))
    out, cache = jax.jit(decode)(sharding.put(params, shardings), *rows)
  # Two rows of one key/value head on each device.
  assert cache.k[0].addressable_shards[0].data.shape == (2, 1, 1, 8, 6)
  np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)


# Eight key/value heads, so that every axis may be split in eight.
_WIDE = qwen2.Qwen2(
    base.ModelConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=16,
        num_kv_heads=8,
        head_dim=4,
        tie_word_embeddings=True,
    )
)
_MESHES = [
    sizes
    for sizes in itertools.product((1, 2, 4, 8), repeat=3)
    if math.prod(sizes) == 8
]


# Meshes for sampling: what the training mesh makes, one of other factors, and
# one whose decoding gathers weights.
_ROLLOUTS = (None, sharding.RolloutMesh(tensor=4), sharding.Mesh(2, 4, 1))
_SPEC = sampler.Sampler(6, (8,), (4,), (8,), prefill_block=2)
# Unoptimized machine code is made faster than it would be run faster.
_quickly = functools.partial(
    jax.jit, compiler_options={'xla_backend_optimization_level': 0}
)


@_quickly
def _learn(params, batch):
  """(loss, gradient) of one policy."""
  loss, rollout = ppo.PPOLoss(), batch.rollout
  counted = loss.denominators(
      rollout.action_mask_BR, rollout.row_weight_B, rollout.step_BR
  )
  share = lambda p: update.micro_batch_loss(
      *(_WIDE, loss, 1.0, p, batch, counted), chunk_tokens=32
  )
  (value, _), grads = jax.value_and_grad(share, has_aux=True)(params)
  return value, grads


@_quickly
def _sample(params, tokens_BT, length_B, keys_BK) -> programs.Chunk:
  """What the engine runs for prompts that all find a row at once."""
  row_B = jnp.arange(len(length_B))
  zeros_B = jnp.zeros_like(row_B)
  # Of longer rows than are taken by a prompt what is beyond is written over.
  cache = programs.prefill(
      *(_WIDE, params, _WIDE.init_cache(len(row_B), 64)),
      *(tokens_BT, zeros_B, row_B),
  )
  rows = _rows(tokens_BT, length_B, keys_BK)
  return programs.decode(_WIDE, params, cache, rows, np.asarray([3]), 6)[1]


def _rows(tokens_BT, length_B, keys_BK) -> programs.Rows:
  row_B = jnp.arange(len(length_B))
  zeros_B, ones_B = jnp.zeros_like(row_B), jnp.ones(len(row_B))
  return programs.Rows(
      token_B=tokens_BT[row_B, length_B - 1],
      length_B=length_B - 1,
      drawn_B=zeros_B,
      limit_B=zeros_B + 6,
      live_B=length_B > 0,
      key_B2=keys_BK,
      rules=draw.Rules(ones_B, zeros_B, ones_B, 0 * ones_B),
  )


@functools.cache
def _asked():
  """Parameters, a batch to learn from, prompts and keys to sample with."""
  params = jax.tree.map(
      lambda x: np.asarray(8 * x if x.ndim > 1 else x),
      jax.jit(_WIDE.init)(jax.random.key(0)),
  )
  rng = np.random.default_rng(0)
  tokens_BT = rng.integers(4, 64, (8, 7))
  length_B = rng.integers(2, 8, 8)
  keys_BK = np.arange(16, dtype=np.uint32).reshape(8, 2)
  return params, common.policy_batch(8), (tokens_BT, length_B, keys_BK)


@functools.cache
def _on_one_device():
  params, batch, prompts = _asked()
  learned = _learn(params, arrays.put(batch, None))
  weights = jax.jit(_WIDE.decode_params)(params)
  return jax.device_get((*learned, weights, _sample(weights, *prompts)))


@pytest.mark.parametrize('sizes', _MESHES, ids=str)
def test_every_mesh_of_eight_learns_and_samples_the_same(sizes):
  assert len(_MESHES) == 10
  loss, grads, weights, sampled = _on_one_device()
  assert abs(loss) > 1e-3
  assert len(np.unique(sampled.ids_BK)) > 8
  mesh = sharding.Mesh(*sizes).make_mesh()
  sharding.check_divides(mesh, _WIDE.axis_sizes())
  params, batch, prompts = _asked()
  placed = _put(params, mesh)
  with jax.set_mesh(mesh):
    found = _learn(placed, arrays.put(batch, mesh))
  np.testing.assert_allclose(found[0], loss, rtol=1e-5)
  largest = max(np.abs(g).max() for g in jax.tree.leaves(grads))
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * largest),
      *(found[1], grads),
  )
  for spec in _ROLLOUTS:
    there = sharding.rollout_mesh(mesh, spec)
    laid_out = _SPEC.bind(_WIDE, (3,), there).prepare(placed)
    jax.tree.map(np.testing.assert_array_equal, laid_out, weights)
    with jax.set_mesh(there):
      chunk = _sample(laid_out, *prompts)
    np.testing.assert_array_equal(chunk.ids_BK, sampled.ids_BK)
    np.testing.assert_allclose(
        chunk.logprobs_BK, sampled.logprobs_BK, rtol=0, atol=1e-5
    )


def _put(params, mesh):
  shardings = sharding.param_shardings(mesh, _WIDE.logical_axes())
  return sharding.put(params, shardings)


def test_a_mesh_of_sampling_has_the_devices_in_their_order():
  mesh = sharding.Mesh(2, 2, 2).make_mesh()
  own = sharding.rollout_mesh(mesh)
  assert dict(own.shape) == {'data': 4, 'fsdp': 1, 'tensor': 2}
  other = sharding.rollout_mesh(mesh, sharding.RolloutMesh(tensor=8))
  assert dict(other.shape) == {'data': 1, 'fsdp': 1, 'tensor': 8}
  for found in (own, other):
    assert list(found.devices.flat) == list(mesh.devices.flat)
    assert found.axis_types == mesh.axis_types
  with pytest.raises(
      ValueError, match='product 3 must divide .* 8. Change RolloutMesh.data'
  ):
    sharding.rollout_mesh(mesh, sharding.RolloutMesh(tensor=3))
  with pytest.raises(ValueError, match='Set RolloutMesh.tensor so that'):
    sharding.check_divides(other, {'heads': 4}, sharding.RolloutMesh().name)


@pytest.mark.parametrize('int8', [False, True])
def test_decoding_gathers_no_weights(int8):
  model = dataclasses.replace(_WIDE, int8_rollout=int8)
  mesh = sharding.Mesh(fsdp=8).make_mesh()
  params, _, prompts = _asked()

  def decode(weights, cache, *prompts):
    rows = _rows(*prompts)
    return programs.decode(model, weights, cache, rows, np.asarray([3]), 6)

  gathers = {}
  for spec in (None, sharding.Mesh(fsdp=8)):
    there = sharding.rollout_mesh(mesh, spec)
    weights = _SPEC.bind(model, (3,), there).prepare(_put(params, mesh))
    with jax.set_mesh(there):
      cache = jax.jit(model.init_cache, static_argnums=(0, 1))(8, 64)
      compiled = jax.jit(decode).lower(weights, cache, *prompts).compile()
    gathers[spec] = len(re.findall(r' all-gather\(', compiled.as_text()))
    whole = all(
        x.sharding.is_fully_replicated for x in jax.tree.leaves(weights)
    )
    assert whole == (spec is None)
    assert cache.k[0].addressable_shards[0].data.shape[0] == 1
  # With fsdp qkv, o, gate with up, and down at least. Without it nothing at
  # all, not what rows write into the cache either.
  assert gathers[None] == 0 and gathers[sharding.Mesh(fsdp=8)] >= 4


@pytest.mark.parametrize('split', [False, True])
def test_the_engine_of_a_mesh_answers_as_that_of_one_device(mesh, split):
  params, _, (tokens_BT, length_B, keys_BK) = _asked()
  prompts = [row[:n] for row, n in zip(tokens_BT, length_B)]

  def answers(params, mesh=None):
    # Fewer rows than prompts, so that rows are refilled.
    bound = _SPEC.bind(_WIDE, (3,), mesh)
    weights = bound.prepare(params)
    # As an update does, whose gradient is for the policy that samples still.
    update = jax.jit(
        lambda p: jax.tree.map(jnp.zeros_like, p), donate_argnums=0
    )
    jax.block_until_ready(update(params))
    return bound.generate(weights, prompts, keys_BK, 1.0)

  expected = answers(jax.tree.map(jnp.asarray, params))
  spec = sharding.RolloutMesh(tensor=4) if split else None
  with jax.set_mesh(mesh):
    found = answers(_put(params, mesh), sharding.rollout_mesh(mesh, spec))
  # Of four shares some have no block left while others have.
  blocks_B = -(-(length_B - 1) // _SPEC.prefill_block)
  assert blocks_B[:4].min() < blocks_B[:4].max()
  assert len({tuple(one.ids) for one in expected}) > 4
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_array_equal(one.ids, other.ids)
    np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-5)
