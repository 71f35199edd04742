"""What every environment must keep to; `hgpo_jax/envs/base.py` as tests.

For an environment of your own:

  class TestMine(conformance.EnvConformance):
    splits = ('train', 'valid')

    @pytest.fixture
    def spec(self):
      return MyEnv(...)

`check_env` runs the same checks outside pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
import gc
import math
import pickle
import random

import pytest

from hgpo_jax import types
from hgpo_jax.envs import base
from hgpo_jax.envs import pool
from hgpo_jax.envs import worker

GARBAGE = ('', 'xyzzy', 'go to the moon 9\n\u00e9\u4e2d\x00', 'look ' * 500)
_WALK_STEPS = 5

Check = Callable[[base.EnvSpec, tuple[str, ...]], None]


def check_env(spec: base.EnvSpec, splits: tuple[str, ...]) -> None:
  """Runs every check; raises AssertionError at the first that fails."""
  for check in CHECKS:
    check(spec, splits)


def check_spec(spec: base.EnvSpec, splits: tuple[str, ...]) -> None:
  """Frozen, comparable, and the same after it crossed to a worker."""
  assert dataclasses.is_dataclass(spec)
  with pytest.raises(dataclasses.FrozenInstanceError):
    spec.max_steps = 1
  assert spec.max_steps >= 1
  spec.check()
  copy = pickle.loads(pickle.dumps(spec))
  assert copy == spec and hash(copy) == hash(spec)
  for name in splits:
    assert copy.split(name)[0] == spec.split(name)[0]


def check_splits(spec: base.EnvSpec, splits: tuple[str, ...]) -> None:
  """Finite, ordered, each task once, none in two splits, clear errors."""
  seen: dict[str, str] = {}
  for name in splits:
    split = spec.split(name)
    assert split.name == name and len(split) > 0
    for index in range(len(split)):
      task = split[index]
      assert (task.split, task.index) == (name, index)
      assert task.task_id not in seen, f'{task} is in {seen[task.task_id]} too'
      seen[task.task_id] = f'{name}[{index}]'
      assert task.kind and isinstance(task.kind, str)
    assert split[0] == spec.split(name)[0]
    for outside in (len(split), -1):
      with pytest.raises(IndexError, match=name) as error:
        split[outside]  # pylint: disable=pointless-statement
      assert str(outside) in str(error.value)
  with pytest.raises(KeyError, match='no_such_split') as error:
    spec.split('no_such_split')
  assert all(name in str(error.value) for name in splits)


def check_deterministic(spec: base.EnvSpec, splits: tuple[str, ...]) -> None:
  """Task and actions fix every result, whatever was played before."""
  with _live(spec) as env, _live(spec) as other:
    tasks = _tasks(spec, splits)
    first = [_walk(env, task) for task in tasks]
    for task, results in reversed(list(zip(tasks, first))):
      assert _walk(env, task) == results, f'{task} depends on earlier episodes'
      env.reset(task)  # An episode broken off leaves nothing behind.
      assert _walk(other, task) == results, f'{task} depends on the env object'


def check_worker(spec: base.EnvSpec, splits: tuple[str, ...]) -> None:
  """Another process, with other hashes and another past, plays the same."""
  task = _tasks(spec, splits)[0]
  with _live(spec) as env:
    expected = _walk(env, task)
  with pool.EnvPool(spec, num_slots=1, num_workers=1) as envs:
    assert envs.reset({0: task}) == {0: expected[0]}
    for action, result in zip(_actions(task, expected), expected[1:]):
      assert envs.step({0: action}) == {0: result}


def check_results(spec: base.EnvSpec, splits: tuple[str, ...]) -> None:
  """Types, finite numbers, one way to end, success only then."""
  with _live(spec) as env:
    for task in _tasks(spec, splits):
      results = _walk(env, task)
      assert results[0].reward == 0.0 and not results[0].done
      assert results[0].instruction.strip(), f'{task} has no instruction'
      for result in results:
        worker.check_result(result)
        assert result.observation and result.state_key
        assert math.isfinite(result.reward) and 0.0 <= result.score <= 1.0
        assert result.done or result.admissible, f'{task}: nothing to do'
        assert len(set(result.admissible)) == len(result.admissible)
      assert not any(result.instruction for result in results[1:])


def check_limit(spec: base.EnvSpec, splits: tuple[str, ...]) -> None:
  """Garbage is a step like any other, and `max_steps` of it are the end."""
  spec = dataclasses.replace(spec, max_steps=6)
  with _live(spec) as env:
    task = _tasks(spec, splits)[0]
    env.reset(task)
    for step in range(1, spec.max_steps + 1):
      result = env.step(GARBAGE[step % len(GARBAGE)])
      worker.check_result(result)
      assert result.done == (step == spec.max_steps), f'step {step}: {result}'
    assert result.truncated and not result.terminated
    assert result.success is False
    with pytest.raises(Exception, match='reset'):
      env.step(GARBAGE[1])
    assert not env.reset(task).done


def check_before_reset(spec: base.EnvSpec, splits: tuple[str, ...]) -> None:
  """A step without an episode says what to do."""
  del splits
  with _live(spec) as env:
    with pytest.raises(Exception, match='reset'):
      env.step('look')


def check_close(spec: base.EnvSpec, splits: tuple[str, ...]) -> None:
  """Closing is safe twice, at any time, and keeps no env object alive."""
  task = _tasks(spec, splits)[0]
  env = spec.make()
  kind = type(env)
  del env
  base_count = _count(kind)
  for used in (False, True, True):
    env = spec.make()
    if used:
      env.step(env.reset(task).admissible[0])
    env.close()
    env.close()
    del env
  assert _count(kind) == base_count


CHECKS: tuple[Check, ...] = (
    check_spec,
    check_splits,
    check_deterministic,
    check_worker,
    check_results,
    check_limit,
    check_before_reset,
    check_close,
)


class EnvConformance:
  """Mixin: every check as a test of the fixture `spec`.

  Attributes:
    splits: names of all splits of the spec.
  """

  splits: tuple[str, ...] = ()

  @pytest.fixture
  def spec(self) -> base.EnvSpec:
    raise NotImplementedError('override the fixture `spec`')

  @pytest.mark.parametrize('check', CHECKS, ids=lambda c: c.__name__)
  def test_conformance(self, check: Check, spec: base.EnvSpec) -> None:
    check(spec, self.splits)

  def test_solution(self, spec: base.EnvSpec) -> None:
    """The known solution of a task ends it, once, as a success."""
    task = spec.split(self.splits[0])[0]
    actions = self.solution(spec, task)
    if actions is None:
      pytest.skip('this environment knows no solutions')
    with _live(spec) as env:
      results = [env.reset(task), *(env.step(action) for action in actions)]
    for before, action in zip(results, actions):
      assert action in before.admissible and before.success is None
    assert results[-1].terminated and results[-1].success is True
    assert results[-1].score == 1.0 and results[-1].reward > 0.0

  def solution(self, spec: base.EnvSpec, task: types.Task) -> list[str] | None:
    """Actions that solve `task`; None where they are not known."""
    del spec, task
    return None


class _live:  # pylint: disable=invalid-name
  """A live env that is closed at the end."""

  def __init__(self, spec: base.EnvSpec):
    self._env = spec.make()

  def __enter__(self) -> base.Env:
    return self._env

  def __exit__(self, *unused_error: object) -> None:
    self._env.close()


def _tasks(spec: base.EnvSpec, splits: tuple[str, ...]) -> list[types.Task]:
  """The first task of each split and the second of the first."""
  tasks = [spec.split(name)[0] for name in splits]
  if len(spec.split(splits[0])) > 1:
    tasks.append(spec.split(splits[0])[1])
  return tasks


def _choices(task: types.Task) -> Iterator[float]:
  chance = random.Random(task.task_id)
  while True:
    yield chance.random()


def _choose(result: types.StepResult, choice: float) -> str:
  """An admissible command, or garbage one time in five."""
  if choice < 0.2 or not result.admissible:
    return GARBAGE[1]
  return result.admissible[int((choice - 0.2) / 0.8 * len(result.admissible))]


def _walk(env: base.Env, task: types.Task) -> list[types.StepResult]:
  """Results of a few steps that depend on nothing but the task."""
  results = [env.reset(task)]
  for choice, _ in zip(_choices(task), range(_WALK_STEPS)):
    if results[-1].done:
      break
    results.append(env.step(_choose(results[-1], choice)))
  return results


def _actions(task: types.Task, results: list[types.StepResult]) -> list[str]:
  """The actions that `_walk` took between `results`."""
  return [_choose(r, c) for r, c in zip(results[:-1], _choices(task))]


def _count(kind: type) -> int:
  gc.collect()
  return sum(type(thing) is kind for thing in gc.get_objects())
