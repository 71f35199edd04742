"""Where environments run: processes here, or on the nodes of a cluster."""

from __future__ import annotations

import dataclasses

from hgpo_jax import config
from hgpo_jax.envs import base as envs
from hgpo_jax.envs import pool as pool_lib
from hgpo_jax.envs import ray_pool


@config.configurable
@dataclasses.dataclass(frozen=True)
class Workers:
  """Processes that run environments; results do not depend on these numbers.

  Attributes:
    processes: worker processes; about one a core.
    slots: live environments; 0 for one an episode of a training iteration.
    start_timeout_s: until all workers must be ready.
    reset_timeout_s: for one reset.
    step_timeout_s: for one step.
    recycle_episodes: a process that started so many episodes is replaced by a
      fresh one before its next; 0 for never.
    ray_nodes: nodes of a Ray cluster to run `processes` on, each; 0 for this
      machine. `$RAY_ADDRESS` names the cluster.
  """

  processes: int = 2
  slots: int = 0
  start_timeout_s: float = 120.0
  reset_timeout_s: float = 60.0
  step_timeout_s: float = 20.0
  recycle_episodes: int = 20_000
  ray_nodes: int = 0

  def __post_init__(self) -> None:
    if self.processes < 1 or min(self.slots, self.ray_nodes) < 0:
      raise ValueError(
          'Workers needs processes >= 1, slots >= 0 and ray_nodes >= 0, got'
          f' {self.processes}, {self.slots} and {self.ray_nodes}'
      )
    for name in ('start_timeout_s', 'reset_timeout_s', 'step_timeout_s'):
      if getattr(self, name) <= 0:
        raise ValueError(
            f'Workers.{name} is {getattr(self, name)}; expected more than 0'
            ' seconds'
        )
    if self.recycle_episodes < 0:
      raise ValueError(
          f'Workers.recycle_episodes is {self.recycle_episodes}; expected at'
          ' least 0, which keeps processes for good'
      )

  def check(self) -> None:
    """Raises ImportError if what runs the processes is not installed."""
    if self.ray_nodes:
      ray_pool.check()

  def open(
      self, env: envs.EnvSpec, episodes: int
  ) -> pool_lib.EnvPool | ray_pool.RayPool:
    """Starts the pool; call it before jax touches a device."""
    slots = self.slots or episodes
    limits = {
        'reset_timeout_s': self.reset_timeout_s,
        'step_timeout_s': self.step_timeout_s,
        'start_timeout_s': self.start_timeout_s,
        'recycle_episodes': self.recycle_episodes,
    }
    if self.ray_nodes:
      return ray_pool.RayPool(
          env, slots, self.processes, self.ray_nodes, **limits
      )
    return pool_lib.EnvPool(env, slots, min(self.processes, slots), **limits)
