"""What saves memory or time changes neither loss nor gradient."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
import pytest

from hgpo_jax.batch import minibatch
from hgpo_jax.learner import optimizer as optimizer_lib
from hgpo_jax.learner import train_state
from hgpo_jax.learner import update as update_lib
from hgpo_jax.losses import ppo
from hgpo_jax.models import lora
from tests.learner import common

_SGD = optimizer_lib.AdamW(
    learning_rate=1e-3, weight_decay=0.0, max_grad_norm=1e9
)
_LORA = lora.LoRA(rank=2, alpha=4.0)
_WHOLE = dataclasses.replace(
    common.SPEC, length_buckets=(32,), response_buckets=(32,)
)
_LOSS = ppo.PPOLoss(entropy_coef=0.1)
_GSPO = ppo.PPOLoss(
    ratio='sequence', aggregation='seq-mean-token-mean', dual_clip=0.0
)
# Of the forward and backward pass, and of what comes after it.
PASS = ('accumulate', 'remat', 'remat-all', 'chunk', 'pack')
MOMENTS = ('bfloat16', 'host')
ALL = ('accumulate', 'remat', 'chunk', 'pack', *MOMENTS)


@pytest.fixture(autouse=True, scope='module')
def _compiled_fast():
  """Most of the time here is XLA's, and speed is not what is tested."""
  name = 'jax_disable_most_optimizations'
  before = jax.config.read(name)
  jax.config.update(name, True)
  yield
  jax.config.update(name, before)


@functools.cache
def _adapter():
  """One that does something, unlike a fresh one."""
  fresh = _LORA.init(common.params(), jax.random.key(0))
  leaves, tree = jax.tree.flatten(fresh)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  drawn = [0.05 * jax.random.normal(k, x.shape) for k, x in zip(keys, leaves)]
  return tree.unflatten(drawn)


@functools.cache
def _step(loss, options, with_lora=False):
  """(gradient, metrics) of one update on the same eight steps."""
  spec = _WHOLE
  if 'pack' in options:
    spec = dataclasses.replace(spec, packing='pack')
  (parts,) = minibatch.split(
      common.policy_batch(8),
      spec,
      seed=0,
      iteration=0,
      epoch=0,
      rows=2 if 'accumulate' in options else 8,
  )
  several = max(part.rollout.segment_ids_BT.max() for part in parts) > 1
  assert several == ('pack' in options)
  assert (len(parts) > 1) == ('accumulate' in options)
  spec = _optimizer(options)
  model = dataclasses.replace(
      common.MODEL,
      remat='remat' in options or 'remat-all' in options,
      keep_attention='remat-all' not in options,
      mlp_parts=3 if 'remat-all' in options else 1,  # The last is short.
  )
  update = update_lib.Update(
      model,
      spec,
      loss,
      temperature=0.7,
      frozen=lora.Frozen(_LORA, common.params()) if with_lora else None,
      chunk_tokens=24 if 'chunk' in options else 10_000,
  )
  params = _adapter() if with_lora else common.params()
  state = train_state.create(params, spec.make(), spec.moments_on)
  state, metrics = update(state, parts)
  adam = state.opt_state.inner[1][0]
  for moment in jax.tree.leaves((adam.mu, adam.nu)):
    on_host = moment.sharding.memory_kind == 'pinned_host'
    assert on_host == ('host' in options)
  return jax.tree.map(_gradient, adam.mu, adam.nu), jax.device_get(metrics)


def _optimizer(options):
  return dataclasses.replace(
      _SGD,
      first_moment_dtype='bfloat16' if 'bfloat16' in options else 'float32',
      moments_on='host' if 'host' in options else 'device',
  )


def _gradient(mu, nu):
  """From the second moment, which is in float32 whatever the first is in."""
  size = np.sqrt(np.asarray(nu) / (1 - _SGD.b2))
  return np.sign(np.float32(mu)) * size


def _assert_same(got, want):
  """To 1e-5, the gradient to 2e-5; of its largest entry, where above 1.

  What XLA did not optimise rounds a little more.
  """
  largest = max(np.abs(x).max() for x in jax.tree.leaves(want[0]))
  assert largest > 1e-3
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(
          a, b, atol=2e-5 * max(1.0, largest)
      ),
      *(got[0], want[0]),
  )
  for name in got[1].keys() - {'update/frac_params_changed'}:
    np.testing.assert_allclose(
        got[1][name], want[1][name], rtol=1e-5, atol=1e-6, err_msg=name
    )


@pytest.mark.parametrize(
    'options', [(o,) for o in PASS] + [MOMENTS, ALL], ids='+'.join
)
def test_alone_and_together_they_change_nothing(options):
  _assert_same(_step(_LOSS, options), _step(_LOSS, ()))


def test_with_an_adapter_they_change_nothing_either():
  _assert_same(_step(_LOSS, ALL, True), _step(_LOSS, (), True))


def test_packing_does_not_change_what_a_sequence_is():
  _assert_same(_step(_GSPO, ('accumulate', 'pack')), _step(_GSPO, ()))
