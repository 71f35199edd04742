"""One actor of a Ray pool: this side of it, and what runs in it."""

from __future__ import annotations

from collections.abc import Mapping
import time
from typing import Any

from hgpo_jax import types
from hgpo_jax.envs import base
from hgpo_jax.envs import pool
from hgpo_jax.envs import worker

LONGEST_SECONDS = 1e6  # Ray counts in milliseconds that have to fit an int.


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


class Node:
  """This side of an actor, which has one call at a time.

  Attributes:
    slots: those that live there; slot `i` of its own pool is `slots[i]`.
    workers: number of its worker processes.
    actor: its handle.
    opening: answers when the actor is ready; None once it is.
    outbox: acts by local slot that it was not sent yet.
    under_way: the answer of its call, to come; None when it has none.
    late: `time.monotonic()` from when on that answer is no longer expected.
    metrics: of its pool, as last told; so are `pids`, of its workers.
  """

  def __init__(
      self,
      slots: range,
      num_workers: int,
      spec: base.EnvSpec,
      limits: Mapping[str, float],
  ):
    """`spec` and `limits` are those of `EnvPool`."""
    self.slots = slots
    self.workers = min(num_workers, len(slots))
    self.actor: Any = None
    self._spec, self._limits = spec, limits

  def start(self) -> None:
    """Asks for an actor; returns before there is one."""
    import ray

    self._ray = ray
    host = ray.remote(Host).options(
        num_cpus=self.workers, scheduling_strategy='SPREAD'
    )
    self.actor = host.remote()
    self.metrics: types.Metrics = {}
    self.pids: tuple[int | None, ...] = (None,) * self.workers
    self.outbox: dict[int, types.Task | str] = {}
    self.under_way: Any = None
    self.late = 0.0
    self.opening = self.actor.open.remote(
        self._spec, len(self.slots), self.workers, **self._limits
    )

  def ready(self) -> str:
    """Waits until the actor is ready; why it is not, '' if it is."""
    if self.opening is None:
      return ''
    seconds = min(self._limits['start_timeout_s'], LONGEST_SECONDS)
    try:
      _, self.metrics, self.pids = self._ray.get(self.opening, timeout=seconds)
    except self._ray.exceptions.GetTimeoutError:
      return (
          f'no actor with {self.workers} CPUs and {len(self.slots)} envs within'
          f' start_timeout_s={seconds:g}; the cluster has'
          f' {self._ray.cluster_resources().get("CPU", 0):g} CPUs'
      )
    except self._ray.exceptions.RayError as error:
      return reason(error)
    self.opening = None
    return ''

  def patience_s(self) -> float:
    """Longer than it takes a pool that keeps its own deadlines to answer."""
    names = ('reset_timeout_s', 'step_timeout_s', 'start_timeout_s')
    return min(2 * sum(self._limits[name] for name in names), LONGEST_SECONDS)

  def send(self) -> None:
    """Sends the outbox; the answers that come first end the call."""
    acts, self.outbox = self.outbox, {}
    patience_s = self.patience_s()
    self.late = time.monotonic() + patience_s
    self.under_way = self.actor.exchange.remote(acts, patience_s / 2)

  def take(self) -> pool.Answers:
    """The answers of a call that has ended; raises what Ray raises."""
    call, self.under_way = self.under_way, None
    answers, self.metrics, self.pids = self._ray.get(call)
    return {self.slots[local]: answer for local, answer in answers.items()}


def reason(error: Exception) -> str:
  """What an actor ended of, in one line."""
  cause = getattr(error, 'cause', None) or error
  known = isinstance(cause, pool.EnvStartError)
  return ' '.join((str(cause) if known else worker.describe(cause)).split())
