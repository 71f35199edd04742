"""A pool of environments in worker processes, with a deadline for each act.

A call sends one message to each worker and gathers one reply a slot. Only the
slot that misbehaves fails. A worker that hangs, dies or answers nonsense is
killed and replaced; its other slots go on, because environments are
deterministic: they are reset and their actions replayed, and the last result
must come out the same. After so many episodes a worker is replaced by a fresh
one, in the same way: what native libraries leak ends with it.
"""

from __future__ import annotations

import atexit
import collections
from collections.abc import Iterable, Mapping
import math
import multiprocessing
import pickle
import select
import time

from absl import logging

from hgpo_jax import types
from hgpo_jax.envs import base
from hgpo_jax.envs import ledger
from hgpo_jax.envs import worker
from hgpo_jax.envs import worker_process

EnvFailure = ledger.EnvFailure
Answers = ledger.Answers

_CLOSE_SECONDS = 2.0


class EnvStartError(RuntimeError):
  """The environments cannot be made; says which, where and why."""


class EnvPool:
  """`num_slots` environments of `spec` in up to `num_workers` processes.

  Use it as a context manager, or call `close`. Deadlines are in seconds and
  hold for one slot's reset, one slot's step, and the start of a worker with
  all of its environments. A worker that has started `recycle_episodes`
  episodes is replaced before its next one; 0 keeps it for good.

  Raises:
    EnvStartError: an environment could not be made in time, or at all.
  """

  def __init__(
      self,
      spec: base.EnvSpec,
      num_slots: int,
      num_workers: int,
      reset_timeout_s: float = 60.0,
      step_timeout_s: float = 20.0,
      start_timeout_s: float = 120.0,
      recycle_episodes: int = 0,
  ):
    self._limits = {
        'reset_timeout_s': reset_timeout_s,
        'step_timeout_s': step_timeout_s,
        'start_timeout_s': start_timeout_s,
    }
    sizes = {'num_slots': num_slots, 'num_workers': num_workers}
    for name, value in (sizes | self._limits).items():
      if value <= 0:
        raise ValueError(f'EnvPool.{name} is {value}, expected more than 0')
    if recycle_episodes < 0:
      raise ValueError(
          f'EnvPool.recycle_episodes is {recycle_episodes}, expected at least'
          ' 0, which keeps workers for good'
      )
    self.num_slots = num_slots
    self._spec = spec
    self._ledger = ledger.Ledger(num_slots)
    self._recycle_episodes = recycle_episodes
    self._restarts = self._recycled = 0
    self._counts: collections.Counter[str] = collections.Counter()
    self._started = self._closed = False
    count = min(num_workers, num_slots)
    self._workers = [
        worker_process.WorkerProcess(index, range(index, num_slots, count))
        for index in range(count)
    ]
    self._start()

  def __enter__(self) -> EnvPool:
    return self

  def __exit__(self, *unused_error: object) -> None:
    self.close()

  def reset(self, tasks: Mapping[int, types.Task]) -> Answers:
    """Starts `tasks[slot]` in each slot named; answers in the same order."""
    return self._call(
        {slot: ledger.Job(task=task) for slot, task in tasks.items()}
    )

  def step(self, actions: Mapping[int, str]) -> Answers:
    """Acts in each slot named; each must have an episode that goes on."""
    return self._call(
        {slot: ledger.Job(action=action) for slot, action in actions.items()}
    )

  def prefetch(self, tasks: Iterable[types.Task]) -> None:
    """Lets idle workers load tasks that `reset` will name soon.

    Returns at once. Each worker loads all of them, beginning with the part that
    it will play, so that what is kept on disk is made once. A call that comes
    meanwhile waits for the load under way at most.
    """
    tasks = tuple(dict.fromkeys(tasks))
    if self._closed or not tasks or not hasattr(self._spec, 'prepare'):
      return
    for process in self._workers:
      if process.pid is not None and not process.pending:
        first = process.index * len(tasks) // len(self._workers)
        process.tell(worker.Prepare(tasks[first:] + tasks[:first]))

  def close(self) -> None:
    """Ends all workers, closing idle environments first. Safe to repeat."""
    if self._closed:
      return
    self._closed = True
    for process in self._workers:
      if process.pending:
        process.end()
      else:
        process.hang_up()
    deadline = time.monotonic() + _CLOSE_SECONDS
    for process in self._workers:
      process.end(grace_s=max(0.0, deadline - time.monotonic()))
    atexit.unregister(self.close)

  @property
  def metrics(self) -> types.Metrics:
    """Counts since the start, and each worker's resident memory in MB."""
    counts = {
        'restarts': self._restarts,
        'recycled': self._recycled,
        **self._ledger.counts,
    }
    metrics = {f'pool/{name}': float(n) for name, n in counts.items()}
    metrics |= {f'env/{name}': float(n) for name, n in self._counts.items()}
    for process in self._workers:
      metrics[f'memory/worker_mb_{process.index}'] = process.resident_mb()
    return metrics

  @property
  def worker_pids(self) -> tuple[int | None, ...]:
    """Process id of each worker."""
    return tuple(process.pid for process in self._workers)

  def worker_of(self, slot: int) -> int:
    """Number of the worker that a slot lives in."""
    return slot % len(self._workers)

  def _start(self) -> None:
    name, begin = type(self._spec).__name__, time.monotonic()
    try:
      self._needs_main = b'__main__' in pickle.dumps(self._spec)
    except Exception as error:
      raise EnvStartError(
          f'{name} cannot be sent to a worker: {error}; an env spec must be a'
          ' picklable frozen dataclass of plain values'
      ) from error
    preload = {worker.__name__, type(self._spec).__module__} - {'__main__'}
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(sorted(preload))
    logging.info(
        'EnvPool: starting %d envs of %s in %d workers, within %g s',
        self.num_slots,
        name,
        len(self._workers),
        self._limits['start_timeout_s'],
    )
    atexit.register(self.close)
    self._run(self._workers)
    self._started = True
    logging.info('EnvPool: ready after %.1f s', time.monotonic() - begin)

  def _call(self, jobs: dict[int, ledger.Job]) -> Answers:
    if self._closed:
      raise RuntimeError('the EnvPool is closed')
    self._ledger.open(jobs)
    busy = [p for p in self._workers if self._ledger.waiting(p.slots)]
    for process in busy:
      starts = any(jobs[s].task for s in self._ledger.waiting(process.slots))
      if starts and 0 < self._recycle_episodes <= process.resets:
        self._recycle(process)
    self._run(busy)
    return {slot: self._ledger.answers[slot] for slot in jobs}

  def _run(self, processes: Iterable[worker_process.WorkerProcess]) -> None:
    """Sends the jobs, then serves replies and deadlines until none is due."""
    try:
      for process in processes:
        self._dispatch(process)
      while busy := [p for p in self._workers if p.pending]:
        due = min(p.since + self._limits[_knob(p.head)] for p in busy)
        ready = _wait(busy, due - time.monotonic())
        for process in busy:
          if process in ready:
            self._receive(process)
          else:
            self._check_deadline(process)
    except BaseException:
      self.close()  # Requests are in flight: no later call could be trusted.
      raise

  def _dispatch(self, process: worker_process.WorkerProcess) -> None:
    """Sends a worker all its jobs at once; without a process, starts it."""
    if process.pid is None:
      io_timeout_s = self._limits['step_timeout_s']
      process.start(self._spec, io_timeout_s, self._needs_main)
    elif requests := self._ledger.requests(process.slots):
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
    self._recycled += 1

  def _receive(self, process: worker_process.WorkerProcess) -> None:
    try:
      request, reply = process.receive()
    except (EOFError, ConnectionError):
      why = f'worker died with exit code {process.exit_code()}'
      self._replace(process, process.head, why)
    except Exception as error:  # pylint: disable=broad-except
      self._replace(process, process.head, f'worker sent garbage: {error}')
    else:
      if reply.counts:
        self._counts.update(reply.counts)
      if request.id != worker.START:
        self._ledger.settle(request, reply)
      elif reply.error:
        self._replace(process, request, reply.error)
      else:
        self._dispatch(process)

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
      self._restarts += 1
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


def _wait(
    busy: list[worker_process.WorkerProcess], seconds: float
) -> list[worker_process.WorkerProcess]:
  """Those that have sent something, or ended; none once the time is over.

  `multiprocessing.connection.wait` does the same at ten times the cost, which
  a step of a fast environment would notice.
  """
  poller = select.poll()  # It takes no more than 24 days at a time.
  by_file = {process.conn.fileno(): process for process in busy}
  for number in by_file:
    poller.register(number, select.POLLIN)
  found = poller.poll(math.ceil(1e3 * min(max(0.0, seconds), 3600.0)))
  return [by_file[number] for number, _ in found]


def _knob(request: worker.Request) -> str:
  """Name of the deadline that holds for `request`."""
  if request.id == worker.START:
    return 'start_timeout_s'
  return 'reset_timeout_s' if request.task is not None else 'step_timeout_s'
