"""What runs in an environment worker: one process, many slots, one pipe.

The first message is `(spec, slots)`; every later one is a list of `Request`s,
answered in order, each by its own `Reply` as soon as it is known, or a
`Prepare`, which is not answered: the worker does it while it has nothing else
to do. The worker ends when the pipe closes, and dies with its parent even while
an environment hangs. An environment's exception is an answer, never the end of
the worker.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
import dataclasses
import fcntl
import multiprocessing
from multiprocessing import connection
import os
import signal
import sys
import traceback

from hgpo_jax import types
from hgpo_jax.envs import base
from hgpo_jax.envs import counters

# The id that answers the first message; requests count from START + 1.
START = 0
_MAX_ERROR_CHARS = 2000
# Squares of rewards, and sums over a batch of them, are finite in float32.
_LARGEST = 1e15


@dataclasses.dataclass(frozen=True)
class Request:
  """Resets `slot` to `task` or, without a task, acts in it.

  Attributes:
    id: unique among all requests of a pool; the reply repeats it.
    slot: which environment.
    task: what to reset to; None for a step.
    action: the command of a step.
  """

  id: int
  slot: int
  task: types.Task | None = None
  action: str = ''


@dataclasses.dataclass(frozen=True)
class Reply:
  """Answers the request with the same id.

  Attributes:
    id: id of the request, or `START`.
    slot: slot of the request; -1 for `START`.
    task_id: task that the slot plays; '' for `START`.
    result: what the environment answered; None for `START` and errors.
    error: what went wrong, '' when nothing did.
    counts: what environments counted since the last reply, see `counters`.
  """

  id: int
  slot: int = -1
  task_id: str = ''
  result: types.StepResult | None = None
  error: str = ''
  counts: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Prepare:
  """Tasks that the slots will soon be reset to, most urgent first."""

  tasks: tuple[types.Task, ...]


def main(conn: connection.Connection) -> None:
  """Serves `conn` until it closes. Never returns: ends the process.

  Native libraries of environments cannot be unloaded safely, so the process
  ends without running the interpreter's own clean-up.
  """
  _detach()
  slots: dict[int, _Slot] = {}
  try:
    spec, indices = conn.recv()
    for index in indices:
      slots[index] = _Slot(spec)
    conn.send(Reply(START, counts=counters.take()))
    _serve(conn, slots, getattr(spec, 'prepare', None))
  except (EOFError, ConnectionError):
    pass  # The parent closed the pipe, or is gone.
  except BaseException as error:  # pylint: disable=broad-except
    _send_last(conn, Reply(START, error=describe(error)))
  finally:
    for slot in slots.values():
      slot.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _serve(
    conn: connection.Connection,
    slots: dict[int, _Slot],
    prepare: Callable[[types.Task], None] | None,
) -> None:
  ahead: collections.deque[types.Task] = collections.deque()
  while True:
    if ahead and prepare and not conn.poll():
      _prepare(prepare, ahead.popleft())
      continue
    message = conn.recv()
    if isinstance(message, Prepare):
      ahead = collections.deque(message.tasks)
      continue
    for request in message:
      conn.send(slots[request.slot].answer(request))


def _prepare(prepare: Callable[[types.Task], None], task: types.Task) -> None:
  try:
    prepare(task)
  except BaseException:  # pylint: disable=broad-except
    counters.add('prepare_errors')  # The reset to this task says what it is.


def _send_last(conn: connection.Connection, reply: Reply) -> None:
  try:
    conn.send(reply)
  except OSError:
    pass  # Nobody is left to read it.


def _detach() -> None:
  """Leaves the terminal to the parent, and ties this life to the parent's.

  In a session of its own the worker gets no Ctrl-C, and one signal to its
  process group also reaches helpers that environments started. The closing
  pipe ends an idle worker, but one that hangs, or is stopped, reads nothing:
  the kernel kills it (Linux) when the parent's end of the sentinel closes,
  which happens however the parent ends.
  """
  os.setsid()
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  sentinel = multiprocessing.parent_process().sentinel
  if hasattr(fcntl, 'F_SETSIG'):
    fcntl.fcntl(sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(sentinel, fcntl.F_GETFL)
    fcntl.fcntl(sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)
  if connection.wait([sentinel], timeout=0):  # Closed before it was watched.
    os._exit(0)


class _Slot:
  """One live environment and where its episode stands."""

  def __init__(self, spec: base.EnvSpec):
    self._spec = spec
    self._env: base.Env | None = spec.make()
    self._task: types.Task | None = None
    self._steps = 0

  def answer(self, request: Request) -> Reply:
    """Does what `request` asks; an error drops the episode and its env."""
    task = request.task or self._task
    task_id = task.task_id if task else ''
    try:
      result = self._act(request)
      check_result(result)
      return Reply(
          request.id, request.slot, task_id, result, counts=counters.take()
      )
    except BaseException as error:  # pylint: disable=broad-except
      # Even sys.exit() of one environment must not end the others.
      what = 'reset' if request.task else f'step {self._steps}'
      self.close()
      where = f'{what} of task {task_id!r} of {type(self._spec).__name__}'
      text = f'{describe(error)} [{where}]'
      return Reply(
          request.id, request.slot, task_id, error=text, counts=counters.take()
      )

  def _act(self, request: Request) -> types.StepResult:
    if request.task is not None:
      self._env = self._env or self._spec.make()
      self._task, self._steps = request.task, 0
      return self._env.reset(request.task)
    if self._env is None or self._task is None:
      raise RuntimeError('step without an episode: reset the slot first')
    self._steps += 1
    return self._env.step(request.action)

  def close(self) -> None:
    """Closes the env, whatever state it is in; the next reset makes one."""
    env, self._env, self._task = self._env, None, None
    try:
      if env is not None:
        env.close()
    except BaseException:  # pylint: disable=broad-except
      traceback.print_exc()


def check_result(result: types.StepResult) -> None:
  """Raises TypeError or ValueError unless `result` keeps the contract."""
  if type(result) is not types.StepResult:
    raise TypeError(
        f'the env returned {type(result).__name__}, expected StepResult'
    )
  texts = (result.observation, result.state_key, result.instruction)
  if not all(isinstance(text, str) for text in texts):
    raise TypeError('observation, state_key and instruction must be str')
  if not isinstance(result.admissible, tuple) or not all(
      isinstance(command, str) for command in result.admissible
  ):
    raise TypeError('admissible must be a tuple of str')
  for name in ('reward', 'score'):
    value = getattr(result, name)
    if not isinstance(value, (int, float)):
      raise TypeError(f'{name} is {value!r}, expected a float')
    if not abs(value) <= _LARGEST:  # nan too; the learner has float32.
      raise ValueError(
          f'{name} is {value!r}, expected a finite number of size at most'
          f' {_LARGEST:g}'
      )
  _check_end(result)


def _check_end(result: types.StepResult) -> None:
  for name in ('terminated', 'truncated'):
    if not isinstance(getattr(result, name), bool):
      raise TypeError(f'{name} is {getattr(result, name)!r}, expected a bool')
  if result.terminated and result.truncated:
    raise ValueError('terminated and truncated are both set; choose one')
  if result.success is not None and not isinstance(result.success, bool):
    raise TypeError(f'success is {result.success!r}, expected bool or None')
  if result.done != (result.success is not None):
    raise ValueError(
        f'success is {result.success!r} while done is {result.done}; expected'
        ' None until the episode ends, and a bool then'
    )


def describe(error: BaseException) -> str:
  """`error` as 'Type: text (file:line)', followed by what caused it."""
  parts = []
  cause: BaseException | None = error
  while cause is not None and len(parts) < 5:
    text = traceback.format_exception_only(type(cause), cause)[-1].strip()
    frames = traceback.extract_tb(cause.__traceback__)
    where = ''
    if frames:
      name = os.path.basename(frames[-1].filename)
      where = f' ({name}:{frames[-1].lineno})'
    parts.append(text + where)
    cause = cause.__cause__ or (
        None if cause.__suppress_context__ else cause.__context__
    )
  return ' <- caused by '.join(parts)[:_MAX_ERROR_CHARS]
