from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from hgpo_jax.batch import minibatch
from hgpo_jax.batch import pack
from hgpo_jax.learner import optimizer as optimizer_lib
from hgpo_jax.learner import scorer
from hgpo_jax.learner import update as update_lib
from hgpo_jax.losses import ppo
from tests.learner import common


def _pack(steps, **kwargs):
  return pack.pad_steps(
      steps, length_buckets=(32,), response_buckets=(8,), **kwargs
  )


@pytest.mark.parametrize('temperature', [1.0, 0.6])
def test_equals_the_full_softmax_of_each_step_alone(temperature):
  steps = common.steps(5)
  logprobs_BR, entropy_BR = scorer.Scorer(common.MODEL, temperature).score(
      common.params(), _pack(steps)
  )
  assert logprobs_BR.shape == (5, 8)
  for row, step in enumerate(steps):
    ids = np.concatenate([step.prompt_ids, step.response_ids])[None]
    hidden = common.MODEL.hidden(
        common.params(), ids, np.arange(ids.size)[None], np.ones_like(ids)
    )
    logits = np.asarray(common.MODEL.logits(common.params(), hidden))[0]
    logits = logits.astype(np.float64) / temperature
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    first, count = len(step.prompt_ids), len(step.response_ids)
    at = np.arange(first - 1, first - 1 + count)
    np.testing.assert_allclose(
        logprobs_BR[row, :count], logp[at, step.response_ids], atol=1e-5
    )
    entropy = -(np.exp(logp) * logp).sum(-1)
    np.testing.assert_allclose(entropy_BR[row, :count], entropy[at], atol=1e-5)
    assert not np.any(logprobs_BR[row, count:])
  assert not np.any(logprobs_BR[len(steps) :])


@pytest.mark.parametrize('packing', ['none', 'pack'])
def test_parts_by_length_equal_one_pass(packing):
  rollout = _pack(common.steps(11))
  one = scorer.Scorer(common.MODEL, 1.0)
  expected = one.score(common.params(), rollout)
  spec = dataclasses.replace(
      common.SPEC, packing=packing, response_buckets=(8, 16, 24)
  )
  parts = list(minibatch.by_length(rollout, spec, 4))
  several = max(p.segment_ids_BT.max() for _, p in parts) > 1
  assert several == (packing == 'pack')
  found = one.score_parts(common.params(), parts, rollout.target_BR.shape)
  np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
  np.testing.assert_allclose(found[1], expected[1], atol=1e-5)


def test_gap_counts_response_tokens_of_real_rows_alone():
  rollout = _pack(common.steps(4))
  weight_B = np.array([1, 1, 1, 0], np.float32)
  rollout = dataclasses.replace(rollout, row_weight_B=weight_B)
  mask_BR = rollout.action_mask_BR & (weight_B > 0)[:, None]
  logprobs_BR = np.where(mask_BR, rollout.sampler_logprobs_BR + 0.012, 1e9)
  gap = scorer.logprob_gap(rollout, logprobs_BR)
  for name in ('mean', 'p99', 'max'):
    np.testing.assert_allclose(gap[f'logprob_gap/{name}'], 0.012, atol=1e-6)
  longest = mask_BR.sum(1).max()
  np.testing.assert_allclose(
      gap['logprob_gap/max_sequence_ratio'], np.exp(0.012 * longest), rtol=1e-4
  )
  empty = dataclasses.replace(rollout, row_weight_B=np.zeros(4, np.float32))
  assert scorer.logprob_gap(empty, logprobs_BR) == {}


def test_gap_moves_when_the_sampler_has_other_weights():
  rollout = _pack(common.steps(4))
  one = scorer.Scorer(common.MODEL, 1.0)
  score = lambda params: np.asarray(one.score(params, rollout)[0])
  sampled = dataclasses.replace(
      rollout, sampler_logprobs_BR=score(common.params())
  )
  same = scorer.logprob_gap(sampled, score(common.params()))
  moved = jax.tree.map(lambda x: x + 1e-2, common.params())
  other = scorer.logprob_gap(sampled, score(moved))
  assert same['logprob_gap/max'] == 0
  assert other['logprob_gap/mean'] > 1e-3


def test_training_at_temperature_zero_is_refused():
  with pytest.raises(ValueError, match='temperature is 0.*above 0'):
    update_lib.Update(
        common.MODEL,
        optimizer_lib.AdamW(),
        ppo.PPOLoss(),
        temperature=0,
    )
