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
    attention='xla',
)


def test_one_device_by_hand():
  seconds = roofline.seconds(_WORK, _DEVICE, _ALL)
  layers = 28 * (2 * 1536**2 + 2 * 1536 * 256 + 3 * 1536 * 8960)
  attention = 4 * 28 * 12 * 128
  head = 2 * 1536 * 151_936
  tokens, seen = 32 * 1024, 1024 * 5 / 8  # Four blocks of queries a row.
  scores = 4 * 4 * 28 * 12 * 32 * 1024
  once = tokens * (2 * layers + attention * seen) + 32 * 128 * head
  # Norms and biases are in the exact count only.
  close = lambda x: pytest.approx(x, rel=1e-3)
  assert seconds.score == close(once / 1e14 + scores * seen / 1e12)
  # A token is bound by reading 3.1 GB of weights and the cache of 32 rows, and
  # draws from logits.
  cache, logits = 32 * 1024 * 28 * 1024, 6 * 32 * 151_936 * 4
  moved = 2 * 1.5437e9 + cache + logits
  assert seconds.decode == close(128 * moved / 1e12)
  assert (seconds.decode_steps, seconds.prefill_calls) == (128, 56)
  assert seconds.tokens == 32 * 1024
  passes = tokens * 4 * (2 * layers + attention * seen) + 32 * 128 * 4 * head
  step = 32 * 1.5437e9 / 1e12
  assert seconds.update == close(
      passes / 1e14 + 4 * scores * seen / 1e12 + step
  )
  # Read in float32, written in bfloat16.
  assert seconds.sync == close(6 * 1.5437e9 / 1e12)
  sampled = seconds.sync + seconds.prefill + seconds.decode
  assert seconds.total == pytest.approx(
      sampled + seconds.score + seconds.update
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


def test_sampling_on_eight_devices_by_hand():
  """The numbers of v5e-8 for 0.5B, 1.5B and 7B; 50 steps, 2048 + 512 tokens."""
  device = devices.DEVICES['v5e']
  read, link = 0.6 * 819e9, 0.6 * 200e9
  for name, tensor, billions, kib in (
      ('0.5b', 1, 0.494, 12),
      ('1.5b', 2, 1.544, 28),
      ('7b', 4, 7.616 - 0.545, 56),  # Its embedding is not its head.
  ):
    work = workload.Workload(
        *(configs.CONFIGS[name], (1, 8 // tensor, tensor)),
        prefill_tokens=8192,
        prefill_block=128,
    )
    seconds, m = roofline.seconds(work, device), work.model
    assert seconds.decode_steps == 50 * 512  # All 128 episodes at once.
    shares = 8 // tensor
    rows = 128 / shares
    cache = 128 * 2560 * kib * 1024 / 8
    logits = rows * m.vocab_size * 4
    moved = 2 * billions * 1e9 / tensor + cache + 6 * logits
    sums = 2 * m.num_layers * (6e-6 + rows * m.hidden_size * 4 / link)
    sums -= 2 * m.num_layers * rows * m.hidden_size * 4 / link / tensor
    whole = logits * (1 - 1 / tensor) / link
    a_step = moved / read + (sums if tensor > 1 else 0) + whole
    assert seconds.decode == pytest.approx(25_600 * a_step, rel=2e-3)
    assert seconds.prefill_calls == 50 * 128 * 16 / 64


def test_each_share_reads_the_prompts_of_its_own_rows():
  work = dataclasses.replace(_WORK, mesh=(8, 1, 1), prefill_tokens=256)
  alone = dataclasses.replace(_WORK, prefill_tokens=32)
  one = roofline.seconds(alone, _DEVICE, _ALL).prefill
  every = roofline.seconds(work, _DEVICE, _ALL).prefill
  assert every == pytest.approx(one / 8)
  # One block a call, and half of the entries or all: weights, then rows that
  # are read, copied and read, then scores.
  seen = 1024 - 512 * 512 / 896
  moved = 2 * (1.5437e9 - 1536 * 151_936)
  moved += 3 * seen * 28 * 1024 + 4 * 4 * 32 * 28 * 12 * seen
  assert one == pytest.approx(32 * 28 * moved / 1e12, rel=1e-3)
  # Blocks that the shares do not divide are rounded up.
  calls = [
      roofline.prefill_calls(dataclasses.replace(work, prefill_tokens=n))
      for n in (256, 384, 512)
  ]
  assert calls == [112, 56, 56]


def test_int8_halves_what_a_step_reads():
  int8 = dataclasses.replace(_WORK, int8_rollout=True)
  times = [roofline.seconds(w, _DEVICE, _ALL).decode for w in (_WORK, int8)]
  assert times[0] - times[1] == pytest.approx(128 * 1.3091e9 / 1e12, rel=2e-3)


def test_flash_kernels_have_no_scores_in_memory():
  flash = dataclasses.replace(_WORK, attention='auto')
  less, more = (
      roofline.seconds(work, _DEVICE, _ALL) for work in (flash, _WORK)
  )
  assert less.score < more.score and less.update < more.update
  assert (less.prefill, less.decode) == (more.prefill, more.decode)


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
