"""Rollouts one iteration ahead: who plays what, errors, resuming, learning."""

from __future__ import annotations

from concurrent import futures
import signal
import threading

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax.envs import pool as pool_lib
from hgpo_jax.experiment import ahead
from hgpo_jax.experiment import learn
from hgpo_jax.experiment import resample
from hgpo_jax.experiment import runtime
from hgpo_jax.experiment import saved_policy
from hgpo_jax.experiment import schedule
from hgpo_jax.io import metrics
from hgpo_jax.io import trajectories
from tests.experiment import runs

AHEAD = ('Experiment.rollout_lag = 1',)
SAMPLER = (*AHEAD, "OldLogprobs.source = 'sampler'")
TRAINER = (*AHEAD, "OldLogprobs.source = 'trainer'")
DECOUPLED = (*TRAINER, 'PPOLoss.tis_clip = 2.0')


def _lags(run_dir) -> list[float]:
  """'rollout/lag' of each iteration; the last line is an evaluation's."""
  *lines, last = metrics.read(run_dir)
  assert 'rollout/lag' not in last
  return [line['rollout/lag'] for line in lines]


def _by_hand(spec, lags, folder) -> tuple[object, list[str]]:
  """Plays and learns by turns, with the policies that `lags` name.

  Returns the last policy, and the iterations whose episodes the newest policy
  would have played otherwise.
  """
  policies, otherwise = [], []
  with runtime.open_player(spec) as player:
    learner = runtime.make_learner(spec, player)
    state = learner.state

    def play(iteration, lag):
      return resample.play(
          spec,
          player.collector,
          policies[iteration - lag],
          schedule.tasks(spec, iteration),
          iteration,
      )

    for iteration, lag in enumerate(lags):
      policies.append(jax.tree.map(jnp.copy, learner.policy(state)))
      played, newest = play(iteration, lag), play(iteration, 0)
      name = trajectories.file_name(iteration)
      for where, found in ((folder, played), (folder / 'newest', newest)):
        trajectories.save(where / name, found.every, player.tokenizer.decode)
      if (folder / name).read_bytes() != (
          folder / 'newest' / name
      ).read_bytes():
        otherwise.append(iteration)
      state, _ = learn.learn(
          spec, player, learner, state, played.kept, iteration, lag
      )
    return jax.device_get(learner.policy(state)), otherwise


def test_a_thread_plays_what_the_schedule_by_hand_does(
    policy, one_device, tmp_path
):
  """With evaluations while episodes are under way, and with resampling."""
  bindings = (
      *DECOUPLED,
      'Experiment.iterations = 5',
      'Experiment.save_every = 3',
      'Experiment.resample_rounds = 1',
  )
  run_dir, folder = tmp_path / 'run', tmp_path / 'by_hand'
  (folder / 'newest').mkdir(parents=True)
  runs.train(policy, run_dir, *bindings)
  spec = runs.load(policy, *bindings)
  weights, otherwise = _by_hand(spec, (0, 1, 1, 0, 1), folder)
  assert _lags(run_dir) == [0, 1, 1, 0, 1]
  assert otherwise == [1, 2, 4]
  for name, data in runs.files(run_dir, 'rollouts').items():
    assert (folder / name).read_bytes() == data, name
  jax.tree.map(
      np.testing.assert_array_equal,
      saved_policy.newest_policy(spec, run_dir)[1],
      weights,
  )
  lines = runs.lines(run_dir)
  assert lines[0]['policy/tis_weight'] == pytest.approx(1.0, abs=1e-4)
  assert lines[0]['logprob_gap/max'] < 1e-4 < lines[1]['logprob_gap/mean']
  assert 'eval/success_rate' in lines[2] and 'eval/success_rate' in lines[4]


def test_a_run_broken_off_while_a_thread_plays_ends_like_one_left_alone(
    policy, one_device, monkeypatch, tmp_path
):
  whole, broken = tmp_path / 'whole', tmp_path / 'broken'
  # One task of iteration 1 is broken, and of no evaluation.
  bad = max(task.index for task in schedule.tasks(runs.load(policy), 1))
  bindings = (*SAMPLER, f"Boxes.faults = (({bad}, 'raise_in_step'),)")
  runs.train(policy, whole, *bindings)
  sound = learn.learn

  def fail(*args):
    if args[5] == 3:  # The last that is played ahead, by the policy of 2.
      raise OSError('the disk is gone')
    return sound(*args)

  with monkeypatch.context() as patch:
    patch.setattr(learn, 'learn', fail)
    found = runs.main(*runs.arguments(policy, broken, *bindings))
  assert found == 'error: the disk is gone' and _written(broken) == 3
  runs.train(policy, broken, *bindings)
  assert _lags(broken) == _lags(whole) == [0, 1, 0, 1]
  lines = runs.lines(whole)
  assert runs.lines(broken) == lines
  # Told where they are learned from, not where they were played.
  errors = [line['pool/env_errors'] for line in lines]
  assert bad >= 4 and errors[:2] == [0.0, 4.0] and sum(errors) == 8.0
  for kind in ('rollouts', 'eval'):
    assert runs.files(broken, kind) == runs.files(whole, kind)
  spec = runs.load(policy, *bindings)
  ours, theirs = (
      saved_policy.newest_policy(spec, folder)[1] for folder in (broken, whole)
  )
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_a_signal_ends_a_process_whose_thread_plays(
    policy, one_device, tmp_path
):
  tasks = schedule.tasks(runs.load(policy), 1)
  bindings = (
      *SAMPLER,
      f"Boxes.faults = (({tasks[0].index}, 'hang_in_reset'),)",
      'Workers.reset_timeout_s = 3600.0',
      'Evaluation.every = 0',
  )
  process = runs.Process(
      'train', runs.arguments(policy, tmp_path, *bindings), tmp_path / 'log'
  )
  process.wait_until(lambda: _written(tmp_path) == 1)
  assert process.stop(signal.SIGTERM) == 42, process.output
  assert 'Traceback' not in process.output


def _written(run_dir) -> int:
  try:
    return len(metrics.read(run_dir))
  except (OSError, ValueError):
    return 0


def test_an_error_of_the_learner_ends_the_thread_too(
    policy, one_device, monkeypatch, tmp_path
):
  """Which waits for an environment that will not answer for an hour."""
  tasks = schedule.tasks(runs.load(policy), 1)
  bindings = (
      *SAMPLER,
      f"Boxes.faults = (({tasks[0].index}, 'hang_in_reset'),)",
      'Workers.reset_timeout_s = 3600.0',
      'Evaluation.games = 1',
      'Experiment.save_every = 4',
  )
  pools, playing = [], threading.Event()
  poll = pool_lib.EnvPool.poll

  def seen(self, timeout_s=0.0):
    pools.append(self)
    if threading.current_thread() is not threading.main_thread():
      playing.set()
    return poll(self, timeout_s)

  def fail(*unused_args):
    assert playing.wait(60.0)
    raise OSError('the learner has had enough')

  monkeypatch.setattr(pool_lib.EnvPool, 'poll', seen)
  monkeypatch.setattr(learn, 'learn', fail)
  found = runs.main(*runs.arguments(policy, tmp_path, *bindings))
  assert found == 'error: the learner has had enough'
  assert not _threads()
  with pytest.raises(RuntimeError, match='the EnvPool is closed'):
    pools[0].poll()


@pytest.mark.parametrize('where', ['play', 'evaluation'])
def test_an_error_of_the_thread_ends_the_run_with_it(
    policy, one_device, monkeypatch, tmp_path, where
):
  """Noticed when its episodes are wanted, or the pool for an evaluation."""
  every = 1 if where == 'evaluation' else 0
  poll = pool_lib.EnvPool.poll

  def fail(self, timeout_s=0.0):
    if threading.current_thread() is not threading.main_thread():
      raise OSError('no environment left')
    return poll(self, timeout_s)

  monkeypatch.setattr(pool_lib.EnvPool, 'poll', fail)
  arguments = runs.arguments(
      policy, tmp_path, *SAMPLER, f'Evaluation.every = {every}'
  )
  assert runs.main(*arguments) == 'error: no environment left'
  assert not _threads()
  # What was learned while the thread failed is on record.
  assert [line['rollout/lag'] for line in metrics.read(tmp_path)] == [0.0]


def _threads() -> list[str]:
  return [t.name for t in threading.enumerate() if 'rollout' in t.name]


def test_a_policy_is_learned_from_older_episodes(policy, one_device, tmp_path):
  runs.train(
      policy,
      tmp_path,
      *SAMPLER,
      'Experiment.iterations = 28',
      'Experiment.save_every = 28',
      'Experiment.save_rollouts_every = 0',
      'Experiment.tasks_per_iteration = 1',
      'Experiment.group_size = 16',
      'Evaluation.every = 0',
      'AdamW.learning_rate = 1e-3',
      'Boxes.train_size = 1',
      'Boxes.fatal = True',
  )
  assert _lags(tmp_path) == [0.0] + 27 * [1.0]
  rates = [line['rollout/success_rate'] for line in runs.lines(tmp_path)[:-1]]
  # One box of three is right.
  assert np.mean(rates[:5]) < 0.5 and np.mean(rates[-5:]) > 0.75


class TestSchedule:
  """Functions of the spec and the iteration."""

  def load(self, policy, *bindings):
    return runs.load(policy, *SAMPLER, *bindings)

  def test_nothing_is_under_way_across_a_checkpoint(self, policy):
    spec = self.load(
        policy, 'Experiment.iterations = 8', 'Experiment.save_every = 3'
    )
    lags = [schedule.lag(spec, i) for i in range(9)]
    assert lags == [0, 1, 1, 0, 1, 1, 0, 1, 0]
    fresh = [i for i in range(1, 9) if schedule.save_due(spec, i)]
    assert fresh == [3, 6, 8]

  def test_without_the_knob_nothing_lags(self, policy):
    spec = runs.load(policy)
    assert not any(schedule.lag(spec, i) for i in range(5))

  def test_games_are_loaded_in_the_order_in_which_they_are_played(self, policy):
    # Evaluations before 0, 2 and at the end; 1 and 3 are played ahead.
    spec = self.load(policy)
    heldout = [spec.env.split('valid')[i] for i in range(4)]
    found = [schedule.upcoming(spec, i) for i in range(4)]
    play = lambda i: schedule.tasks(spec, i)
    # Behind the episodes of 1 comes the evaluation before 2.
    assert found == [play(1), play(2), play(3), heldout]
    assert schedule.upcoming(runs.load(policy), 1) == heldout
    third = self.load(policy, 'Experiment.save_every = 3')
    assert schedule.upcoming(third, 2) == heldout


@pytest.mark.parametrize(
    'bindings, text',
    [
        (
            ['Experiment.rollout_lag = 2'],
            'Experiment.rollout_lag is 2; expected 0, or 1 to play one iteration'
            ' ahead of the learner',
        ),
        (
            TRAINER,
            'Experiment.rollout_lag is 1, so an older policy plays, but with'
            " OldLogprobs.source = 'trainer' and PPOLoss.tis_clip = 0 nothing"
            ' corrects for it at all times; set OldLogprobs.source ='
            " 'sampler', or 'trainer' with PPOLoss.tis_clip = 2.0",
        ),
        (
            [*DECOUPLED, "OldLogprobs.source = 'auto'"],
            "OldLogprobs.source = 'auto' and PPOLoss.tis_clip = 2 nothing",
        ),
        (
            [*SAMPLER, 'Experiment.save_every = 1'],
            'Experiment.rollout_lag is 1, but Experiment.save_every is 1, and'
            ' behind a checkpoint the newest policy plays: set save_every to 2'
            ' or more, or rollout_lag to 0',
        ),
    ],
)
def test_what_does_not_correct_for_the_lag_is_refused(
    policy, one_device, bindings, text
):
  found = runs.main(*runs.arguments(policy, None, *bindings), '--dry_run')
  assert found.startswith('error: ') and text in found
  assert '\n' not in found


def test_the_arithmetic_tells_what_is_played_ahead(policy, one_device, capsys):
  for iterations, save_every in ((4, 2), (7, 3), (1, 2), (4, 100)):
    bindings = (
        *SAMPLER,
        f'Experiment.iterations = {iterations}',
        f'Experiment.save_every = {save_every}',
    )
    assert not runs.main(*runs.arguments(policy, None, *bindings), '--dry_run')
    spec = runs.load(policy, *bindings)
    lags = sum(schedule.lag(spec, i) for i in range(iterations))
    assert (
        f'ahead        {lags} of {iterations} iterations are played while the'
        ' one before is learned from, by the policy before that'
    ) in capsys.readouterr().out


def test_an_error_that_another_hides_is_told(policy, monkeypatch):
  told = []
  monkeypatch.setattr(logging, 'warning', lambda m, *a: told.append(m % a))
  spec = runs.load(policy, *SAMPLER)
  for error in (ahead.Stopped('the run ends'), OSError('the pool is gone')):
    with pytest.raises(KeyError, match='the first'):
      with ahead.Rollouts(spec, player=None, learner=None) as rollouts:
        rollouts._ahead = 3, futures.Future()
        rollouts._ahead[1].set_exception(error)
        raise KeyError('the first')
  assert told == ['the episodes of iteration 3: the pool is gone']


def test_episodes_of_another_iteration_are_not_taken(policy, monkeypatch):
  spec = runs.load(policy, *SAMPLER)
  with ahead.Rollouts(spec, player=None, learner=None) as rollouts:
    monkeypatch.setattr(rollouts, 'idle_collector', lambda: None)
    rollouts._ahead = 3, None
    with pytest.raises(RuntimeError, match='are of iteration 3; expected .* 2'):
      rollouts.take(2, state=None)
    rollouts._ahead = None
