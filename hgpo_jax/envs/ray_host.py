"""What a Ray actor of `ray_pool` runs on its node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hgpo_jax import types
from hgpo_jax.envs import pool


class Host:
  """What an actor runs. Every answer comes with the state of its pool."""

  def open(self, *args: Any, **limits: Any) -> tuple[Any, ...]:
    """Starts the pool: arguments of `EnvPool`."""
    self._pool = pool.EnvPool(*args, **limits)
    return self._told({})

  def exchange(
      self, acts: Mapping[int, types.Task | str], timeout_s: float
  ) -> tuple[Any, ...]:
    """Submits acts, and returns the answers that come first."""
    self._pool.submit(acts)
    return self._told(self._pool.poll(timeout_s))

  def prefetch(self, tasks: tuple[types.Task, ...]) -> None:
    self._pool.prefetch(tasks)

  def close(self) -> None:
    self._pool.close()

  def _told(self, answers: pool.Answers) -> tuple[Any, ...]:
    return answers, self._pool.metrics, self._pool.worker_pids
