"""What is proposed fits, costs least first, and is only proposed if needed."""

from __future__ import annotations

import dataclasses
import itertools

from hgpo_jax.models import configs
from hgpo_jax.models import lora
from hgpo_jax.planning import advice
from hgpo_jax.planning import devices
from hgpo_jax.planning import report
from hgpo_jax.planning import roofline
from hgpo_jax.planning import search
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


def test_moments_go_to_the_host_before_the_training_changes():
  work = dataclasses.replace(_WORK, mesh=(1, 1, 1), sampler_rows=1)
  knob, limit = "AdamW.moments_on = 'host'", 40e9
  found = advice.turns(work, limit, 'gpu')
  assert found[0].knob == knob and found[0].peak < advice.peak(work, 'gpu')
  assert advice.rows(found[0].work, limit, 'gpu') > advice.rows(
      work, limit, 'gpu'
  )
  # Where both memories are one it is of no use.
  assert knob not in [turn.knob for turn in advice.turns(work, limit, 'cpu')]


def test_sampling_has_knobs_of_its_own():
  work = workload.Workload(
      configs.CONFIGS['7b'], (1, 8, 1), rollout_mesh=(8, 1, 1), reference=False
  )
  knobs = [turn.knob for turn in advice.turns(work, 28e9, 'gpu')]
  assert knobs[0].startswith('Experiment.rollout_mesh with RolloutMesh.data, ')
  three = dataclasses.replace(work, model=configs.CONFIGS['3b'])
  found = advice._paid(dataclasses.replace(three, rollout_mesh=(4, 1, 2)))
  assert 'PolicySource.int8_rollout = True' in dict(found)


def test_the_fastest_mesh_fits_and_is_found():
  slice_ = devices.Slice.parse('v5e-16')
  work = workload.Workload(configs.CONFIGS['7b'], (1, 16, 1), reference=False)
  best = search.fastest(work, slice_)
  limit = advice.USABLE * slice_.device.memory_bytes
  assert advice.peak(best, 'tpu') <= limit < advice.peak(work, 'tpu')
  rate = lambda work: roofline.seconds(work, slice_.device).tokens_per_second
  shapes = [(1, 16, 1), (1, 8, 2), (2, 4, 2), (1, 4, 4)]
  for mesh, sampled_on in itertools.product(shapes, [(8, 1, 2), (4, 1, 4)]):
    other = dataclasses.replace(work, mesh=mesh, rollout_mesh=sampled_on)
    fits = advice.peak(other, 'tpu') <= limit
    assert not fits or rate(other) <= rate(best)
  assert search.fastest(work, devices.Slice.parse('v5e-1')) is None


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
  assert 'mesh      data=1 fsdp=8 tensor=1, sampling on data=8 fsdp=1' in text
  assert 'sampling  25,600 steps of 128 rows, kernels in bfloat16' in text
  assert '1.54 G parameters, all trained, computed in bfloat16' in text
  assert '8 x h100, each 80 GB, 989 TFLOP/s, 3350 GB/s' in text
  assert "of 80 GB in 'rollout': fits" in text
