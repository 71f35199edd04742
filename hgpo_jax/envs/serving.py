"""Keeps the workers of a pool busy: requests, replies, deadlines, replacements.

What a worker has not answered when it ends, its replacement is asked anew.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import math
import time

from absl import logging

from hgpo_jax import types
from hgpo_jax.envs import base
from hgpo_jax.envs import ledger
from hgpo_jax.envs import worker
from hgpo_jax.envs import worker_process

_CLOSE_SECONDS = 2.0


class EnvStartError(RuntimeError):
  """The environments cannot be made; says which, where and why."""


class Serving:
  """Carries the jobs of a ledger to workers and their answers back.

  Attributes:
    restarts: workers replaced because they failed.
    recycled: workers replaced because of their age.
    events: what environments counted.
  """

  def __init__(
      self,
      spec: base.EnvSpec,
      workers: Sequence[worker_process.WorkerProcess],
      books: ledger.Ledger,
      limits: Mapping[str, float],
      recycle_episodes: int,
      needs_main: bool,
  ):
    """See `pool.EnvPool`, `WorkerProcess.start`; `limits` are deadlines."""
    self.restarts = self.recycled = 0
    self.events: collections.Counter[str] = collections.Counter()
    self._spec = spec
    self._workers = workers
    self._ledger = books
    self._limits = limits
    self._recycle_episodes = recycle_episodes
    self._needs_main = needs_main
    self._started = False

  def start(self) -> None:
    """Starts all workers and waits for them; raises EnvStartError."""
    for process in self._workers:
      self._dispatch(process)
    self.serve(lambda: False)
    self._started = True

  def send(self, jobs: Mapping[int, ledger.Job]) -> None:
    """Sends each worker all its new jobs at once."""
    for process in self._workers:
      if slots := [slot for slot in process.slots if slot in jobs]:
        starts = any(jobs[slot].task for slot in slots)
        if starts and 0 < self._recycle_episodes <= process.resets:
          process.retiring = True
        self._dispatch(process, slots)

  def serve(self, enough: Callable[[], bool], until: float = math.inf) -> None:
    """Serves replies and deadlines until `enough`, or until a time.

    What has been sent by then is read in any case.
    """
    while busy := [p for p in self._workers if p.pending]:
      due = min(p.since + self._limits[_knob(p.head)] for p in busy)
      ending = enough()
      now = time.monotonic()
      seconds = 0.0 if ending else min(due, until) - now
      ready = worker_process.wait(busy, seconds)
      for process in busy:
        if process in ready:
          self._receive(process)
        else:
          self._check_deadline(process)
      if not ready and (ending or time.monotonic() >= until):
        return

  def _dispatch(
      self,
      process: worker_process.WorkerProcess,
      slots: Iterable[int] | None = None,
  ) -> None:
    """Sends jobs of `slots`, or of all that wait where none has been sent.

    Without a process, starts one; that it is ready dispatches again.
    """
    head = process.head
    if process.retiring and head is None:
      self._recycle(process)
    if process.pid is None:
      io_timeout_s = self._limits['step_timeout_s']
      process.start(self._spec, io_timeout_s, self._needs_main)
    elif process.retiring or (head and head.id == worker.START):
      return
    elif requests := self._ledger.requests(slots or process.slots):
      process.send(requests, requests)

  def _recycle(self, process: worker_process.WorkerProcess) -> None:
    """Ends a worker between two calls; its next message starts another."""
    logging.info(
        'EnvPool: worker %d ends after %d episodes and %.0f MB',
        process.index,
        process.resets,
        process.resident_mb(),
    )
    process.hang_up()
    process.end(grace_s=_CLOSE_SECONDS)
    self._ledger.lose(process.slots)
    self.recycled += 1

  def _receive(self, process: worker_process.WorkerProcess) -> None:
    for request, reply in self._replies(process):
      if reply.counts:
        self.events.update(reply.counts)
      if request.id != worker.START:
        self._ledger.settle(request, reply)
        if process.retiring and not process.pending:
          self._dispatch(process)
      elif reply.error:
        self._replace(process, request, reply.error)
      else:
        self._dispatch(process)

  def _replies(
      self, process: worker_process.WorkerProcess
  ) -> Iterator[tuple[worker.Request, worker.Reply]]:
    """What a worker has answered; if it went wrong, it is replaced."""
    try:
      yield from process.receive()
    except (EOFError, ConnectionError):
      why = f'worker died with exit code {process.exit_code()}'
      self._replace(process, process.head, why)
    except Exception as error:  # pylint: disable=broad-except
      self._replace(process, process.head, f'worker sent garbage: {error}')

  def _check_deadline(self, process: worker_process.WorkerProcess) -> None:
    """The deadline is that of the request the worker is busy with."""
    head = process.head
    limit = self._limits[_knob(head)]
    late = time.monotonic() - process.since > limit
    if late and not process.conn.poll():
      message = f'no answer within {_knob(head)}={limit:g}'
      self._ledger.fail(head.slot, types.TIMEOUT, message)
      self._replace(process, head, message)

  def _replace(
      self,
      process: worker_process.WorkerProcess,
      head: worker.Request,
      why: str,
  ) -> None:
    """Ends a worker and starts another, which will get what is unanswered.

    Args:
      process: the worker.
      head: what it was busy with.
      why: what is wrong with it.

    Raises:
      EnvStartError if this is still the start of the pool. A replacement
      that cannot start fails its slots; the next call tries again.
    """
    name = type(self._spec).__name__
    logging.warning('EnvPool: worker %d ends: %s', process.index, why)
    process.end()
    self._ledger.lose(process.slots)
    if head.id != worker.START:
      self.restarts += 1
      self._ledger.crash(head.slot, why)
      self._dispatch(process)
    elif not self._started:
      raise EnvStartError(
          f'worker {process.index} could not make {len(process.slots)} envs of'
          f' {name}: {why}'
      )
    else:
      for slot in process.slots:
        message = f'a new worker could not make {name}: {why}'
        self._ledger.fail(slot, types.ENV_ERROR, message)


def _knob(request: worker.Request) -> str:
  """Name of the deadline that holds for `request`."""
  if request.id == worker.START:
    return 'start_timeout_s'
  return 'reset_timeout_s' if request.task is not None else 'step_timeout_s'
