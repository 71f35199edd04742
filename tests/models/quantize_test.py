"""Kernels in int8: how far they, and what they give, may be off."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax.models import lora
from hgpo_jax.models import quantize
from tests.learner import common


def test_no_entry_moves_by_more_than_half_a_step():
  rng = np.random.default_rng(0)
  kernel = np.float32(rng.normal(size=(3, 16, 8)) * rng.exponential(size=8))
  kernel[1, :, 2] = 0.0
  params = {'layers': {'mlp': {'up': {'kernel': kernel}}}, 'other': 1}
  found = quantize.quantize(params)
  up = found['layers']['mlp']['up']
  assert up['kernel'].dtype == jnp.int8 and found['other'] == 1
  assert np.abs(up['kernel']).max() == 127
  step = np.abs(kernel).max(axis=1, keepdims=True) / 127
  back = np.float32(up['kernel']) * up['kernel_scale']
  assert (np.abs(back - kernel) <= 0.5001 * step).all()
  assert not back[1, :, 2].any()

  x = np.float32(rng.normal(size=(5, 16)))
  one = {name: leaf[0] for name, leaf in up.items()}
  off = np.abs(quantize.matmul(one, x) - x @ kernel[0])
  bound = np.abs(x).sum(axis=1, keepdims=True) * step[0] / 2
  assert 0 < off.max() and (off <= bound + 1e-5).all()


def test_a_decode_step_stays_close():
  model = dataclasses.replace(common.MODEL, compute_dtype=jnp.bfloat16)
  params = jax.tree.map(lambda x: x / 4 if x.ndim > 1 else x, common.params())
  plain = model.decode_params(params)
  tokens = np.arange(1, 9, dtype=np.int32)[None]

  @jax.jit
  def logits(params):
    hidden, _ = model.extend(
        params,
        model.init_cache(1, 8),
        tokens,
        np.arange(8)[None],
        np.ones((1, 8), bool),
        0,
    )
    return model.logits(params, hidden)

  want, got = logits(plain), logits(quantize.quantize(plain))
  off = np.sqrt(np.mean((got - want) ** 2) / np.var(want))
  assert 0 < off < 0.05


def test_adapters_are_refused():
  spec = lora.LoRA(rank=2)
  adapter = spec.init(common.params(), jax.random.key(0))
  attached = spec.attach(common.params(), adapter)
  with pytest.raises(ValueError, match="has .'lora_a', 'lora_b'. beside its"):
    quantize.quantize(attached)
