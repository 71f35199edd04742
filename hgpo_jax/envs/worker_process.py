"""The parent's side of one worker: starting, talking to and ending it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import math
import multiprocessing
from multiprocessing import connection
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
import types as python_types

from absl import logging

from hgpo_jax.envs import base
from hgpo_jax.envs import worker

_KILL_SECONDS = 5.0
_LONGEST_BLOCK_SECONDS = 1e6
_MAX_MESSAGE_BYTES = 64 * 2**20
_READ_BYTES = 2**18
# What `Connection.send` writes before a message: its length.
_LENGTH = struct.Struct('!i')
# The fastest environments take longer for a step. To wake up for each reply
# would cost more than all else that is done with it.
_STEP_SECONDS = 1e-4


class WorkerProcess:
  """A worker process, its pipe, and the requests that it has not answered.

  A replaced process gets a new pipe, so no reply of an old process can ever
  be taken for one of the new.

  Attributes:
    index: number of the worker in the pool.
    slots: the slots that live in it.
    pending: unanswered requests by id, oldest first; the worker answers in
      order, so the first is the one that it is busy with.
    since: `time.monotonic()` when the first pending request began.
    resets: episodes that this process has been asked to start.
    retiring: it gets no more requests, and ends once it has answered.
  """

  def __init__(self, index: int, slots: Sequence[int]):
    self.index = index
    self.slots = tuple(slots)
    self.pending: dict[int, worker.Request] = {}
    self.since = 0.0
    self.resets = 0
    self.retiring = False
    self.conn: connection.Connection | None = None
    self._process: multiprocessing.process.BaseProcess | None = None
    self._unread = bytearray()

  @property
  def head(self) -> worker.Request | None:
    """The request that the worker is busy with."""
    return next(iter(self.pending.values()), None)

  @property
  def pid(self) -> int | None:
    """Process id; None when there is no process."""
    return self._process.pid if self._process else None

  def start(
      self, spec: base.EnvSpec, io_timeout_s: float, needs_main: bool = False
  ) -> None:
    """Starts a process; the reply to `worker.START` will say it is ready.

    Args:
      spec: what the worker makes its environments from.
      io_timeout_s: the longest that one read or write may block the parent.
      needs_main: the spec's classes live in `__main__`.
    """
    context = multiprocessing.get_context('forkserver')
    self.conn, child = context.Pipe()
    self._unread.clear()
    _limit_blocking(self.conn, io_timeout_s)
    process = context.Process(
        target=worker.main,
        args=(child,),
        name=f'env-worker-{self.index}',
        daemon=True,
    )
    with _shielded_start(needs_main):
      process.start()
    self._process = process  # Not sooner: `end` takes started ones only.
    child.close()
    self.send((spec, self.slots), [worker.Request(worker.START, slot=-1)])

  def send(self, message: object, requests: list[worker.Request]) -> None:
    """Sends `message`; from now on `requests` are pending, too."""
    if not self.pending:
      self.since = time.monotonic()
    self.pending |= {request.id: request for request in requests}
    self.resets += sum(request.task is not None for request in requests)
    self.tell(message)

  def tell(self, message: object) -> None:
    """Sends what needs no answer."""
    try:
      self.conn.send(message)
    except OSError as error:  # Dead or stuck: reading or the deadline tells.
      logging.warning('worker %d takes no message: %r', self.index, error)

  def receive(self) -> Iterator[tuple[worker.Request, worker.Reply]]:
    """Reads what has come; the replies in it and the requests they answer.

    Raises:
      EOFError or OSError if the worker died; anything else if what it sent is
      no reply to a pending request.
    """
    data = os.read(self.conn.fileno(), _READ_BYTES)
    if not data:
      raise EOFError('the worker closed its pipe')
    self._unread += data
    while (message := self._message()) is not None:
      yield self._answered(pickle.loads(message))

  def _message(self) -> bytes | None:
    """Takes the next message from what was read; None if it is not all there.

    Raises:
      ValueError: a length that is no length must not make us wait for it.
    """
    if len(self._unread) < _LENGTH.size:
      return None
    (size,) = _LENGTH.unpack_from(self._unread)
    if not 0 < size <= _MAX_MESSAGE_BYTES:
      raise ValueError(f'a message of {size} bytes')
    end = _LENGTH.size + size
    if len(self._unread) < end:
      return None
    message = bytes(self._unread[_LENGTH.size : end])
    del self._unread[:end]
    return message

  def _answered(self, reply: object) -> tuple[worker.Request, worker.Reply]:
    if not isinstance(reply, worker.Reply):
      raise ValueError(f'got {type(reply).__name__}, expected a Reply')
    request = self.pending.get(reply.id)
    if request is None or request.slot != reply.slot:
      raise ValueError(
          f'reply {reply.id} of slot {reply.slot} answers no pending request'
          f' {reply.error}'.rstrip()
      )
    del self.pending[reply.id]
    self.since = time.monotonic()
    return request, reply

  def exit_code(self) -> int | None:
    """How a dead process ended: -9 for SIGKILL; None while it lives."""
    self._process.join(_KILL_SECONDS)
    return self._process.exitcode

  def hang_up(self) -> None:
    """Closes the pipe, which asks an idle worker to end by itself."""
    if self.conn is not None:
      self.conn.close()

  def end(self, grace_s: float = 0.0) -> None:
    """Ends the process, by force once `grace_s` is over. Safe to repeat."""
    if self._process is not None:
      self._process.join(grace_s)
      if self._process.is_alive():
        with contextlib.suppress(ProcessLookupError, PermissionError):
          os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # It may not lead its own group yet.
        self._process.join(_KILL_SECONDS)
    self.hang_up()
    self._process, self.conn, self.pending = None, None, {}
    self.resets, self.retiring = 0, False

  def resident_mb(self) -> float:
    """Resident memory in MB; 0 without a process or where /proc is absent."""
    try:
      with open(f'/proc/{self.pid}/statm', encoding='ascii') as file:
        pages = int(file.read().split()[1])
    except OSError:
      return 0.0
    return pages * os.sysconf('SC_PAGE_SIZE') / 1e6


def wait(busy: Sequence[WorkerProcess], seconds: float) -> list[WorkerProcess]:
  """Those that have sent something, or ended; none once the time is over.

  `multiprocessing.connection.wait` does the same at ten times the cost, which
  a step of a fast environment would notice.
  """
  # The poller takes no more than 24 days at a time.
  seconds = min(max(0.0, seconds), 3600.0)
  awaited = max(len(process.pending) for process in busy)
  if awaited > 1:
    time.sleep(min(seconds, awaited * _STEP_SECONDS))
  poller = select.poll()
  by_file = {process.conn.fileno(): process for process in busy}
  for number in by_file:
    poller.register(number, select.POLLIN)
  found = poller.poll(math.ceil(1e3 * seconds))
  return [by_file[number] for number, _ in found]


def _limit_blocking(conn: connection.Connection, seconds: float) -> None:
  """Lets a blocked write fail: a stopped peer must not stop us."""
  # The kernel takes no longer time, and 0 for none at all.
  seconds = min(max(seconds, 1e-3), _LONGEST_BLOCK_SECONDS)
  limit = struct.pack('ll', int(seconds), int(seconds % 1 * 1e6))
  with socket.socket(fileno=os.dup(conn.fileno())) as peer:
    peer.settimeout(None)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


@contextlib.contextmanager
def _shielded_start(needs_main: bool) -> Iterator[None]:
  """Keeps Ctrl-C and the caller's `__main__` away from a starting worker.

  A blocked signal stays blocked in the processes started meanwhile. With
  `__main__` in sight multiprocessing would run the training script's module,
  and import JAX, once again in each worker.
  """
  main = sys.modules['__main__']
  mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
  try:
    if not needs_main:
      sys.modules['__main__'] = python_types.ModuleType('__main__')
    yield
  finally:
    sys.modules['__main__'] = main
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
