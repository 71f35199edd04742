"""The walk: what the first iterations do, seeds, devices."""

from __future__ import annotations

import numpy as np
import pytest

from hgpo_jax.experiment import run_folder
from hgpo_jax.io import trajectories
from tests.experiment import runs

TWO = 'Experiment.iterations = 2'


def test_first_iteration_learns_from_its_own_policy(finished):
  first, second, last = runs.lines(finished)
  assert [line['iteration'] for line in (first, second, last)] == [0, 1, 2]
  # One update on data of the same policy: ratios are 1, nothing is clipped
  # and the loss is about 0, while its gradient is not.
  assert first['update/count'] >= 1
  np.testing.assert_allclose(first['policy/ratio'], 1.0, atol=2e-2)
  assert first['logprob_gap/max'] < 1e-4
  assert first['update/grad_norm'] > 1e-4
  assert first['update/skipped'] == 0.0
  assert first['update/frac_params_changed'] > 0.5
  assert first['policy/ref_kl'] < second['policy/ref_kl']
  # The policy succeeds by chance, so there is something to compare.
  assert 0.2 < first['rollout/success_rate'] < 1.0
  assert first['rollout/invalid'] == first['rollout/invalid_cut'] == 0.0
  assert first['advantage/no_signal_share'] < 1.0
  assert first['batch/trajectories'] == 16.0
  assert first['batch/steps'] == first['rollout/steps']
  assert first['batch/trained_steps'] == first['batch/steps']
  assert 'eval/success_rate' in first and 'eval/success_rate' in last
  assert 'eval/success_rate' not in second


def test_one_update_on_everything_has_ratio_one_and_loss_zero(
    policy, one_device, tmp_path
):
  runs.train(
      policy,
      tmp_path,
      'Experiment.iterations = 1',
      'Minibatches.minibatch_steps = 64',
      'PPOLoss.entropy_coef = 0.0',
  )
  line = runs.lines(tmp_path)[0]
  assert line['update/count'] == 1.0
  np.testing.assert_allclose(line['policy/ratio'], 1.0, atol=1e-5)
  assert line['policy/clip_frac'] == line['policy/clip_frac_lower'] == 0.0
  # Minus the mean advantage over tokens, which is small, not exactly 0.
  assert abs(line['loss/total']) < 0.1
  assert abs(line['policy/ref_kl']) < 1e-6
  assert line['update/grad_norm'] > 1e-3


def test_an_iteration_without_signal_makes_no_update(
    policy, one_device, tmp_path
):
  runs.train(
      policy,
      tmp_path,
      'Experiment.iterations = 1',
      "Minibatches.no_signal = 'drop'",
      "Boxes.kinds = ('put',)",  # Four steps, of which three are allowed.
  )
  line = runs.lines(tmp_path)[0]
  assert line['batch/steps'] > 0 and line['advantage/no_signal_share'] == 1.0
  assert line['batch/trained_steps'] == line['update/count'] == 0.0
  assert 'update/grad_norm' not in line


def test_a_seed_fixes_every_number_and_token(
    policy, finished, one_device, tmp_path
):
  runs.train(policy, tmp_path, TWO)
  assert runs.lines(tmp_path) == runs.lines(finished)
  for folder in ('rollouts', 'eval'):
    assert runs.files(tmp_path, folder) == runs.files(finished, folder)


def test_another_seed_changes_task_order_and_samples(
    policy, finished, one_device, tmp_path
):
  runs.train(
      policy, tmp_path, 'Experiment.iterations = 1', 'Experiment.seed = 1'
  )
  name = trajectories.file_name(0)
  ours, theirs = (
      trajectories.load(folder / 'rollouts' / name)
      for folder in (tmp_path, finished)
  )
  assert [t.task for t in ours] != [t.task for t in theirs]
  # The same first prompt of the same task is answered otherwise.
  answers = [
      {
          t.task.index: tuple(
              tuple(other.steps[0].response_ids)
              for other in found
              if other.task == t.task
          )
          for t in found
      }
      for found in (ours, theirs)
  ]
  shared = answers[0].keys() & answers[1].keys()
  assert shared and any(answers[0][i] != answers[1][i] for i in shared)


def test_eight_devices_do_what_one_does(policy, finished, tmp_path):
  runs.train(
      policy,
      tmp_path,
      'Experiment.iterations = 1',
      'Mesh.data = 2',
      'Mesh.fsdp = 2',
      'Mesh.tensor = 2',
      'Sampler.prompt_buckets = (128,)',  # One program to compile.
      # Rows of one pass: 2 on each of 4 shares, 8 on one device.
      'Minibatches.micro_batch_steps = 2',
  )
  name = trajectories.file_name(0)
  ours, theirs = (
      trajectories.load(folder / 'rollouts' / name)
      for folder in (tmp_path, finished)
  )
  assert [[s.action for s in t.steps] for t in ours] == [
      [s.action for s in t.steps] for t in theirs
  ]
  eight, one = runs.lines(tmp_path)[0], runs.lines(finished)[0]
  assert eight.keys() == one.keys()
  for metric, value in one.items():
    assert eight[metric] == pytest.approx(value, abs=1e-4, rel=1e-4), metric


def test_the_table_has_the_first_and_the_last_evaluation(finished):
  table = run_folder.summary(finished)
  assert '| games | before training | after 2 |' in table
  assert '| open | 4 |' in table
