"""Who plays the episodes of an iteration: this thread now, or one ahead.

With `Experiment.rollout_lag = 1` a thread plays iteration i + 1 while the
learner takes the updates of iteration i, with the policy as it was before them
(one-step off-policy, Noukhovitch et al. 2024, arXiv 2410.18252):

  learner  | learn 0           | learn 1           | learn 2 ...
  player   | play 1, policy 0  | play 2, policy 1  | play 3, policy 2 ...

So no policy plays that is more than one iteration old. The pool, the sampler
and its engine belong to whoever plays: `Rollouts` hands them out one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent import futures
import dataclasses
import threading
import time
from typing import Any

from absl import logging
import jax

from hgpo_jax import types
from hgpo_jax.experiment import resample
from hgpo_jax.experiment import runtime as runtime_lib
from hgpo_jax.experiment import schedule
from hgpo_jax.experiment import spec as spec_lib
from hgpo_jax.learner import train_state
from hgpo_jax.models import base as models
from hgpo_jax.rollout import collector as collector_lib

# How long a thread that is to stop may go on waiting for an environment.
_NOTICE_S = 0.2


class Stopped(RuntimeError):
  """The run ends while episodes are under way; nobody wants them any more."""


@dataclasses.dataclass(frozen=True)
class Round:
  """The episodes of an iteration, and how they were played.

  Attributes:
    played: the episodes.
    lag: iterations that the policy which played them is behind.
    metrics: of the sync, seconds of play, lag, and what happened in the pool
      meanwhile.
  """

  played: resample.Played
  lag: int
  metrics: types.Metrics


class Rollouts:
  """Plays iterations in order, at most one ahead; a context manager.

  However the run ends, no thread of it is left behind.
  """

  def __init__(
      self,
      spec: spec_lib.Experiment,
      player: runtime_lib.Player,
      learner: runtime_lib.Learner,
  ):
    self._spec = spec
    self._player = player
    self._learner = learner
    self._stop = threading.Event()
    self._thread = futures.ThreadPoolExecutor(1, 'rollout')
    self._ahead: tuple[int, futures.Future[Round]] | None = None
    self._waited_s = 0.0

  def __enter__(self) -> Rollouts:
    return self

  def __exit__(self, *unused_error: object) -> None:
    self._stop.set()
    self._thread.shutdown(wait=True)
    if self._ahead is not None:
      iteration, future = self._ahead
      lost = future.exception()
      if lost is not None and not isinstance(lost, Stopped):
        logging.warning('the episodes of iteration %d: %s', iteration, lost)

  def idle_collector(self) -> collector_lib.BoundCollector:
    """Waits for what is under way; the collector is the caller's till `begin`.

    Raises:
      Whatever stopped the thread.
    """
    if self._ahead is not None:
      start = time.monotonic()
      iteration, future = self._ahead
      self._ahead = None
      future.result()
      self._ahead = iteration, future
      self._waited_s += time.monotonic() - start
    return self._player.collector

  def take(self, iteration: int, state: train_state.TrainState) -> Round:
    """The episodes of `iteration`: those under way, or else played now.

    Args:
      iteration: the one that is learned from next.
      state: whose policy plays if nothing is under way.

    Raises:
      Whatever stopped the thread.
    """
    start = time.monotonic()
    collector = self.idle_collector()
    if self._ahead is None:
      found = self._play(collector, *self._sync(state), iteration, 0)
      self._waited_s += time.monotonic() - start
    else:
      played, future = self._ahead
      if played != iteration:
        raise RuntimeError(
            f'the episodes under way are of iteration {played}; expected those'
            f' of {iteration}'
        )
      found, self._ahead = future.result(), None
    waited_s, self._waited_s = self._waited_s, 0.0
    if not self._spec.rollout_lag:
      return found
    told = {'rollout/lag': float(found.lag), 'time/rollout_wait_s': waited_s}
    return dataclasses.replace(found, metrics=found.metrics | told)

  def begin(self, iteration: int, state: train_state.TrainState) -> None:
    """Starts to play `iteration` if that is to happen ahead of the learner.

    Args:
      iteration: the one after that which is about to be learned from.
      state: whose policy plays, and which may be given to an update now.
    """
    lag = schedule.lag(self._spec, iteration)
    if lag:
      self._ahead = iteration, self._thread.submit(
          self._play_in_thread, *self._sync(state), iteration, lag
      )

  def _sync(
      self, state: train_state.TrainState
  ) -> tuple[models.Params, types.Metrics]:
    """The policy for the sampler, in memory that no update of the state takes.

    Launched before the update is, so that it reads what the update overwrites.
    """
    start = time.monotonic()
    weights, metrics = self._learner.sync(self._learner.policy(state))
    return weights, metrics | {'time/sync_s': time.monotonic() - start}

  def _play_in_thread(
      self,
      weights: models.Params,
      synced: types.Metrics,
      iteration: int,
      lag: int,
  ) -> Round:
    player = self._player
    collector = self._spec.collector.bind(
        _Stoppable(player.pool, self._stop), player.tokenizer, player.sampler
    )
    with jax.set_mesh(player.mesh):  # Each thread has its own.
      return self._play(collector, weights, synced, iteration, lag)

  def _play(
      self,
      collector: collector_lib.BoundCollector,
      weights: models.Params,
      synced: types.Metrics,
      iteration: int,
      lag: int,
  ) -> Round:
    spec, pool = self._spec, self._player.pool
    events, start = pool.metrics, time.monotonic()
    tasks = schedule.tasks(spec, iteration)
    played = resample.play(spec, collector, weights, tasks, iteration)
    seconds = time.monotonic() - start
    pool.prefetch(schedule.upcoming(spec, iteration))
    metrics = synced | pool_events(events, pool.metrics)
    return Round(played, lag, metrics | {'time/rollout_s': seconds})


def pool_events(before: types.Metrics, now: types.Metrics) -> types.Metrics:
  """What happened between two looks at `EnvPool.metrics`; memory as it is.

  Not counts since the start: a resumed run begins with 0 again.
  """
  return {
      name: value if name.startswith('memory/') else value - before.get(name, 0)
      for name, value in now.items()
  }


class _Stoppable:
  """A pool as a collector sees it, until the run ends."""

  def __init__(self, pool: collector_lib.Pool, stop: threading.Event):
    self.num_slots = pool.num_slots
    self.worker_of = pool.worker_of
    self._pool = pool
    self._stop = stop

  def submit(self, acts: Mapping[int, types.Task | str]) -> None:
    self._check()
    self._pool.submit(acts)

  def poll(self, timeout_s: float = 0.0) -> Mapping[int, Any]:
    until = time.monotonic() + timeout_s
    while True:
      self._check()
      left = until - time.monotonic()
      answers = self._pool.poll(max(0.0, min(left, _NOTICE_S)))
      if answers or left <= _NOTICE_S:
        return answers

  def _check(self) -> None:
    if self._stop.is_set():
      raise Stopped('the run ends')
