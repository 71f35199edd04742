"""Seconds against numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from hgpo_jax.models import configs
from hgpo_jax.planning import devices
from hgpo_jax.planning import roofline
from hgpo_jax.planning import workload

_DEVICE = devices.Device('x', 100, 80, 1000, 100, 'made up')
_ALL = roofline.Efficiency(1.0, 1.0)
_WORK = workload.Workload(
    configs.CONFIGS['1.5b'],
    (1, 1, 1),
    reference=False,
    length=1024,
    response=128,
    episodes=32,
    steps=1,
    prompt=896,
    new_tokens=128,
    sampler_rows=32,
    minibatch_steps=32,
)


def test_one_device_by_hand():
  seconds = roofline.seconds(_WORK, _DEVICE, _ALL)
  layers = 28 * (2 * 1536**2 + 2 * 1536 * 256 + 3 * 1536 * 8960)
  attention = 4 * 28 * 12 * 128
  head = 2 * 1536 * 151_936
  scores = 4 * 4 * 28 * 12 * 32
  tokens = 32 * 1024
  once = tokens * (2 * layers + attention * 1024) + 32 * 128 * head
  # Norms and biases are in the exact count only.
  close = lambda x: pytest.approx(x, rel=1e-3)
  assert seconds.score == close(once / 1e14 + scores * 1024**2 / 1e12)
  # A token is bound by reading 3.1 GB of weights and the cache of 32 rows.
  cache = 32 * 1024 * 28 * 1024
  assert seconds.decode == close(128 * (2 * 1.5437e9 + cache) / 1e12)
  assert seconds.tokens == 32 * 1024
  passes = tokens * 4 * (2 * layers + attention * 1024) + 32 * 128 * 4 * head
  step = 32 * 1.5437e9 / 1e12
  assert seconds.update == close(
      passes / 1e14 + 4 * scores * 1024**2 / 1e12 + step
  )
  # Read in float32, written in bfloat16.
  assert seconds.sync == close(6 * 1.5437e9 / 1e12)
  rollout = seconds.sync + seconds.prefill + seconds.decode
  assert seconds.total == pytest.approx(
      rollout + seconds.score + seconds.update
  )


def test_weights_are_gathered_once_an_iteration_or_in_every_call():
  split = dataclasses.replace(_WORK, mesh=(1, 8, 1))
  gathering = dataclasses.replace(split, rollout_mesh=(1, 8, 1))
  device = dataclasses.replace(_DEVICE, link_gbs=20)
  own, every = (
      roofline.seconds(work, device, _ALL) for work in (split, gathering)
  )
  # Seven eighths of 3.1 GB over links of 10 GB/s; an eighth is there.
  moved = 7 / 8 * 2 * 1.5437e9 / 10e9
  assert own.sync == pytest.approx(
      moved + (4 / 8 + 2) * 1.5437e9 / 1e12, rel=1e-3
  )
  assert every.sync < own.sync / 8 and every.prefill > own.prefill


def test_more_devices_are_faster_until_links_bind():
  eight = dataclasses.replace(_WORK, mesh=(8, 1, 1))
  one = roofline.seconds(_WORK, _DEVICE, _ALL)
  shared = roofline.seconds(eight, _DEVICE, _ALL)
  assert shared.score == pytest.approx(one.score / 8)
  assert shared.decode > one.decode / 8  # Each reads all weights.
  split = dataclasses.replace(_WORK, mesh=(1, 8, 1))
  assert roofline.seconds(split, _DEVICE, _ALL).score > shared.score


def test_an_efficiency_is_a_fraction():
  with pytest.raises(ValueError, match='compute efficiency is 1.5; expected'):
    roofline.Efficiency(1.5)
