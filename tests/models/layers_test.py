"""Pieces of a layer whose gradient or order is written out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax.models import layers


@pytest.mark.parametrize('shape', [(4, 8), (2, 3, 8)])
def test_a_projection_has_the_gradient_of_a_product(shape):
  rng = np.random.default_rng(0)
  x, kernel = rng.normal(size=shape), rng.normal(size=(8, 5))
  d = np.float32(rng.normal(size=(*shape[:-1], 5)))
  given = np.float32(x), np.float32(kernel)
  out, back = jax.vjp(lambda x, w: layers.project(x, w, None), *given)
  np.testing.assert_allclose(out, x @ kernel, atol=1e-5)
  d_x, d_kernel = back(d)
  np.testing.assert_allclose(d_x, d @ kernel.T, atol=1e-5)
  want = x.reshape(-1, 8).T @ d.reshape(-1, 5)
  np.testing.assert_allclose(d_kernel, want, atol=1e-5)


@pytest.mark.parametrize('length, calls', [(10, 3), (12, 3), (5, 1)])
def test_parts_cover_every_token_once(length, calls):
  x_BTD = np.arange(2 * length * 3, dtype=np.float32).reshape(2, length, 3)
  seen = []

  def run(x):
    seen.append(x.shape[1])
    return jnp.sin(x)

  out = layers.in_parts(run, x_BTD, 3)
  np.testing.assert_allclose(out, np.sin(x_BTD), atol=1e-6)
  assert seen[0] == -(-length // calls)
