"""The training loss: invariances, masks, gradients, refused settings."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax.losses import aggregate
from hgpo_jax.losses import ppo
from tests.losses import batches

LOSSES = (
    ppo.PPOLoss(entropy_coef=0.1, kl_coef=0.5),
    ppo.PPOLoss(aggregation='seq-mean-token-sum', kl_kind='k2'),
    ppo.PPOLoss(0.2, 0.3, aggregation='seq-mean-token-mean', kl_kind='abs'),
    ppo.PPOLoss(aggregation='seq-mean-token-sum-norm', norm_length=6),
    ppo.PPOLoss(
        ratio='sequence', aggregation='seq-mean-token-mean', dual_clip=0.0
    ),
)
every_loss = pytest.mark.parametrize(
    'loss', LOSSES, ids=lambda loss: f'{loss.ratio}-{loss.aggregation}'
)


def _assert_same(got, want, **tolerance):
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, **tolerance), got, want
  )


@every_loss
@pytest.mark.parametrize('parts', [2, 4])
def test_micro_batches_add_up(loss, parts):
  batch = batches.minibatch()
  (want, want_metrics), want_gradient = batches.evaluate(loss, batch)
  total, metrics, gradient = 0.0, {}, []
  for rows in np.split(np.arange(batches.ROWS), parts):
    part = batches.rows_of(batch, rows)
    (value, more), grads = batches.evaluate(loss, part, whole=batch)
    total += value
    metrics = {k: metrics.get(k, 0.0) + v for k, v in more.items()}
    gradient.append(grads)
  gradient = jax.tree.map(lambda *x: jnp.concatenate(x), *gradient)
  _assert_same(
      (total, metrics, gradient),
      (want, want_metrics, want_gradient),
      rtol=1e-6,
      atol=1e-6,
  )


@every_loss
def test_order_and_padding_of_rows_change_nothing(loss):
  batch = batches.minibatch()
  want, want_gradient = batches.evaluate(loss, batch)
  order = np.random.default_rng(0).permutation(batches.ROWS)
  got, gradient = batches.evaluate(loss, batches.rows_of(batch, order))
  _assert_same(got, want, rtol=1e-5, atol=1e-6)
  _assert_same(gradient[0], want_gradient[0][order], rtol=1e-5, atol=1e-6)
  # The last row weighs nothing: with other contents, nothing changes.
  other = batches.rows_of(batch, [0, 1, 2, 3, 4, 5, 6, 0])
  other['row_weight_B'] = batch['row_weight_B']
  got, gradient = batches.evaluate(loss, other)
  _assert_same(got, want, rtol=1e-6, atol=1e-6)
  assert (gradient[0][7] == 0.0).all()


@every_loss
def test_padding_of_tokens_changes_nothing(loss):
  batch = batches.minibatch()
  wide = {
      name: jnp.pad(x, ((0, 0), (0, 3))) if x.ndim == 2 else x
      for name, x in batch.items()
  }
  want, want_gradient = batches.evaluate(loss, batch)
  got, gradient = batches.evaluate(loss, wide)
  _assert_same(got, want, rtol=1e-6, atol=1e-6)
  _assert_same(gradient[0][:, :6], want_gradient[0], rtol=1e-6, atol=1e-6)


@every_loss
def test_several_steps_in_a_row_change_nothing(loss):
  batch = batches.rows_of(batches.minibatch(), [0, 1, 2, 3, 4, 5, 0, 7])
  # The row without a token cannot be packed; it weighs nothing here.
  batch['row_weight_B'] = batch['row_weight_B'].at[6].set(0.0)
  want, want_gradient = batches.evaluate(loss, batch)
  joined, source = batches.packed(batch)
  got, gradient = batches.evaluate(loss, joined)
  _assert_same(got, want, rtol=1e-5, atol=1e-6)
  mask_BR = np.asarray(joined['mask_BR'])
  for new, old in zip(gradient, want_gradient):
    _assert_same(new[mask_BR], old[source][mask_BR], rtol=1e-5, atol=1e-6)
    assert not new[~mask_BR].any()


@every_loss
@pytest.mark.parametrize('garbage', [1.0, 1e9, -1e9, np.nan, np.inf])
def test_masked_slots_change_no_bit(loss, garbage):
  batch = batches.minibatch()
  dirty = dict(batch)
  for name in (
      'logprobs_BR',
      'old_logprobs_BR',
      'ref_logprobs_BR',
      'entropy_BR',
      'advantage_BR',
  ):
    dirty[name] = jnp.where(batch['mask_BR'], batch[name], garbage)
  jax.tree.map(
      np.testing.assert_array_equal,
      batches.evaluate(loss, dirty),
      batches.evaluate(loss, batch),
  )


# GSPO's gradient is not that of its value, by design: the mean is stopped.
@pytest.mark.parametrize(
    'loss', [loss for loss in LOSSES if loss.ratio == 'token'], ids=repr
)
def test_gradient_by_finite_differences(loss):
  batch = batches.minibatch(3)
  (_, _), (gradient, entropy_gradient) = batches.evaluate(loss, batch)
  counted = batches.denominators(loss, batch)
  run = jax.jit(lambda changed: loss(**changed, denominators=counted)[0])
  rng = np.random.default_rng(0)
  for name, slope in (
      ('logprobs_BR', gradient),
      ('entropy_BR', entropy_gradient),
  ):
    direction = jnp.float32(rng.normal(size=slope.shape))
    ends = [
        run(batch | {name: batch[name] + sign * 1e-3 * direction})
        for sign in (1.0, -1.0)
    ]
    np.testing.assert_allclose(
        (ends[0] - ends[1]) / 2e-3,
        jnp.vdot(slope, direction),
        rtol=2e-2,
        atol=2e-3,
    )


def test_agrees_with_float64():
  batch = batches.minibatch(1)
  loss = ppo.PPOLoss(clip_high=0.28, entropy_coef=0.1, kl_coef=0.5)
  x = {name: np.asarray(v, np.float64) for name, v in batch.items()}
  mask = x['mask_BR'] * x['row_weight_B'][:, None]
  ratio = np.exp(x['logprobs_BR'] - x['old_logprobs_BR'])
  a, d = x['advantage_BR'], x['logprobs_BR'] - x['ref_logprobs_BR']
  term = np.maximum(-a * ratio, -a * np.clip(ratio, 0.8, 1.28))
  term = np.where(a < 0, np.minimum(term, -3.0 * a), term)
  term += 0.5 * (np.exp(-d) + d - 1.0) - 0.1 * x['entropy_BR']
  (got, metrics), _ = batches.evaluate(loss, batch)
  np.testing.assert_allclose(got, (term * mask).sum() / mask.sum(), rtol=1e-5)
  np.testing.assert_allclose(
      metrics['policy/ratio'], (ratio * mask).sum() / mask.sum(), rtol=1e-5
  )


def test_kl_has_a_gradient_of_its_own():
  batch = batches.minibatch()
  batch['advantage_BR'] = jnp.zeros_like(batch['advantage_BR'])
  for coef, moves in ((0.01, True), (0.0, False)):
    loss = ppo.PPOLoss(kl_coef=coef, entropy_coef=0.0)
    _, (gradient, _) = batches.evaluate(loss, batch)
    assert bool(jnp.any(gradient != 0.0)) == moves


def test_first_update_has_no_value_but_a_gradient():
  batch = batches.minibatch()
  batch['logprobs_BR'] = batch['old_logprobs_BR']
  sign = jnp.where(jnp.arange(batches.ROWS) % 2, 1.0, -1.0)[:, None]
  batch['advantage_BR'] = sign * jnp.ones_like(batch['advantage_BR'])
  batch['mask_BR'] = jnp.ones_like(batch['mask_BR'])
  batch['row_weight_B'] = jnp.ones_like(batch['row_weight_B'])
  loss = ppo.PPOLoss(entropy_coef=0.0, kl_coef=0.0)
  (value, metrics), (gradient, _) = batches.evaluate(loss, batch)
  assert abs(value) < 1e-6 and jnp.linalg.norm(gradient) > 0.01
  assert metrics['policy/ratio'] == 1.0 and metrics['policy/clip_frac'] == 0.0


def test_a_reference_is_needed_only_for_its_kl():
  batch = batches.minibatch() | {'ref_logprobs_BR': None}
  loss = ppo.PPOLoss(kl_coef=0.0)
  counted = batches.denominators(loss, batch)
  _, metrics = loss(**batch, denominators=counted)
  assert 'policy/ref_kl' not in metrics
  with pytest.raises(ValueError, match='PPOLoss.kl_coef is 0.01 but there are'):
    ppo.PPOLoss()(**batch, denominators=counted)


def test_runs_inside_jit():
  loss, batch = ppo.PPOLoss(), batches.minibatch()
  counted = jax.jit(loss.denominators)(batch['mask_BR'], batch['row_weight_B'])
  assert isinstance(counted, aggregate.Denominators)
  got = jax.jit(lambda b, d: loss(**b, denominators=d)[0])(batch, counted)
  want = loss(**batch, denominators=counted)[0]
  np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize(
    'settings, text',
    [
        ({'clip_low': -0.1}, 'PPOLoss.clip_low is -0.1, expected a finite'),
        ({'clip_low': 1.5}, 'clip_low is 1.5, expected at most 1'),
        ({'kl_coef': np.inf}, 'PPOLoss.kl_coef: got inf'),
        ({'kl_kind': 'k4'}, "PPOLoss.kl_kind is 'k4', expected one of"),
        ({'aggregation': 'mean'}, "aggregation is 'mean', expected one of"),
        ({'tis_clip': 0.5}, 'tis_clip is 0.5, expected 0 for none or at least'),
        ({'dual_clip': 1.1}, r'dual_clip is 1.1, expected 0 for none or a nu'),
        ({'norm_length': -5}, "norm_length is -5 with aggregation 'token-m"),
        ({'norm_length': 5}, "norm_length is 5 with aggregation 'token-mean'"),
        (
            {'aggregation': 'seq-mean-token-sum-norm'},
            "norm_length is 0 with aggregation 'seq-mean-token-sum-norm'",
        ),
        (
            {'ratio': 'sequence', 'dual_clip': 0.0},
            "got aggregation 'token-mean' and dual_clip 0.0, set PPOLoss.agg",
        ),
        (
            {'ratio': 'sequence', 'aggregation': 'seq-mean-token-mean'},
            'and dual_clip 3.0, set PPOLoss.aggregation',
        ),
    ],
)
def test_bad_settings_are_refused(settings, text):
  with pytest.raises(ValueError, match=text):
    dataclasses.replace(ppo.PPOLoss(), **settings)


def test_truncated_importance_sampling_weighs_the_policy_term_alone():
  batch = batches.minibatch()
  plain = ppo.PPOLoss(entropy_coef=0.0, kl_coef=0.0)
  tis = dataclasses.replace(plain, tis_clip=1.5)
  gap_BR = np.random.default_rng(3).normal(size=batch['mask_BR'].shape)
  weight_BR = np.minimum(np.exp(gap_BR), 1.5)
  sampler_BR = batch['old_logprobs_BR'] - jnp.float32(gap_BR)
  # Whatever stands on padding.
  sampler_BR = jnp.where(batch['mask_BR'], sampler_BR, jnp.nan)
  given = {**batch, 'sampler_logprobs_BR': sampler_BR}
  (got, metrics), (gradient, *_) = batches.evaluate(tis, given)
  # A weight on a token is a weight on its advantage.
  weighed = batch | {'advantage_BR': batch['advantage_BR'] * weight_BR}
  (want, _), (want_gradient, *_) = batches.evaluate(plain, weighed)
  np.testing.assert_allclose(got, want, rtol=1e-5)
  np.testing.assert_allclose(gradient, want_gradient, rtol=1e-4, atol=1e-7)
  counts_BR = batch['mask_BR'] & (batch['row_weight_B'] > 0)[:, None]
  for name, value_BR in (
      ('policy/tis_weight', weight_BR),
      ('policy/tis_cut_frac', weight_BR == 1.5),
  ):
    np.testing.assert_allclose(
        metrics[name], value_BR[np.asarray(counts_BR)].mean(), rtol=1e-5
    )
  with pytest.raises(ValueError, match='tis_clip is 1.5 but there are no log-'):
    batches.evaluate(tis, batch)


def test_older_episodes_get_the_decoupled_gradient():
  """Against float64: w dmax(-A r, -A clip(r)), with r = p / p_old.

  w = min(p_old / p_behaviour, c), where the policy that played is behind the
  one that the clip is centred on (Hilton et al. 2021, arXiv 2110.00641).
  """
  batch = batches.minibatch(5)
  loss = ppo.PPOLoss(entropy_coef=0.0, kl_coef=0.0, dual_clip=0.0, tis_clip=2.0)
  moved_BR = np.random.default_rng(3).normal(size=batch['mask_BR'].shape)
  behaviour_BR = batch['old_logprobs_BR'] - jnp.float32(moved_BR)
  given = {**batch, 'sampler_logprobs_BR': behaviour_BR}
  (got, metrics), (gradient, *_) = batches.evaluate(loss, given)
  x = {name: np.asarray(v, np.float64) for name, v in given.items()}
  mask = x['mask_BR'] * x['row_weight_B'][:, None]
  weight = np.minimum(
      np.exp(x['old_logprobs_BR'] - x['sampler_logprobs_BR']), 2.0
  )
  ratio = np.exp(x['logprobs_BR'] - x['old_logprobs_BR'])
  a = x['advantage_BR']
  plain, clipped = -a * ratio, -a * np.clip(ratio, 0.8, 1.2)
  value = weight * np.maximum(plain, clipped) * mask / mask.sum()
  # Where the clip holds, nothing depends on the policy.
  slope = weight * np.where(plain >= clipped, plain, 0.0) * mask / mask.sum()
  counted = mask > 0
  assert 0.1 < (weight == 2.0)[counted].mean() < 0.9
  assert 0.1 < (plain < clipped)[counted].mean() < 0.9
  np.testing.assert_allclose(got, value.sum(), rtol=1e-5)
  np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=1e-8)
  np.testing.assert_allclose(
      metrics['policy/tis_cut_frac'], (weight == 2.0)[counted].mean(), rtol=1e-5
  )
