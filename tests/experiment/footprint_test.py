"""A training that cannot fit is refused before any weight is read."""

from __future__ import annotations

import re

from absl import logging
import pytest

from hgpo_jax import config
from hgpo_jax.experiment import footprint
from hgpo_jax.models import hf
from hgpo_jax.planning import devices
from hgpo_jax.planning import memory
from tests.experiment import runs

_LONGEST = ('Minibatches.length_buckets = (144, 100_000)',)


@pytest.fixture
def has(monkeypatch, one_device):
  """Sets how many bytes a device has."""
  del one_device
  return lambda size: monkeypatch.setattr(
      devices, 'memory_present', lambda unused: size
  )


def _sizes(spec):
  """Bytes that the shortest and the longest rows need."""
  model = hf.read_config(spec.policy.path)
  return [
      memory.largest(memory.need(of(spec, model, (1, 1, 1)), 'cpu'))[1]
      for of in (footprint.smallest, footprint.largest)
  ]


def test_the_line_of_a_training_that_fits(policy, has, monkeypatch):
  spec = runs.load(policy)
  warned = []
  monkeypatch.setattr(logging, 'warning', lambda *args: warned.append(args))
  has(8e9)
  line = footprint.check(spec)
  assert re.fullmatch(
      r"memory       at most 0\.\d\d GB a device, in '\w+', of 8\.0", line
  )
  has(None)
  assert "how much 'cpu' has is not known" in footprint.check(spec)
  assert not warned


def test_what_the_workload_is_made_of(policy):
  spec = runs.load(policy, 'PPOLoss.kl_coef = 0.0')
  model = hf.read_config(policy)
  most = footprint.largest(spec, model, (1, 1, 1))
  assert (most.rows, most.length, most.response) == (8, 144, 12)
  assert (most.prompt, most.new_tokens, most.sampler_rows) == (128, 12, 16)
  assert (most.episodes, most.steps) == (16, spec.env.max_steps)
  assert (most.reference, most.remat) == (False, False)
  assert footprint.smallest(spec, model, (1, 1, 1)).prompt == 80
  assert not most.ahead and most.moments_on == 'device'
  hosted = runs.load(policy, "AdamW.moments_on = 'host'")
  assert footprint.largest(hosted, model, (1, 1, 1)).moments_on == 'host'
  lagging = runs.load(
      policy, 'Experiment.rollout_lag = 1', "OldLogprobs.source = 'sampler'"
  )
  assert footprint.largest(lagging, model, (1, 1, 1)).ahead


def test_what_can_never_fit_is_an_error_that_says_what_helps(policy, has):
  spec = runs.load(policy)
  has(_sizes(spec)[0].resident * 0.99)
  with pytest.raises(config.ConfigError) as refused:
    footprint.check(spec)
  text = str(refused.value)
  assert 'the training cannot fit: even with the shortest rows' in text
  assert re.search(r'needs 0\.\d GB on each of 1 devices, which have', text)
  assert 'In GB: ' in text and 'moments' in text
  assert '\nturn ' in text


def test_rows_that_may_be_too_long_are_a_warning(policy, has, monkeypatch):
  spec = runs.load(policy, *_LONGEST)
  least, most = _sizes(spec)
  assert most.total > 10 * least.total
  warned = []
  monkeypatch.setattr(
      logging, 'warning', lambda text, *args: warned.append(text % args)
  )
  has(2 * least.total)
  footprint.check(spec)
  (text,) = warned
  assert 'steps of 128 prompt tokens need' in text
  assert 'Minibatches.micro_batch_steps = ' in text
  has(2 * most.total)
  footprint.check(spec)
  assert len(warned) == 1


def test_the_entry_point_ends_before_weights_are_read(
    policy, has, tmp_path, monkeypatch, capsys
):
  has(1000.0)
  monkeypatch.setattr(hf, 'load_params', lambda *unused: pytest.fail('read'))
  text = runs.main(*runs.arguments(policy, tmp_path / 'run'))
  assert text.startswith('error: the training cannot fit')
  assert not (tmp_path / 'run').exists()
  # A dry run may be elsewhere than the training: it says so and ends well.
  assert not runs.main(*runs.arguments(policy, None), '--dry_run')
  assert 'memory       the training cannot fit' in capsys.readouterr().out
