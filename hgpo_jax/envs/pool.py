"""A pool of environments in worker processes, with a deadline for each act.

`submit` sends one message to each worker, `poll` gathers one answer a slot as
they come; `reset` and `step` wait for theirs. Only the slot that misbehaves
fails. A worker that hangs, dies or answers nonsense is
killed and replaced; its other slots go on, because environments are
deterministic: they are reset and their actions replayed, and the last result
must come out the same. After so many episodes a worker is replaced by a fresh
one, in the same way: what native libraries leak ends with it.
"""

from __future__ import annotations

import atexit
from collections.abc import Iterable, Iterator, Mapping
import contextlib
import multiprocessing
import pickle
import time

from absl import logging

from hgpo_jax import types
from hgpo_jax.envs import base
from hgpo_jax.envs import ledger
from hgpo_jax.envs import serving
from hgpo_jax.envs import worker
from hgpo_jax.envs import worker_process

EnvFailure = ledger.EnvFailure
Answers = ledger.Answers

_CLOSE_SECONDS = 2.0


EnvStartError = serving.EnvStartError


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
    self._closed = False
    count = min(num_workers, num_slots)
    self._workers = [
        worker_process.WorkerProcess(index, range(index, num_slots, count))
        for index in range(count)
    ]
    self._serving = serving.Serving(
        self._spec,
        self._workers,
        self._ledger,
        self._limits,
        recycle_episodes,
        needs_main=self._check_spec(),
    )
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

  def submit(self, acts: Mapping[int, types.Task | str]) -> None:
    """Asks each slot named to start a task or to act, without waiting.

    A slot does one thing at a time: `poll` for its answer before its next act.
    """
    self._open(
        {
            slot: ledger.Job(task=act)
            if isinstance(act, types.Task)
            else ledger.Job(action=act)
            for slot, act in acts.items()
        }
    )

  def poll(self, timeout_s: float = 0.0) -> Answers:
    """Answers that have come; waits up to `timeout_s` for the first one."""
    self._check_open()
    until = time.monotonic() + timeout_s
    with self._closing():
      self._serving.serve(lambda: bool(self._ledger.answers), until)
    return self._ledger.take()

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
        'restarts': self._serving.restarts,
        'recycled': self._serving.recycled,
        **self._ledger.counts,
    }
    metrics = {f'pool/{name}': float(n) for name, n in counts.items()}
    metrics |= {
        f'env/{name}': float(n) for name, n in self._serving.events.items()
    }
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

  def _check_spec(self) -> bool:
    """Whether the classes of the spec, which must be sent, are `__main__`'s."""
    try:
      return b'__main__' in pickle.dumps(self._spec)
    except Exception as error:
      raise EnvStartError(
          f'{type(self._spec).__name__} cannot be sent to a worker: {error}; an'
          ' env spec must be a picklable frozen dataclass of plain values'
      ) from error

  def _start(self) -> None:
    name, begin = type(self._spec).__name__, time.monotonic()
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
    with self._closing():
      self._serving.start()
    logging.info('EnvPool: ready after %.1f s', time.monotonic() - begin)

  def _check_open(self) -> None:
    if self._closed:
      raise RuntimeError('the EnvPool is closed')

  def _call(self, jobs: dict[int, ledger.Job]) -> Answers:
    self._open(jobs)
    with self._closing():
      self._serving.serve(lambda: not self._ledger.waiting(jobs))
    return self._ledger.take(jobs)

  def _open(self, jobs: dict[int, ledger.Job]) -> None:
    """Sends each worker all its new jobs at once."""
    self._check_open()
    self._ledger.open(jobs)
    with self._closing():
      self._serving.send(jobs)

  @contextlib.contextmanager
  def _closing(self) -> Iterator[None]:
    """Closes the pool on an error: with requests in flight, no later call
    could be trusted."""
    try:
      yield
    except BaseException:
      self.close()
      raise
