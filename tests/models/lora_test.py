"""Adapters: off they change nothing, on they equal the merged weights."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax import sharding
from hgpo_jax.models import lora
from hgpo_jax.models import qwen2
from tests.learner import common

MODEL = common.MODEL
ALL = lora.LoRA(rank=3, alpha=6.0)
SOME = lora.LoRA(rank=2, alpha=3.0, projections=('q', 'v', 'down'))


@functools.cache
def _params():
  """Moderate ones, so that rounding stays small."""
  drawn = jax.jit(MODEL.init)(jax.random.key(0))
  return jax.tree.map(lambda x: 3 * x if x.ndim > 1 else x, drawn)


def _adapter(spec, seed=0):
  """One that does something, unlike a fresh one."""
  adapter = spec.init(_params(), jax.random.key(seed))
  leaves, tree = jax.tree.flatten(adapter)
  keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
  drawn = [0.1 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves)]
  return tree.unflatten(drawn)


@functools.cache
def _tokens():
  tokens_BT = np.random.default_rng(9).integers(0, 64, (2, 12))
  positions_BT = np.broadcast_to(np.arange(12), (2, 12))
  return tokens_BT, positions_BT, np.ones_like(tokens_BT)


@jax.jit
def _logits(params):
  return MODEL.logits(params, MODEL.hidden(params, *_tokens()))


def test_a_fresh_adapter_changes_nothing():
  fresh = ALL.init(_params(), jax.random.key(0))
  attached = ALL.attach(_params(), fresh)
  np.testing.assert_array_equal(_logits(attached), _logits(_params()))
  assert all(np.any(parts['a'] != 0) for parts in fresh['mlp'].values())


@pytest.mark.parametrize('spec', [ALL, SOME], ids=['all', 'some'])
def test_merged_equals_attached(spec):
  adapter = _adapter(spec)
  attached = spec.attach(_params(), adapter)
  merged = jax.jit(lora.merge)(attached)
  assert jax.tree.structure(merged) == jax.tree.structure(_params())
  want = _logits(attached)
  np.testing.assert_allclose(_logits(merged), want, atol=1e-5)
  assert np.abs(want - _logits(_params())).max() > 0.01
  chosen = {name for parts in adapter.values() for name in parts}
  assert chosen == set(spec.projections)


def test_the_sampler_gets_merged_weights():
  attached = ALL.attach(_params(), _adapter(ALL))
  prepared = MODEL.decode_params(attached)
  plain = MODEL.decode_params(_params())
  assert jax.tree.structure(prepared) == jax.tree.structure(plain)
  tokens_BT, _, _ = _tokens()
  cache = MODEL.init_cache(2, 12)
  starts_B = np.zeros(2, np.int32)
  hidden, _ = jax.jit(MODEL.extend)(prepared, cache, tokens_BT, starts_B)
  got = MODEL.logits(prepared, hidden)
  np.testing.assert_allclose(got, _logits(attached), atol=1e-5)


def test_gradients_are_those_of_the_merged_kernel_by_the_chain_rule():
  adapter = _adapter(SOME)
  weight = jax.random.normal(jax.random.key(5), _logits(_params()).shape)
  loss = lambda params: jnp.vdot(weight, _logits(params)) / weight.size
  attach = lambda adapter: SOME.attach(_params(), adapter)
  got = jax.grad(lambda adapter: loss(attach(adapter)))(adapter)
  full = jax.grad(loss)(lora.merge(attach(adapter)))
  scale = SOME.alpha / SOME.rank
  for group, parts in adapter.items():
    for name, low in parts.items():
      dw_LIO = scale * full['layers'][group][name]['kernel']
      da = jnp.einsum('lio,lro->lir', dw_LIO, low['b'])
      db = jnp.einsum('lir,lio->lro', low['a'], dw_LIO)
      np.testing.assert_allclose(got[group][name]['a'], da, atol=1e-5)
      np.testing.assert_allclose(got[group][name]['b'], db, atol=1e-5)


def test_a_base_in_bfloat16_is_merged_in_float32():
  low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), _params())
  merged = lora.merge(SOME.attach(low, _adapter(SOME)))
  kernel = lambda name: merged['layers']['attention'][name]['kernel'].dtype
  assert kernel('q') == jnp.float32 and kernel('k') == jnp.bfloat16


def test_shardings_follow_the_kernels():
  axes = ALL.logical_axes(MODEL.logical_axes())
  adapter = ALL.init(_params(), jax.random.key(0))
  is_axes = lambda x: isinstance(x, tuple)
  jax.tree.map(
      lambda axis, x: sharding.spec(axis) and len(axis) == x.ndim or 1 / 0,
      axes,
      adapter,
      is_leaf=is_axes,
  )
  assert axes['attention']['o']['a'] == ('layers', 'heads', None)
  assert axes['attention']['o']['b'] == ('layers', None, 'embed')


@pytest.mark.parametrize(
    'settings, text',
    [
        ({'rank': 0}, 'rank >= 1 and a finite alpha > 0, got 0 and 32.0'),
        ({'alpha': 0.0}, 'got 16 and 0.0'),
        (
            {'projections': ('q', 'head')},
            r"\('q', 'head'\); expected one or mo",
        ),
        (
            {'projections': ()},
            r'LoRA.projections is \(\); expected one or more',
        ),
        ({'base_dtype': 'int8'}, "LoRA.base_dtype is 'int8'; expected"),
    ],
)
def test_bad_settings_are_refused(settings, text):
  with pytest.raises(ValueError, match=text):
    lora.LoRA(**settings)


def test_the_reference_shares_the_base():
  frozen = lora.Frozen(ALL, _params())
  attached = frozen.attach(_adapter(ALL))
  base_q = _params()['layers']['attention']['q']
  assert attached['layers']['attention']['q']['kernel'] is base_q['kernel']
  assert set(base_q) == {'kernel', 'bias'}
  assert attached['embed'] is _params()['embed']
  assert isinstance(MODEL, qwen2.Qwen2)
