"""Kernels in int8: how far they, and what they give, may be off."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.models import quantize
from tests.learner import common


def test_no_entry_moves_by_more_than_half_a_step():
  rng = np.random.default_rng(0)
  kernel_IKO = np.float32(rng.normal(size=(16, 3, 8)) * rng.exponential(size=8))
  kernel_IKO[:, 1, 2] = 0.0
  found = quantize.quantize(jnp.asarray(kernel_IKO))
  assert found.values.dtype == jnp.int8
  assert np.abs(found.values).max() == 127
  step_KO = np.abs(kernel_IKO).max(axis=0) / 127
  back_IKO = np.float32(found.values) * found.scale
  assert (np.abs(back_IKO - kernel_IKO) <= 0.5001 * step_KO).all()
  assert not back_IKO[:, 1, 2].any()

  x_NI = np.float32(rng.normal(size=(5, 16)))
  off = np.abs(
      quantize.dot('ni,iko->nko', x_NI, found)
      - np.einsum('ni,iko->nko', x_NI, kernel_IKO)
  )
  bound = np.abs(x_NI).sum(axis=1)[:, None, None] * step_KO / 2
  assert 0 < off.max() and (off <= bound + 1e-5).all()


def test_a_decode_step_stays_close():
  params = jax.tree.map(lambda x: x / 4 if x.ndim > 1 else x, common.params())
  tokens = np.arange(1, 9, dtype=np.int32)[None]

  def logits(int8):
    model = dataclasses.replace(common.MODEL, int8_rollout=int8)
    laid_out = model.decode_params(params)
    cache = model.init_cache(1, 64)
    hidden, _ = model.extend(laid_out, cache, tokens, np.zeros(1, np.int32))
    return np.asarray(model.logits(laid_out, hidden))

  want, got = logits(False), logits(True)
  off = np.sqrt(np.mean((got - want) ** 2) / np.var(want))
  assert 0 < off < 0.05


def test_layers_take_a_quarter_of_the_bytes():
  size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree['layers']))
  model = dataclasses.replace(common.MODEL, int8_rollout=True)
  plain = common.MODEL.decode_params(common.params())
  assert size(model.decode_params(common.params())) < 0.4 * size(plain)
