"""Groups that ended alike are replaced: which, by what, how often."""

from __future__ import annotations

import types as std_types

import pytest

from hgpo_jax import types
from hgpo_jax.experiment import resample
from hgpo_jax.experiment import task_order
from hgpo_jax.io import trajectories as trajectories_io
from tests.envs import toy
from tests.experiment import runs

SPLIT = toy.ToySpec(train_size=12).split('train')


def _trajectory(task, group, trajectory, outcome, aborted=False):
  step = types.Step(
      group=group,
      trajectory=trajectory,
      step=0,
      prompt_ids=(),
      response_ids=(),
      sampler_logprobs=(),
      finish_reason=types.STOP,
      action='look',
      action_valid=True,
      action_admissible=True,
      observation='',
      state_key='',
      next_state_key='',
      reward=outcome,
  )
  end = types.TIMEOUT if aborted else types.SOLVED
  return types.Trajectory(
      task, group, trajectory, (step,), outcome > 0, 0.0, end
  )


class _Collector:
  """Two episodes a group: they differ for the tasks named, and else fail."""

  def __init__(self, differing):
    self.differing, self.calls = differing, []

  def collect(self, params, tasks, group_size, *, first_group, **where):
    self.calls.append(([t.index for t in tasks], first_group, where, params))
    return [
        _trajectory(
            task,
            first_group + i,
            (first_group + i) * group_size + member,
            10.0 * (task.index in self.differing and member == 0),
        )
        for i, task in enumerate(tasks)
        for member in range(group_size)
    ]


def _play(differing, rounds, wanted=3, seed=0):
  spec = std_types.SimpleNamespace(
      env=toy.ToySpec(train_size=12),
      split='train',
      seed=seed,
      temperature=1.0,
      tasks_per_iteration=wanted,
      group_size=2,
      resample_rounds=rounds,
  )
  collector = _Collector(set(differing))
  tasks = [SPLIT[i] for i in range(wanted)]
  return resample.play(spec, collector, 'params', tasks, 5), collector.calls


def _spare(seed=0, iteration=5):
  tasks = [SPLIT[i] for i in range(3)]
  return [t.index for t in task_order.spare(SPLIT, tasks, seed, iteration)]


def _groups(trajectories):
  return list(dict.fromkeys(t.group for t in trajectories))


def test_without_the_knob_one_round_is_played():
  played, calls = _play(differing=[], rounds=0)
  where = {'seed': 0, 'iteration': 5, 'temperature': 1.0}
  assert calls == [([0, 1, 2], 0, where, 'params')]
  assert played.kept == played.every and played.metrics == {}


def test_a_round_plays_as_many_further_tasks_as_groups_are_missing():
  first, second, third = _spare()[:3]
  played, calls = _play(differing=[1, second, third], rounds=5)
  assert [(tasks, group) for tasks, group, _, _ in calls] == [
      ([0, 1, 2], 0),
      ([first, second], 3),
      ([third], 5),
  ]
  assert _groups(played.every) == list(range(6))
  assert [t.task.index for t in played.kept[::2]] == [1, second, third]
  assert [t.trajectory for t in played.kept] == [2, 3, 8, 9, 10, 11]
  assert played.metrics == {
      'rollout/resample_rounds': 2.0,
      'rollout/resampled_groups': 3.0,
      'rollout/frac_alike_groups': 0.5,
  }


def test_nothing_is_played_again_when_all_groups_differ():
  played, calls = _play(differing=[0, 1, 2], rounds=5)
  assert len(calls) == 1 and played.kept == played.every
  assert played.metrics['rollout/resampled_groups'] == 0.0


def test_after_the_last_round_groups_that_ended_alike_make_up_the_number():
  second = _spare()[1]
  played, calls = _play(differing=[second], rounds=1)
  assert len(calls) == 2
  assert _groups(played.kept) == [0, 1, 4]
  assert len(played.every) == 2 * 6


def test_rounds_end_when_the_split_has_no_further_task():
  played, calls = _play(differing=[], rounds=50, wanted=5)
  assert [len(tasks) for tasks, *_ in calls] == [5, 5, 2]
  assert len({t.task.index for t in played.every}) == 12
  assert _groups(played.kept) == [0, 1, 2, 3, 4]


def test_broken_off_episodes_tell_nothing_apart():
  make = lambda *outcomes: [
      _trajectory(SPLIT[0], 0, i, outcome, aborted=outcome < 0)
      for i, outcome in enumerate(outcomes)
  ]
  assert resample.differs(make(0.0, 10.0, 0.0))
  assert not resample.differs(make(10.0, -1.0, 10.0))
  assert not resample.differs(make(-1.0, -1.0))
  # What float32 sums make of equal rewards.
  assert not resample.differs(make(0.3, 0.1 + 0.2))


def test_spare_tasks_are_a_pure_function_of_seed_and_iteration():
  assert _spare() == _spare()
  assert _spare() != _spare(seed=1) and _spare() != _spare(iteration=6)
  assert sorted(_spare()) == list(range(3, 12))


def test_a_run_that_resamples_resumes_where_it_stood(
    policy, one_device, tmp_path
):
  knob = 'Experiment.resample_rounds = 2'
  once, twice = tmp_path / 'once', tmp_path / 'twice'
  runs.train(policy, once, knob, 'Experiment.iterations = 2')
  for iterations in (1, 2):
    runs.train(policy, twice, knob, f'Experiment.iterations = {iterations}')
  first, second, _ = runs.lines(once)
  # The end of the first part evaluates, and its line is written over.
  assert runs.lines(twice)[1]['rollout/steps'] == second['rollout/steps']
  assert runs.files(twice, 'rollouts') == runs.files(once, 'rollouts')
  drawn = [line['rollout/resampled_groups'] for line in (first, second)]
  assert max(drawn) > 0.0
  found = trajectories_io.load(once / 'rollouts' / trajectories_io.file_name(0))
  assert len(found) == 4 * (4 + drawn[0]) == first['rollout/trajectories']
  assert len({t.trajectory for t in found}) == len(found)
  assert first['batch/trajectories'] == 16.0


@pytest.mark.parametrize(
    'binding, text',
    [
        (
            'Experiment.resample_rounds = -1',
            'Experiment.resample_rounds is -1; expected at least 0',
        ),
        (
            'Experiment.tasks_per_iteration = 8',
            'Experiment.resample_rounds is 1, but an iteration plays all 8'
            " tasks of the split 'train'; set it to 0, or"
            ' Experiment.tasks_per_iteration to fewer',
        ),
    ],
)
def test_values_without_effect_are_refused(policy, one_device, binding, text):
  given = [binding]
  if 'tasks' in binding:
    given.append('Experiment.resample_rounds = 1')
  found = runs.main(*runs.arguments(policy, None, *given), '--dry_run')
  assert found == f'error: {text}'


def test_the_arithmetic_tells_how_much_may_be_played(
    policy, one_device, capsys
):
  knob = 'Experiment.resample_rounds = 2'
  assert not runs.main(*runs.arguments(policy, None, knob), '--dry_run')
  assert (
      'resampling   at most 2 more rounds for groups that ended alike = at most'
      ' 48 episodes' in capsys.readouterr().out
  )
