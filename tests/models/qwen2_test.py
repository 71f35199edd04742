"""The Qwen2 model against frozen logits, and against itself."""

from __future__ import annotations

import dataclasses
import pathlib

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax.models import base
from hgpo_jax.models import configs
from hgpo_jax.models import hf
from hgpo_jax.models import module
from hgpo_jax.models import qwen2
from hgpo_jax.models import qwen2_params

_GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'models'
_TOLERANCE = 1e-5


@pytest.fixture(scope='module')
def model() -> qwen2.Qwen2:
  return qwen2.Qwen2(hf.read_config(_GOLDEN / 'tied'))


@pytest.fixture(scope='module')
def params(model) -> base.Params:
  loaded = hf.load_params(_GOLDEN / 'tied', model.config)
  return jax.tree.map(jnp.asarray, loaded)


def _rows(*rows: list[int], length: int, left: bool, fill: int = 0):
  """Rows of tokens padded to a length: tokens, positions, validity."""
  shape = (len(rows), length)
  tokens_BT = np.full(shape, fill, np.int32)
  positions_BT, valid_BT = np.zeros(shape, np.int32), np.zeros(shape, bool)
  for b, row in enumerate(rows):
    start = length - len(row) if left else 0
    span = slice(start, start + len(row))
    tokens_BT[b, span], valid_BT[b, span] = row, True
    positions_BT[b, span] = np.arange(len(row))
  return tokens_BT, positions_BT, valid_BT


def _hidden(model, params, tokens_BT, positions_BT, segment_ids_BT):
  run = jax.jit(type(model).hidden, static_argnums=0)
  return run(
      model, params, tokens_BT, positions_BT, np.asarray(segment_ids_BT, int)
  )


def _extend(model, params, cache, tokens_NC, start_N, row_N=None):
  run = jax.jit(type(model).extend, static_argnums=0)
  return run(model, params, cache, tokens_NC, np.asarray(start_N), row_N)


def _close(actual, expected, tolerance=_TOLERANCE):
  np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize('name', ['tied', 'untied'])
def test_logits_are_those_of_transformers(name):
  golden = np.load(_GOLDEN / name / 'logits.npz')
  net = module.Qwen2Module.from_pretrained(_GOLDEN / name)
  logits = net(golden['tokens_BT'], golden['valid_BT'])
  assert logits.dtype == jnp.float32
  valid_BT = golden['valid_BT']
  _close(logits[valid_BT], golden['logits'][valid_BT])


@pytest.mark.parametrize('side', ['left', 'right'])
def test_padding_never_changes_real_tokens(model, params, side):
  left = side == 'left'
  rows = [[5, 6, 7, 8, 9], [11, 12, 13]]
  hidden = lambda *args: _hidden(model, *args)
  padded = {}
  for length, fill in ((8, 0), (8, 77), (11, 3)):
    tokens, positions, valid = _rows(*rows, length=length, left=left, fill=fill)
    out = hidden(params, tokens, positions, valid)
    assert np.isfinite(out).all()
    padded[length, fill] = np.concatenate([out[b][valid[b]] for b in (0, 1)])
  np.testing.assert_array_equal(padded[8, 0], padded[8, 77])
  alone = [
      hidden(params, t, p, v)[0]
      for t, p, v in (_rows(r, length=len(r), left=left) for r in rows)
  ]
  for out in padded.values():
    _close(out, np.concatenate(alone), 2e-6)


def test_segments_of_a_row_do_not_see_each_other(model, params):
  first, second = [5, 6, 7, 8], [11, 12, 13]
  tokens = np.array([first + second + [0]])
  positions = np.array([[0, 1, 2, 3, 0, 1, 2, 0]])
  packed = _hidden(
      model, params, tokens, positions, np.array([[1, 1, 1, 1, 2, 2, 2, 0]])
  )[0]
  for row, out in ((first, packed[:4]), (second, packed[4:7])):
    t, p, v = _rows(row, length=len(row), left=False)
    _close(out, _hidden(model, params, t, p, v)[0], 2e-6)


def test_padding_has_no_gradient(model, params):
  tokens, positions, valid = _rows([5, 6, 7], length=5, left=True, fill=90)

  def loss(p):
    out = _hidden(model, p, tokens, positions, valid)
    return jnp.sum(jnp.where(valid[..., None], jnp.sin(out), 0.0))

  grads = jax.jit(jax.grad(loss))(params)
  assert jax.tree.all(jax.tree.map(lambda g: np.isfinite(g).all(), grads))
  embedding = grads['embed']['embedding']
  assert not embedding[90].any()
  assert embedding[5].any()


def _loss(model, params):
  tokens, positions, valid = _rows([5, 6, 7, 8], [9, 3], length=4, left=False)
  out = _hidden(model, params, tokens, positions, valid)
  logits = model.logits(params, out)
  return jnp.sum(jax.nn.log_softmax(logits)[valid][:, 4])


def test_recomputing_layers_changes_no_gradient(model, params):
  value_and_grad = lambda m: jax.jit(jax.value_and_grad(lambda p: _loss(m, p)))(
      params
  )
  value, grads = value_and_grad(dataclasses.replace(model, remat=True))
  plain, plain_grads = value_and_grad(dataclasses.replace(model, remat=False))
  _close(value, plain)
  jax.tree.map(_close, grads, plain_grads)


def test_gradient_is_that_of_finite_differences(model, params):
  direction = qwen2_params.init(model.config, jax.random.key(3))
  loss = jax.jit(lambda p: _loss(model, p))
  grads = jax.grad(loss)(params)
  slope = sum(
      jnp.vdot(g, d)
      for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction))
  )
  step = 1e-3
  shift = lambda s: jax.tree.map(lambda p, d: p + s * d, params, direction)
  difference = (loss(shift(step)) - loss(shift(-step))) / (2 * step)
  np.testing.assert_allclose(slope, difference, rtol=2e-2)


@pytest.mark.parametrize('decode_layout', [False, True])
def test_cached_decoding_equals_the_full_forward(model, params, decode_layout):
  rows = [list(range(1, 11)), list(range(40, 47))]
  tokens, positions, valid = _rows(*rows, length=10, left=False)
  full = _hidden(model, params, tokens, positions, valid)
  given = model.decode_params(params) if decode_layout else params
  cut = np.array([6, 3])
  # The row with the shorter start goes first; its padding is overwritten.
  head, cache = _extend(
      model,
      given,
      model.init_cache(2, 10),
      np.where(np.arange(6) < cut[:, None], tokens[:, :6], 77)[::-1],
      [0, 0],
      np.array([1, 0]),
  )
  head = head[::-1]
  for b in (0, 1):
    _close(head[b, : cut[b]], full[b, : cut[b]])
  for step in range(4):
    place = cut + step
    out, cache = _extend(
        model, given, cache, tokens[np.arange(2), place][:, None], place
    )
    _close(out[:, 0], full[np.arange(2), place])


def test_blocks_of_one_row_see_each_other(model, params):
  tokens, positions, valid = _rows(list(range(1, 13)), length=12, left=False)
  full = _hidden(model, params, tokens, positions, valid)
  pieces = np.stack([tokens[0, i : i + 4] for i in (0, 4, 8, 8)])
  # The last one twice, as calls are filled up.
  out, cache = _extend(
      model,
      params,
      model.init_cache(3, 16),
      pieces,
      [0, 4, 8, 8],
      np.array([2, 2, 2, 2]),
  )
  _close(out[:3].reshape(1, 12, -1), full)
  np.testing.assert_array_equal(out[2], out[3])
  for layer in (*cache.k, *cache.v):
    assert not layer[:2].any() and layer[2].any()


def test_a_longer_cache_and_other_rows_change_no_bit(model, params):
  tokens = np.arange(1, 9)[None]
  run = lambda entries, rows, row: _extend(
      model,
      params,
      model.init_cache(4, entries),
      np.concatenate([tokens] + [tokens + 7] * (rows - 1)),
      [0] * rows,
      np.arange(rows)[::-1] if row else None,
  )[0][0]
  want = run(64, 4, None)
  np.testing.assert_array_equal(run(64, 4, True), want)
  np.testing.assert_array_equal(run(128, 4, None), want)
  _close(run(64, 1, None), want, 2e-6)


def test_a_write_past_the_cache_is_dropped_and_loud(model, params):
  tokens = np.array([[5, 6, 7]])
  cache = model.init_cache(2, 4)
  fits, _ = _extend(model, params, cache, tokens, [1])
  past, written = _extend(model, params, cache, tokens, [2])
  assert np.isfinite(fits).all()
  assert np.isfinite(past[:, :2]).all() and np.isnan(past[:, 2:]).all()
  assert not written.v[0][0, :, :2].any() and not written.v[0][1].any()


def test_bfloat16_compute_stays_near_float32(model, params):
  tokens, positions, valid = _rows(list(range(1, 11)), length=10, left=True)
  half = dataclasses.replace(model, compute_dtype=jnp.bfloat16)
  args = (params, tokens, positions, valid)
  out = _hidden(half, *args)
  assert out.dtype == jnp.bfloat16
  logits = half.logits(params, out)
  assert logits.dtype == jnp.float32
  expected = model.logits(params, _hidden(model, *args))
  assert np.abs(logits - expected).mean() < 0.05
  cached, _ = _extend(half, params, half.init_cache(1, 10), tokens, [0])
  assert np.abs(cached - out).astype(np.float32).mean() < 0.02


def test_init_follows_the_config():
  config = configs.CONFIGS['tiny']
  for tied in (True, False):
    net = qwen2.Qwen2(dataclasses.replace(config, tie_word_embeddings=tied))
    made = jax.eval_shape(net.init, jax.random.key(0))
    assert ('head' in made) != tied
    shapes = jax.tree.map(lambda s: s.shape, qwen2_params.specs(net.config))
    assert jax.tree.map(lambda p: p.shape, made) == shapes
    assert all(p.dtype == jnp.float32 for p in jax.tree.leaves(made))


def test_init_draws_kernels_and_sets_norms_and_biases(model):
  params = model.init(jax.random.key(0))
  np.testing.assert_allclose(params['embed']['embedding'].std(), 0.02, 0.05)
  assert (params['final_norm']['scale'] == 1).all()
  assert (params['layers']['attention']['q']['bias'] == 0).all()


@pytest.mark.parametrize(
    ('name', 'count'),
    [
        ('0.5b', 494_032_768),
        ('1.5b', 1_543_714_304),
        ('3b', 3_085_938_688),
        ('7b', 7_615_616_512),
        ('14b', 14_770_033_664),
    ],
)
def test_shapes_have_the_published_parameter_counts(name, count):
  specs = jax.tree.leaves(qwen2_params.specs(configs.CONFIGS[name]))
  assert sum(int(np.prod(s.shape, dtype=np.int64)) for s in specs) == count


def test_module_holds_the_same_tree(model, params):
  net = module.Qwen2Module(model, params)
  assert net.layers.mlp.gate.kernel[...].shape == (2, 32, 48)
  graph, state = nnx.split(net)
  tokens = np.arange(1, 9)[None]
  np.testing.assert_array_equal(nnx.merge(graph, state)(tokens), net(tokens))
  jax.tree.map(np.testing.assert_array_equal, net.params(), params)
  fresh = module.Qwen2Module(model, rngs=nnx.Rngs(0))
  assert jax.tree.structure(fresh.params()) == jax.tree.structure(params)
  with pytest.raises(ValueError, match='exactly one'):
    module.Qwen2Module(model)
