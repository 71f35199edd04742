"""An environment whose steps also wait, as for a service elsewhere.

Workers import it: no jax here.
"""

from __future__ import annotations

import dataclasses
import time

from hgpo_jax import config
from hgpo_jax import types
from hgpo_jax.envs import base


@config.configurable
@dataclasses.dataclass(frozen=True)
class Waiting:
  """Another environment with a wait in each step, in which nothing computes.

  Attributes:
    env: the environment.
    step_ms: how long a step waits.
  """

  env: base.PreparingSpec
  step_ms: float = 20.0

  @property
  def max_steps(self) -> int:
    return self.env.max_steps

  def check(self) -> None:
    self.env.check()

  def split(self, name: str) -> base.Split:
    return self.env.split(name)

  def prepare(self, task: types.Task) -> None:
    self.env.prepare(task)

  def make(self) -> base.Env:
    return _WaitingEnv(self.env.make(), self.step_ms / 1e3)


class _WaitingEnv:
  """`env`, later."""

  def __init__(self, env: base.Env, seconds: float):
    self._env = env
    self._seconds = seconds
    self.reset = env.reset
    self.close = env.close

  def step(self, action: str) -> types.StepResult:
    time.sleep(self._seconds)
    return self._env.step(action)
