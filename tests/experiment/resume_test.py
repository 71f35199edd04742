"""Runs that are killed, stopped, repeated, or started with other values."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from hgpo_jax import config
from hgpo_jax.experiment import run_folder
from hgpo_jax.experiment import runtime
from hgpo_jax.experiment import saved_policy
from hgpo_jax.experiment import task_order
from hgpo_jax.io import metrics
from hgpo_jax.models import hf
from tests.experiment import runs

TWO = 'Experiment.iterations = 2'
# Slow enough for a kill to fall into a rollout.
FAULTS = f'Boxes.faults = {tuple((i, "slow_in_step") for i in range(3))}'


def test_killed_and_stopped_run_ends_like_one_left_alone(
    policy, one_device, tmp_path
):
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  reference = runs.Process(
      'train', runs.arguments(policy, whole, FAULTS), tmp_path / 'whole.log'
  )
  command = runs.arguments(policy, broken, FAULTS)
  start = lambda name: runs.Process('train', command, tmp_path / name)

  # A preemption before the first checkpoint, in the second rollout.
  process = start('sigterm.log')
  process.wait_until(lambda: _last(broken) >= 0)
  assert process.stop(signal.SIGTERM) == 42, process.output
  assert (
      'stopped by SIGTERM; the same command goes on from its last'
      in process.output
  )
  assert 'Traceback' not in process.output

  # Killed while a checkpoint is being saved, or just after.
  process = start('save.log')
  process.wait_until(lambda: any((broken / 'checkpoints').glob('2*')))
  assert process.stop(signal.SIGKILL) == -signal.SIGKILL

  # Killed at a moment of chance after the last checkpoint.
  process = start('chance.log')
  process.wait_until(lambda: _last(broken) >= 2)
  time.sleep(random.uniform(0.0, 0.5))
  assert process.stop(signal.SIGKILL) == -signal.SIGKILL

  process = start('end.log')
  assert process.wait() == 0, process.output
  assert 'going on with iteration' in process.output
  assert reference.wait() == 0, reference.output
  assert runs.lines(broken) == runs.lines(whole)
  for folder in ('rollouts', 'eval'):
    assert runs.files(broken, folder) == runs.files(whole, folder)
  assert _table(process) == _table(reference)
  spec = runs.load(policy, FAULTS)
  ours, theirs = (
      saved_policy.newest_policy(spec, folder)[1] for folder in (broken, whole)
  )
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize('seconds', [1.0, 3.0, 6.0])
def test_ctrl_c_ends_it_at_any_moment_without_a_traceback(
    policy, one_device, tmp_path, seconds
):
  command = runs.arguments(policy, tmp_path / 'run', FAULTS)
  process = runs.Process('train', command, tmp_path / 'log')
  process.wait_until(lambda: 'seed 0' in process.output)
  time.sleep(seconds)
  assert process.stop(signal.SIGINT) == 130, process.output
  assert 'stopped by SIGINT; the same command goes on' in process.output
  assert 'Traceback' not in process.output


def _last(run_dir) -> int:
  """The last iteration that is whole in the metrics; -1 if none is."""
  try:
    return metrics.read(run_dir)[-1]['iteration']
  except (OSError, ValueError, IndexError):
    return -1


def _table(process) -> list[str]:
  return [x for x in process.output.splitlines() if x.startswith('|')]


def test_a_finished_run_prints_its_table_again(
    policy, finished, one_device, monkeypatch, capsys
):
  before = {p: p.stat().st_mtime_ns for p in finished.rglob('*')}
  monkeypatch.setattr(runtime, 'open_player', _must_not_start)
  assert runs.main(*runs.arguments(policy, finished, TWO)) == ''
  printed = capsys.readouterr().out
  assert run_folder.summary(finished) in printed and str(finished) in printed
  assert {p: p.stat().st_mtime_ns for p in finished.rglob('*')} == before


@pytest.mark.parametrize('line', ['[1]', '5', '{}', '{"iteration": 2', '\0'])
def test_a_run_with_damaged_metrics_is_not_finished(policy, tmp_path, line):
  (tmp_path / 'metrics.jsonl').write_text(f'{line}\n', encoding='utf-8')
  assert not run_folder.finished(runs.load(policy, TWO), tmp_path)


def test_a_finished_run_whose_evaluations_were_removed(tmp_path):
  assert 'holds no evaluation any more' in run_folder.summary(tmp_path)


def test_one_run_at_a_time_in_a_folder(
    policy, finished, one_device, monkeypatch, tmp_path
):
  def run_a_second(*unused):
    monkeypatch.setattr(runtime, 'open_player', _must_not_start)
    ours = {p: p.stat().st_mtime_ns for p in tmp_path.rglob('*')}
    found = runs.main(*runs.arguments(policy, tmp_path, TWO))
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob('*')} == ours
    raise config.ConfigError(found)

  monkeypatch.setattr(runtime, 'open_player', run_a_second)
  found = runs.main(*runs.arguments(policy, tmp_path, TWO))
  owner = f'process {os.getpid()} on {socket.gethostname()}'
  assert f'{owner} trains in --run_dir={tmp_path} at this moment' in found
  assert 'wait for its end, or give another --run_dir' in found
  assert not list(tmp_path.iterdir())  # And nothing of it is left.


def test_a_folder_is_free_however_its_run_ended(tmp_path):
  code = (
      'import os, pathlib, sys; from hgpo_jax.experiment import run_folder\n'
      'with run_folder.claimed(pathlib.Path(sys.argv[1])): os._exit(3)'
  )
  command = [sys.executable, '-c', code, str(tmp_path)]
  assert subprocess.run(command, check=False).returncode == 3
  assert (tmp_path / '.lock').exists()
  with run_folder.claimed(tmp_path):
    with pytest.raises(OSError, match='trains in'):
      with run_folder.claimed(tmp_path):
        pass
  with run_folder.claimed(tmp_path):
    pass


def test_weights_that_changed_meanwhile_are_refused(
    policy, one_device, tmp_path
):
  """The KL refers to the policy that the run began with."""
  folder, run_dir = tmp_path / 'policy', tmp_path / 'run'
  shutil.copytree(policy, folder)
  runs.train(folder, run_dir, 'Experiment.iterations = 1')
  shapes = hf.read_config(folder)
  params = hf.load_params(folder, shapes)
  params['final_norm']['scale'] += 1e-3
  shutil.rmtree(folder)
  hf.save_folder(folder, shapes, params, policy)
  found = runs.main(*runs.arguments(folder, run_dir, TWO))
  assert found.startswith('error: the weights in PolicySource.folder = ')
  assert 'are not those that the run began with' in found
  assert '\n' not in found


def test_other_values_are_refused_with_a_diff(
    policy, finished, one_device, monkeypatch
):
  monkeypatch.setattr(runtime, 'open_player', _must_not_start)
  found = runs.main(
      *runs.arguments(policy, finished, TWO, 'AdamW.learning_rate = 0.5')
  )
  assert f'{finished} holds a run of another configuration' in found
  assert 'optimizer.learning_rate: 0.003 in the run, 0.5 now' in found
  assert 'give another --run_dir' in found


def test_fewer_iterations_than_are_done_are_refused(
    policy, finished, one_device
):
  before = (finished / 'metrics.jsonl').read_bytes()
  found = runs.main(
      *runs.arguments(policy, finished, 'Experiment.iterations = 1')
  )
  assert found == (
      'error: Experiment.iterations is 1, but the run has a checkpoint after 2'
      ' iterations; give at least 2, or another --run_dir'
  )
  assert (finished / 'metrics.jsonl').read_bytes() == before


def _must_not_start(*unused):
  raise AssertionError('something was started')


class TestTaskOrder:
  """`task_order.choose`."""

  split = list(range(10))

  def choose(self, iteration, seed=0, count=3):
    return task_order.choose(self.split, count, seed, iteration)

  def test_is_a_pure_function_of_seed_and_iteration(self):
    late_first = [self.choose(i) for i in (7, 0, 3)]
    assert late_first == [self.choose(i) for i in (7, 0, 3)]
    assert self.choose(0, seed=1) != self.choose(0)

  @pytest.mark.parametrize('count', [1, 3, 5, 10])
  def test_does_not_repeat_a_task_within_a_pass(self, count):
    per_pass = len(self.split) // count
    passes = []
    for epoch in range(3):
      played = [
          task
          for i in range(epoch * per_pass, (epoch + 1) * per_pass)
          for task in self.choose(i, count=count)
      ]
      assert len(set(played)) == len(played) == per_pass * count
      passes.append(played)
    assert passes[0] != passes[1] != passes[2]
