"""Whose log-probs the ratio is taken to, and what is said of the gap."""

from __future__ import annotations

import dataclasses

from absl import logging
import numpy as np
import pytest

from hgpo_jax.batch import minibatch
from hgpo_jax.experiment import old_logprobs
from tests.experiment import runs
from tests.learner import common


def _rows(gap, packing='none'):
  """(rollout, its passes, score, scored passes) with a gap at every token."""
  rollout = common.policy_batch(8).rollout
  mask_BR = rollout.action_mask_BR
  sampled_BR = np.where(mask_BR, -1.5, 0).astype(np.float32)
  rollout = dataclasses.replace(rollout, sampler_logprobs_BR=sampled_BR)
  spec = dataclasses.replace(common.SPEC, packing=packing)
  parts = list(minibatch.by_length(rollout, spec, 2))
  assert len(parts) > 1
  scored = []

  def score(some):
    out_BR = np.zeros(mask_BR.shape, np.float32)
    for rows, _ in some:
      scored.append(len(rows))
      out_BR[rows] = np.where(mask_BR, sampled_BR + gap, 0)[rows]
    return out_BR

  return rollout, parts, score, scored


def _choose(gap, packing='none', **fields):
  rollout, parts, score, scored = _rows(gap, packing)
  found = old_logprobs.OldLogprobs(**fields)
  old_BR, metrics = found.choose(rollout, iter(parts), score)
  sampled = np.array_equal(old_BR, rollout.sampler_logprobs_BR)
  assert metrics['logprob_gap/old_from_sampler'] == sampled
  if not sampled:
    np.testing.assert_allclose(
        old_BR[rollout.action_mask_BR], -1.5 + gap, atol=1e-6
    )
  np.testing.assert_allclose(metrics['logprob_gap/mean'], abs(gap), atol=1e-6)
  return sampled, len(scored), len(parts)


@pytest.mark.parametrize('packing', ['none', 'pack'])
def test_auto_scores_all_only_where_the_two_differ(packing):
  sampled, scored, passes = _choose(5e-4, packing, source='auto')
  assert sampled and scored == 1
  sampled, scored, passes = _choose(5e-3, packing, source='auto')
  assert not sampled and scored == passes
  assert _choose(5e-3, packing, source='auto', allowed_gap=1e-2)[0]


def test_a_named_source_is_taken_whatever_the_gap():
  sampled, scored, _ = _choose(0.05, source='sampler')
  assert sampled and scored == 1  # To know the gap.
  sampled, scored, passes = _choose(0.05, source='trainer')
  assert not sampled and scored == passes


@pytest.mark.parametrize('gap', [-0.3, float('nan')])
def test_a_gap_as_large_as_a_mistake_is_told(gap, monkeypatch):
  told = []
  monkeypatch.setattr(logging, 'warning', lambda m, *a: told.append(m % a))
  rollout, parts, score, _ = _rows(gap)
  for fields in ({}, {'alarm_gap': 0.5}, {'alarm_gap': 0.0}):
    old_logprobs.OldLogprobs(**fields).choose(rollout, parts, score)
  assert len(told) == (2 if np.isnan(gap) else 1)
  assert 'at least OldLogprobs.alarm_gap = 0.1' in told[0]


def test_a_gap_of_an_older_policy_names_other_knobs(monkeypatch):
  told = []
  monkeypatch.setattr(logging, 'warning', lambda m, *a: told.append(m % a))
  rollout, parts, score, _ = _rows(-0.3)
  for lag in (0, 1):
    old_logprobs.OldLogprobs().choose(rollout, parts, score, lag)
  same, older = told
  assert 'PPOLoss.tis_clip' in same and 'rollout_lag' not in same
  assert 'Lower AdamW.learning_rate, or set Experiment.rollout_lag = 0' in older


def test_gaps_below_0_are_refused():
  with pytest.raises(
      ValueError, match='OldLogprobs.allowed_gap is -1.*least 0'
  ):
    old_logprobs.OldLogprobs(allowed_gap=-1.0)


def test_a_run_takes_the_samplers(policy, one_device, tmp_path):
  runs.train(
      policy,
      tmp_path,
      'Experiment.iterations = 1',
      'Experiment.old_logprobs = @OldLogprobs()',
      "OldLogprobs.source = 'auto'",
      'PPOLoss.tis_clip = 2.0',
  )
  first, _ = runs.lines(tmp_path)
  assert first['logprob_gap/old_from_sampler'] == 1.0
  assert first['logprob_gap/max'] < 1e-4
  np.testing.assert_allclose(first['policy/tis_weight'], 1.0, atol=1e-6)
