"""The toy conforms, and the conformance suite catches what does not."""

from __future__ import annotations

import dataclasses

import pytest

from hgpo_jax import types
from hgpo_jax.envs import base
from tests.envs import conformance
from tests.envs import toy

SPLITS = toy.SPLITS


class TestToy(conformance.EnvConformance):
  """The toy keeps the contract."""

  splits = SPLITS

  @pytest.fixture(params=['open', 'put'])
  def spec(self, request) -> base.EnvSpec:
    return toy.ToySpec(kinds=(request.param,), train_size=3, valid_size=2)

  def solution(self, spec, task):
    return toy.solution(spec, task)


def test_every_task_is_solved_by_its_solution():
  spec = toy.ToySpec()
  env = spec.make()
  for split in map(spec.split, SPLITS):
    for task in (split[index] for index in range(len(split))):
      env.reset(task)
      results = [env.step(action) for action in toy.solution(spec, task)]
      assert [r.reward for r in results] == [0.0] * (len(results) - 1) + [10.0]


def test_wrong_box_can_be_fatal():
  spec = toy.ToySpec(fatal=True)
  task, env = spec.split('train')[0], spec.make()
  right = toy.solution(spec, task)[0]
  wrong = next(c for c in env.reset(task).admissible if c != right)
  result = env.step(wrong)
  assert result.terminated and result.success is False and not result.reward


def test_closing_brings_live_envs_back_to_base():
  before = toy.live_envs()
  for _ in range(50):
    env = toy.ToySpec().make()
    assert toy.live_envs() == before + 1
    env.close()
    env.close()
  assert toy.live_envs() == before


@dataclasses.dataclass(frozen=True)
class BrokenSpec(toy.ToySpec):
  """A toy whose results pass through `how` first."""

  how: str = ''

  def make(self):
    return Broken(self)

  def split(self, name):
    if self.how == 'splits overlap':
      name = {'valid': 'train'}.get(name, name)
    return super().split(name)


class Broken(toy.ToyEnv):
  """Breaks the contract in the way its spec names."""

  kept: list[Broken] = []
  episodes = 0

  def __init__(self, spec: BrokenSpec):
    super().__init__(spec)
    if spec.how == 'kept alive':
      Broken.kept.append(self)

  def _result(self, text: str, instruction: str = '') -> types.StepResult:
    result = super()._result(text, instruction)
    Broken.episodes += bool(instruction)
    changes = {
        'success from done': {'success': result.done},
        'both ends': {'terminated': result.done, 'truncated': result.done},
        'no commands': {'admissible': ()},
        'carries over': {'state_key': f'{text} {Broken.episodes}'},
        'instruction again': {'instruction': 'open box 1.'},
        'hash order': {'admissible': tuple({'a', 'b', 'c', 'd', 'e', 'f'})},
        'nan': {'reward': float('nan')},
        'reward at reset': {'reward': 1.0},
    }
    return dataclasses.replace(result, **changes.get(self._spec.how, {}))

  def step(self, action: str) -> types.StepResult:
    if self._spec.how == 'garbage raises' and action not in self._admissible():
      raise ValueError(action)
    if self._spec.how == 'goes on after the end' and self._done:
      return self._result(toy.NOTHING)
    return super().step(action)


@pytest.mark.parametrize(
    'how,check',
    [
        ('splits overlap', conformance.check_splits),
        ('success from done', conformance.check_results),
        ('both ends', conformance.check_limit),
        ('no commands', conformance.check_results),
        ('carries over', conformance.check_deterministic),
        ('instruction again', conformance.check_results),
        ('hash order', conformance.check_worker),
        ('nan', conformance.check_results),
        ('reward at reset', conformance.check_results),
        ('garbage raises', conformance.check_limit),
        ('goes on after the end', conformance.check_limit),
        ('kept alive', conformance.check_close),
    ],
)
def test_the_suite_notices(how, check):
  check(BrokenSpec(kinds=('put',)), SPLITS)  # Whole, it passes.
  with pytest.raises(
      (AssertionError, TypeError, ValueError, pytest.fail.Exception)
  ):
    check(BrokenSpec(kinds=('put',), how=how), SPLITS)


def test_check_env_runs_them_all():
  conformance.check_env(toy.ToySpec(), SPLITS)
  with pytest.raises(AssertionError):
    conformance.check_env(BrokenSpec(how='splits overlap'), SPLITS)
