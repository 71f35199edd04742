"""What is proposed fits, costs least first, and is only proposed if needed."""

from __future__ import annotations

import dataclasses

from hgpo_jax.models import configs
from hgpo_jax.models import lora
from hgpo_jax.planning import advice
from hgpo_jax.planning import devices
from hgpo_jax.planning import report
from hgpo_jax.planning import workload

_WORK = workload.Workload(configs.CONFIGS['1.5b'], (1, 8, 1))


def test_nothing_to_turn_where_it_fits():
  assert advice.turns(_WORK, 80e9, 'gpu') == ()
  assert report.knobs(_WORK, 80e9, 'gpu') == []


def test_rows_of_a_pass_are_what_fits():
  limit = 40e9
  most = advice.rows(_WORK, limit, 'gpu')
  assert most > 1
  for rows, fits in ((most, True), (2 * most, False)):
    work = dataclasses.replace(_WORK, rows=rows, sampler_rows=8)
    assert (advice.peak(work, 'gpu') <= advice.USABLE * limit) == fits
  assert advice.rows(_WORK, 1e9, 'gpu') == 0


def test_fewer_rows_come_first_and_then_fit():
  limit = 40e9
  work = dataclasses.replace(_WORK, rows=32)
  found = advice.turns(work, limit, 'gpu')
  assert found[-1].peak <= advice.USABLE * limit
  knobs = [turn.knob for turn in found]
  assert knobs[0].startswith('Minibatches.micro_batch_steps = ')
  assert not any('lora' in knob or 'kl_coef' in knob for knob in knobs)
  assert found[-1].work.model == work.model


def test_what_changes_the_training_comes_last():
  work = workload.Workload(configs.CONFIGS['7b'], (1, 16, 1))
  found = advice.turns(work, 12e9, 'tpu')
  assert found[-1].peak <= advice.USABLE * 12e9
  knobs = [turn.knob for turn in found]
  assert knobs[0] == 'Mesh.data, Mesh.fsdp, Mesh.tensor = 1, 4, 4'
  assert "include 'models/lora.gin'" in knobs[1:]


def test_not_to_play_ahead_frees_what_plays():
  work = workload.Workload(
      configs.CONFIGS['1.5b'],
      (1, 1, 1),
      lora=lora.LoRA(base_dtype='bfloat16'),
      moment_dtype='bfloat16',
      logits_tokens=128,
      sampler_rows=1,
      ahead=True,
  )
  limit = 1.05 * advice.peak(dataclasses.replace(work, ahead=False), 'gpu')
  found = advice.turns(work, limit / advice.USABLE, 'gpu')
  assert 'Experiment.rollout_lag = 0' in [turn.knob for turn in found]
  assert not found[-1].work.ahead and found[-1].peak <= limit


def test_it_says_so_where_nothing_helps():
  work = workload.Workload(configs.CONFIGS['14b'], (1, 1, 1))
  lines = report.knobs(work, 16e9, 'gpu')
  assert lines[-1].endswith('more or larger devices; nothing else is enough')


def test_the_report_is_one_short_table():
  text = report.text(_WORK, devices.Slice.parse('h100x8'))
  lines = text.splitlines()
  assert len(lines) < 45 and max(map(len, lines)) <= 100
  assert '1.54 G parameters, all trained, computed in bfloat16' in text
  assert '8 x h100, each 80 GB, 989 TFLOP/s, 3350 GB/s' in text
  assert "of 80 GB in 'rollout': fits" in text
