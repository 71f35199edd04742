from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hgpo_jax.learner import optimizer as optimizer_lib


def _reference_adamw(spec, params, grads_list):
  """AdamW with clip, in float64 NumPy (Loshchilov and Hutter, alg. 2)."""
  x = params.astype(np.float64)
  m, v = np.zeros_like(x), np.zeros_like(x)
  for t, grad in enumerate(grads_list, start=1):
    norm = np.sqrt((grad.astype(np.float64) ** 2).sum())
    grad = grad * min(1.0, spec.max_grad_norm / norm)
    m = spec.b1 * m + (1 - spec.b1) * grad
    v = spec.b2 * v + (1 - spec.b2) * grad**2
    m_hat, v_hat = m / (1 - spec.b1**t), v / (1 - spec.b2**t)
    rate = float(spec.learning_rate_at(t - 1))
    x = x - rate * (m_hat / (np.sqrt(v_hat) + spec.eps) + spec.weight_decay * x)
  return x


def _apply(spec):
  """apply(grads, state, params) -> (params, state), compiled."""
  transform = spec.make()

  @jax.jit
  def apply(grads, state, params):
    changes, state = transform.update(grads, state, params)
    return optax.apply_updates(params, changes), state

  return apply


def test_a_first_moment_in_bfloat16_is_near_the_exact_one():
  specs = [
      optimizer_lib.AdamW(learning_rate=1e-2, first_moment_dtype=dtype)
      for dtype in ('float32', 'bfloat16')
  ]
  grads_list = np.random.default_rng(0).normal(size=(20, 64)) + 0.5
  ends = []
  for spec in specs:
    x, apply = jnp.zeros(64), _apply(spec)
    state = spec.make().init(x)
    for grads in grads_list:
      x, state = apply(jnp.float32(grads), state, x)
    adam = state.inner[1][0]
    assert adam.mu.dtype == spec.first_moment_dtype
    assert adam.nu.dtype == jnp.float32 == x.dtype
    ends.append(np.asarray(x))
  gap = np.abs(ends[1] - ends[0]).max()
  assert 0 < gap < 2e-2 * np.abs(ends[0]).max()


@pytest.mark.parametrize('schedule', ['constant', 'linear', 'cosine'])
def test_equals_a_float64_reference(schedule):
  spec = optimizer_lib.AdamW(
      learning_rate=1e-2,
      b2=0.99,
      weight_decay=0.1,
      warmup_steps=2,
      schedule=schedule,
      decay_steps=0 if schedule == 'constant' else 9,
  )
  rng = np.random.default_rng(0)
  params = rng.normal(size=(5, 3)).astype(np.float32)
  grads_list = rng.normal(size=(12, 5, 3)).astype(np.float32)
  x = jnp.asarray(params)
  state = spec.make().init(x)
  apply = _apply(spec)
  for grads in grads_list:
    x, state = apply(jnp.asarray(grads), state, x)
  expected = _reference_adamw(spec, params, grads_list)
  np.testing.assert_allclose(x, expected, atol=2e-6)


def test_learning_rates_are_a_function_of_the_count():
  spec = optimizer_lib.AdamW(
      learning_rate=1.0,
      warmup_steps=3,
      schedule='linear',
      decay_steps=7,
      final_fraction=0.2,
  )
  rates = [float(spec.learning_rate_at(i)) for i in range(10)]
  np.testing.assert_allclose(
      rates, [0.25, 0.5, 0.75, 1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2], atol=1e-6
  )


def test_float32_parameters_keep_updates_that_bfloat16_swallows():
  spec = optimizer_lib.AdamW(learning_rate=1e-6, weight_decay=0.0)
  apply = _apply(spec)

  def after(dtype):
    x = jnp.ones((4,), dtype)
    state = spec.make().init(x)
    for _ in range(100):
      x, state = apply(jnp.ones((4,), dtype), state, x)
    return np.asarray(x, np.float64)

  np.testing.assert_allclose(after(jnp.float32), 1 - 1e-4, atol=1e-5)
  np.testing.assert_array_equal(after(jnp.bfloat16), 1.0)


@pytest.mark.parametrize('bad', [np.nan, np.inf, 1e30])
def test_a_gradient_norm_that_is_not_finite_changes_nothing(bad):
  spec = optimizer_lib.AdamW(learning_rate=1e-2)
  params = {'a': jnp.ones(3), 'b': jnp.ones(2)}
  apply, good = _apply(spec), jax.tree.map(jnp.ones_like, params)
  params, state = apply(good, spec.make().init(params), params)
  broken = {**good, 'b': jnp.array([1.0, bad])}
  kept, after = apply(broken, state, params)
  jax.tree.map(np.testing.assert_array_equal, kept, params)
  jax.tree.map(np.testing.assert_array_equal, state.inner, after.inner)
  assert after.skipped == 1


@pytest.mark.parametrize(
    'kwargs, text',
    [
        (dict(learning_rate=0.0), 'AdamW.learning_rate=0.0; expected greater'),
        (dict(learning_rate=1e6), 'AdamW.learning_rate=1000000.0; expected at'),
        (
            dict(learning_rate=0.1, weight_decay=10),
            'AdamW.weight_decay=10.0; expected less than 1 / learning_rate = 10',
        ),
        (
            dict(decay_steps=5),
            "AdamW.decay_steps=5; expected 0 with schedule='constant'",
        ),
        (
            dict(final_fraction=0.1),
            "AdamW.final_fraction=0.1; expected 0 with schedule='constant'",
        ),
        (dict(b2=1.0), r'AdamW.b2=1.0; expected in \[0, 1\)'),
        (dict(warmup_steps=-1), 'AdamW.warmup_steps=-1; expected at least 0'),
        (
            dict(schedule='cosine', warmup_steps=5, decay_steps=5),
            'AdamW.decay_steps=5; expected greater than warmup_steps=5',
        ),
    ],
)
def test_bad_numbers_are_refused_by_name(kwargs, text):
  with pytest.raises(ValueError, match=text):
    optimizer_lib.AdamW(**kwargs)
