"""Environments that fail inside a training run: it goes on without them."""

from __future__ import annotations

import collections
import pathlib
import threading

import numpy as np
import pytest

from hgpo_jax import config
from hgpo_jax import types
from hgpo_jax.envs import alfworld
from hgpo_jax.envs import household
from hgpo_jax.envs import household_pddl
from hgpo_jax.envs import pool as pool_lib
from hgpo_jax.experiment import loop
from hgpo_jax.io import metrics
from hgpo_jax.io import trajectories
from tests.experiment import runs
from tests.experiment import tiny_policy

ONE = 'Experiment.iterations = 1'
# Task index, what happens in it; 0, 6 and 7 are sound.
FAULTS = (
    (1, 'raise_in_step'),
    (2, 'hang_in_reset'),
    (3, 'stop_in_step'),
    (4, 'exit_in_step'),
    (5, 'raise_in_reset'),
)


def _ends(found) -> dict[int, set[str]]:
  ends = collections.defaultdict(set)
  for trajectory in found:
    ends[trajectory.task.index].add(trajectory.end_reason)
  return ends


def test_raising_hanging_stopped_and_dying_environments(
    policy, one_device, tmp_path
):
  runs.train(
      policy,
      tmp_path,
      ONE,
      f'Boxes.faults = {FAULTS}',
      # At the second step, so that a first one is there to be left out, and
      # in tasks that the policy never solves.
      'Boxes.fault_step = 2',
      "Boxes.kinds = ('put',)",
      'Experiment.tasks_per_iteration = 8',
      'Experiment.group_size = 2',
      'Evaluation.games = 1',
      'Workers.reset_timeout_s = 3.0',
      'Workers.step_timeout_s = 3.0',
  )
  found = trajectories.load(tmp_path / 'rollouts' / trajectories.file_name(0))
  broken = {
      1: types.ENV_ERROR,
      2: types.TIMEOUT,
      3: types.TIMEOUT,
      4: types.ENV_ERROR,
      5: types.ENV_ERROR,
  }
  assert _ends(found) == {i: {broken.get(i, types.MAX_STEPS)} for i in range(8)}
  errors = {t.task.index: t.error for t in found if t.aborted}
  assert 'the box bites' in errors[1] and '[step 2 of task' in errors[1]
  assert 'no answer within reset_timeout_s=3' in errors[2]
  assert 'no answer within step_timeout_s=3' in errors[3]
  assert 'worker died with exit code 3' in errors[4]
  assert '[reset of task' in errors[5]

  line = runs.lines(tmp_path)[0]
  assert line['rollout/end_env_error'] == 6 / 16
  assert line['rollout/end_timeout'] == 4 / 16
  assert line['batch/aborted_trajectories'] == 10.0
  assert line['batch/trajectories'] == 6.0
  # Three tasks broke off in their second step: the first is not trained on.
  assert line['batch/aborted_steps'] == 6.0
  assert line['batch/steps'] == 6 * 3
  assert line['pool/env_errors'] == 6.0
  assert line['pool/timeouts'] == 4.0
  # Each hanging or stopped episode cost a worker, each dying one two, since
  # it had a second try.
  assert line['pool/restarts'] == 4.0 + 2 * 2
  assert line['update/skipped'] == 0.0
  assert all(v is not None and np.isfinite(v) for v in line.values())


@pytest.mark.parametrize('what', ['die_once', 'garbage'])
def test_a_worker_that_ends_once_changes_no_number(
    policy, one_device, tmp_path, what
):
  """The episodes that lived in it are played again in a new one."""
  bindings = (
      ONE,
      f"Boxes.faults = ((4, '{what}_in_step'), (5, '{what}_in_step'))",
      f'Boxes.marker = {str(tmp_path / "marker")!r}',
      'Experiment.tasks_per_iteration = 8',
      'Experiment.group_size = 2',
  )
  runs.train(policy, tmp_path / 'died', *bindings)
  runs.train(policy, tmp_path / 'not', *bindings)  # The marker is there.
  died, sound = (runs.lines(tmp_path / name)[0] for name in ('died', 'not'))
  # Both workers may find no marker before one of them leaves it.
  assert died['pool/restarts'] in (1.0, 2.0) and died['pool/replays'] >= 1.0
  assert sound['pool/restarts'] == 0.0
  for name, value in sound.items():
    if not name.startswith('pool/'):
      assert died[name] == value, name


def test_nothing_left_to_train_on(policy, one_device, tmp_path):
  faults = tuple((i, 'raise_in_reset') for i in range(8))
  arguments = runs.arguments(policy, tmp_path, ONE, f'Boxes.faults = {faults}')
  found = runs.main(*arguments)
  assert found.startswith(
      'error: none of the 16 episodes of the iteration has a step to train'
      ' on; the environments said: ["ValueError: the box bites'
  )
  assert found.endswith(
      'Correct the environment and run the same command again'
  )
  assert '\n' not in found


def test_environments_that_cannot_be_made(policy, one_device, tmp_path):
  found = runs.main(
      *runs.arguments(policy, tmp_path, "Boxes.make_error = 'no boxes today'")
  )
  assert found.startswith('error: worker ')
  assert 'could not make 8 envs of Boxes: ' in found
  assert 'no boxes today' in found and '\n' not in found


def _official(folder: pathlib.Path, train: int) -> pathlib.Path:
  """A folder in the official layout, with `train` training games."""
  root = folder / 'json_2.1.1'
  for split in alfworld.OFFICIAL_COUNTS:
    count = train if split == 'train' else 1
    for i, kind in enumerate(household.KINDS[:count]):
      game = household.generate(i, kind, tiny_policy.LAYOUT)
      household_pddl.save(
          game, root / split / f'{kind}-X-None-Y-1' / f'trial_{i}'
      )
  return root


def _train_official(
    policy: pathlib.Path, root: pathlib.Path, run_dir: pathlib.Path, cache: str
) -> dict[str, float]:
  """Trains on the games of `root`; returns the first line of metrics."""
  bindings = [
      f'PolicySource.folder = {str(policy)!r}',
      f'OfficialGames.folder = {str(root)!r}',
      f'AlfworldEnv.cache = {cache!r}',
  ]
  gin = pathlib.Path(__file__).with_name('official.gin')
  loop.train(config.load([str(gin)], bindings), run_dir)
  return metrics.read(run_dir)[0]


def test_a_full_cache_or_one_of_two_runs_changes_no_number(
    policy, one_device, tmp_path
):
  root = _official(tmp_path, train=4)
  (tmp_path / 'full').write_text('')  # Nothing can be kept in a file.
  shared = str(tmp_path / 'shared')
  games = alfworld.OfficialGames(folder=str(root), any_count=True)
  split = games.split('train')
  other = alfworld.AlfworldEnv(games=games, cache=shared)
  seen = {}
  with pool_lib.EnvPool(other, num_slots=4, num_workers=2) as rival:
    tasks = {index: split[index] for index in range(4)}
    loading = threading.Thread(target=rival.reset, args=(tasks,))
    for name, cache in (
        ('none', 'none'),
        ('full', str(tmp_path / 'full')),
        ('shared', shared),
    ):
      if name == 'shared':
        loading.start()  # At the same time, as another run would.
      run_dir = tmp_path / f'run_{name}'
      seen[name] = _train_official(policy, root, run_dir, cache)
    loading.join()
    others = rival.metrics
  events = {
      name: sum(v for k, v in line.items() if k.startswith('env/game_cache'))
      for name, line in seen.items()
  }
  assert events['none'] == 0.0
  assert events['full'] == seen['full']['env/game_cache_errors'] >= 4.0
  line = seen['shared']
  assert 'env/game_cache_errors' not in line | others
  assert 'env/game_cache_corrupt' not in line | others
  made = [f.get('env/game_cache_misses', 0.0) for f in (line, others)]
  kept = [p for p in (tmp_path / 'shared').rglob('*') if p.is_file()]
  # Two that miss at the same time both make a game; what they keep is one.
  assert sum(made) >= len(kept) >= 4
  lines = [runs.lines(tmp_path / f'run_{name}') for name in seen]
  assert lines[0] == lines[1] == lines[2]


def test_a_game_file_that_is_not_a_game(policy, one_device, tmp_path):
  """The real engine, the official layout, one broken file among four."""
  root = _official(tmp_path, train=4)
  broken = sorted((root / 'train').glob('*/*/game.tw-pddl'))[2]
  broken.write_text('{"pddl_domain": ')
  run_dir = tmp_path / 'run'
  line = _train_official(policy, root, run_dir, 'none')
  found = trajectories.load(run_dir / 'rollouts' / trajectories.file_name(0))
  name = broken.relative_to(root).as_posix()
  assert {t.task.task_id for t in found if t.aborted} == {name}
  for trajectory in found:
    if trajectory.aborted:
      assert trajectory.end_reason == types.ENV_ERROR
      assert not trajectory.steps and str(broken) in trajectory.error
    else:
      assert len(trajectory.steps) == 2
  assert line['rollout/end_env_error'] == 2 / 8
  assert line['batch/aborted_trajectories'] == 2.0
  assert line['batch/trajectories'] == 6.0 and line['batch/steps'] == 12.0
  assert line['pool/env_errors'] == 2.0
