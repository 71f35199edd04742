"""Log-probs of response tokens: values, chunks, the shift, temperature."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax.losses import token_logprobs

B, R, D, V = 3, 7, 4, 11


def _random(seed=0):
  keys = jax.random.split(jax.random.key(seed), 3)
  hidden = jax.random.normal(keys[0], (B, R, D))
  tokens = jax.random.randint(keys[1], (B, R), 0, V)
  return hidden, tokens, jax.random.normal(keys[2], (D, V)) * 2.0


def _score(hidden, tokens, head, temperature=1.0, chunk_tokens=10_000):
  return token_logprobs.token_logprobs(
      hidden, tokens, lambda h: h @ head, temperature, chunk_tokens
  )


@pytest.mark.parametrize('temperature', [0.4, 1.0])
def test_agrees_with_float64(temperature):
  hidden, tokens, head = _random()
  logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64)
  logits /= temperature
  p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  want = np.log(np.take_along_axis(p, np.asarray(tokens)[..., None], -1))
  logprobs, entropy = _score(hidden, tokens, head, temperature)
  np.testing.assert_allclose(logprobs, want[..., 0], rtol=1e-5, atol=1e-5)
  np.testing.assert_allclose(
      entropy, -(p * np.log(p)).sum(-1), rtol=1e-4, atol=1e-5
  )


@pytest.mark.parametrize('chunk_tokens', [1, 6, 9, 20])
def test_chunks_change_nothing(chunk_tokens):
  hidden, tokens, head = _random()

  def total(hidden, head, chunk_tokens):
    logprobs, entropy = _score(hidden, tokens, head, 0.7, chunk_tokens)
    weight = jnp.arange(B * R).reshape(B, R) / (B * R)
    return (weight * logprobs).sum() + (weight**2 * entropy).sum()

  run = jax.value_and_grad(total, argnums=(0, 1))
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
      run(hidden, head, chunk_tokens),
      run(hidden, head, 10_000),
  )


@pytest.mark.parametrize('spread', [1.0, 30.0])
def test_the_gradient_is_that_of_the_plain_formula(spread):
  tokens = jnp.array([0, 3, 4, 3])
  logits = spread * jax.random.normal(jax.random.key(0), (4, 5)) + 100.0
  weights = jax.random.normal(jax.random.key(1), (2, 4))

  def plain(logits, tokens):
    logp = jax.nn.log_softmax(logits)
    own = jnp.take_along_axis(logp, tokens[:, None], axis=-1)[:, 0]
    return own, -jnp.sum(jnp.exp(logp) * logp, axis=-1)

  def total(score, logits):
    return sum(jnp.vdot(w, x) for w, x in zip(weights, score(logits, tokens)))

  got, want = (
      jax.value_and_grad(lambda x, score=score: total(score, x))(logits)
      for score in (token_logprobs.logprobs_and_entropy, plain)
  )
  np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
  np.testing.assert_allclose(got[1], want[1], rtol=1e-4, atol=1e-5)


def test_all_logits_are_never_held():
  hidden, tokens, head = _random()

  def loss(hidden):
    return sum(x.sum() for x in _score(hidden, tokens, head, 1.0, B * 2))

  text = str(jax.make_jaxpr(jax.grad(loss))(hidden))
  assert f'[{B},2,{V}]' in text
  # Neither whole nor stacked over the chunks for the backward pass.
  for shape in (f'[{B},{R},{V}]', f'[{B},8,{V}]', f'[4,{B},2,{V}]'):
    assert shape not in text


def test_half_precision_hidden_states_are_scored_in_float32():
  hidden, tokens, head = _random()
  low = jnp.bfloat16
  result = _score(hidden.astype(low), tokens, head.astype(low))
  assert {x.dtype for x in result} == {jnp.dtype('float32')}


def test_targets_are_predicted_from_the_state_before():
  # Prompt of 3, response of 2; then a padded target.
  tokens = jnp.array([[5, 6, 7, 8, 9]])
  hidden = jnp.arange(5.0)[None, :, None]
  target = jnp.array([[3, 4, 0]])
  before, ids = token_logprobs.gather_targets(hidden, tokens, target)
  assert ids[0, :2].tolist() == [8, 9]
  assert before[0, :2, 0].tolist() == [2.0, 3.0]


def test_the_first_response_token_has_a_gradient():
  tokens = jnp.array([[5, 6, 7, 8, 9]])
  target, mask = jnp.array([[3, 4, 0]]), jnp.array([[1.0, 1.0, 0.0]])
  head = _random()[2]

  def total(hidden):
    before, ids = token_logprobs.gather_targets(hidden, tokens, target)
    return (mask * _score(before, ids, head)[0]).sum()

  gradient = jax.grad(total)(jax.random.normal(jax.random.key(0), (1, 5, D)))
  touched = np.flatnonzero(np.abs(gradient).sum((0, 2)))
  assert touched.tolist() == [2, 3]
