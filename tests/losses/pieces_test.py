"""KL estimates, ratios, aggregation, value loss: what goldens do not reach."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax.losses import aggregate
from hgpo_jax.losses import kl
from hgpo_jax.losses import policy
from hgpo_jax.losses import value


def test_k3_far_away_is_clamped_without_gradient():
  logprobs = jnp.array([-200.0, -30.0, -1.0])
  ref = jnp.array([-1.0, -1.0, -1.5])
  got, gradient = jax.value_and_grad(lambda x: kl.kl('k3', x, ref).sum())(
      logprobs
  )
  np.testing.assert_allclose(got, 20.0 + np.exp(-0.5) + 0.5 - 1.0, rtol=1e-6)
  np.testing.assert_allclose(gradient, [0.0, 0.0, 1 - np.exp(-0.5)], rtol=1e-5)


def test_k3_is_precise_near_zero():
  got = kl.kl('low_var_kl', jnp.float32(-1.0), jnp.float32(-1.0 + 2**-13))
  np.testing.assert_allclose(got, 0.5 * 2.0**-26, rtol=1e-2)


@pytest.mark.parametrize('kind', kl.KINDS)
def test_the_reference_gets_no_gradient(kind):
  gradient = jax.grad(lambda ref: kl.kl(kind, jnp.float32(-1.0), ref))(-2.0)
  assert gradient == 0.0


def test_an_unknown_kl_is_refused():
  with pytest.raises(ValueError, match="kl_kind is 'k9', expected one of"):
    kl.kl('k9', jnp.zeros(1), jnp.zeros(1))


def test_an_unknown_aggregation_is_refused():
  ones = jnp.ones((1, 1))
  with pytest.raises(ValueError, match="aggregation is 'sum', expected one of"):
    aggregate.aggregate('sum', ones, ones, ones[0], None)


def test_old_logprobs_get_no_gradient():
  ones = jnp.ones((1, 2))
  gradient = jax.grad(
      lambda old: policy.token_log_ratio(ones, old, ones).sum()
  )(ones)
  assert (gradient == 0.0).all()


def test_extreme_ratios_stay_finite():
  log_ratio = jnp.array([[500.0, -500.0, 500.0, -500.0, 500.0]])
  advantage = jnp.array([[1.0, 1.0, -1.0, -1.0, 0.0]])

  def total(x, dual_clip):
    return policy.ppo_clip(x, advantage, 0.2, 0.2, dual_clip).loss_BR.sum()

  for dual_clip in (0.0, 3.0):
    result = jax.value_and_grad(total)(log_ratio, dual_clip)
    assert all(jnp.isfinite(x).all() for x in result)


def test_dual_clip_bounds_the_loss_of_a_bad_action():
  log_ratio = jnp.log(jnp.array([[10.0, 2.0]]))
  advantage = -jnp.ones((1, 2))
  terms = policy.ppo_clip(log_ratio, advantage, 0.2, 0.2, 3.0)
  np.testing.assert_allclose(terms.loss_BR, [[3.0, 2.0]], rtol=1e-6)
  assert terms.clipped_low_BR.tolist() == [[1.0, 0.0]]
  off = policy.ppo_clip(log_ratio, advantage, 0.2, 0.2)
  np.testing.assert_allclose(off.loss_BR, [[10.0, 2.0]], rtol=1e-6)


def test_small_token_gaps_and_the_sequence_ratio():
  # 0.012 a token is e^1.2 = 3.3 over a sequence of 100, GSPO takes the mean.
  mask = jnp.ones((1, 100))
  log_ratio = policy.token_log_ratio(mask * 0.012, mask * 0.0, mask)
  np.testing.assert_allclose(jnp.exp(log_ratio.sum()), 3.32, rtol=1e-3)
  sequence = policy.sequence_log_ratio(log_ratio, mask)
  np.testing.assert_allclose(jnp.exp(sequence), 1.01207, rtol=1e-5)


def test_a_row_without_tokens_counts_as_zero():
  x, mask = jnp.ones((2, 3)), jnp.array([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
  weight = jnp.ones(2)
  counted = aggregate.count(mask, weight)
  got = aggregate.aggregate('seq-mean-token-mean', x, mask, weight, counted)
  np.testing.assert_allclose(got, 0.5)


def test_steps_of_a_row_are_summed_apart():
  x = jnp.array([[1.0, 2.0, 4.0, 8.0, 0.0], [1.0, 1.0, 1.0, 0.0, 0.0]])
  # Step 0 ends a row, so that padding, which is 0 too, goes on with it.
  step = jnp.array([[3, 0, 0, 5, 0], [1, 1, 0, 0, 0]])
  got = aggregate.step_sum(x, step)
  assert got[0, :4].tolist() == [1.0, 6.0, 6.0, 8.0]
  assert got[1, :3].tolist() == [2.0, 2.0, 1.0]
  counted = aggregate.count(x > 0, jnp.array([1.0, 1.0]), step_BR=step)
  assert counted.sequences == 5.0 and counted.tokens == 7.0


def test_only_scored_tokens_are_summed():
  mask = jnp.array([[1.0] * 3 + [0.0] * 5])
  weight = jnp.ones(1)
  counted = aggregate.count(mask, weight)
  x = jnp.ones((1, 8))
  assert (
      aggregate.aggregate('seq-mean-token-sum', x, mask, weight, counted) == 3.0
  )


def test_whitening():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(3, 4)) * 5.0 + 100.0
  mask = np.array([[1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 0, 0]])
  got = value.masked_whiten(jnp.float32(x), jnp.float32(mask))
  kept = x[mask == 1]
  np.testing.assert_allclose(
      got, (x - kept.mean()) / kept.std(ddof=1), rtol=1e-4, atol=1e-4
  )
  assert value.masked_whiten(jnp.ones((1, 1)), jnp.ones((1, 1))) == 0.0


def test_value_loss_takes_the_larger():
  loss, clipped = value.value_loss(
      jnp.array([[2.0, 0.1]]), jnp.zeros((1, 2)), jnp.array([[2.0, 0.0]]), 0.5
  )
  np.testing.assert_allclose(loss, [[2.25, 0.01]], rtol=1e-6)
  assert clipped.tolist() == [[1.0, 0.0]]
