"""Starts the processes of a plan on this machine and watches over them."""

from __future__ import annotations

from collections.abc import Sequence
import os
import pathlib
import signal
import subprocess
import sys
import time

from launch import plan as plan_lib

_POLL_S = 0.05
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(plan: plan_lib.Plan) -> int:
  """Runs a plan to its end and returns the exit code.

  0: every process ended well. 42: stopped by a signal; the same command goes
  on from the last checkpoint. Otherwise the code of the process that failed
  first. After a signal to the launcher nothing is started again.
  """
  stop = _Stop(plan.grace_s)
  handlers = {number: signal.signal(number, stop) for number in _SIGNALS}
  try:
    for attempt in range(plan.max_restarts + 1):
      code = _run_once(plan, stop)
      if code == plan_lib.DONE or stop.requested:
        return code
      if not plan_lib.may_retry(code):
        _say(f'exit code {code} is a failure, not a preemption: no restart')
        _show_end(plan.processes[0].log)
        return code
      if attempt < plan.max_restarts:
        wait = min(60.0, plan.backoff_s * 2**attempt)
        _say(
            f'exit code {code}: restart {attempt + 1} of {plan.max_restarts} '
            f'in {wait:g} s'
        )
        stop.sleep(wait)
        if stop.requested:
          return code
    _say(f'exit code {code}: gave up after {plan.max_restarts} restarts')
    return code
  finally:
    for number, handler in handlers.items():
      signal.signal(number, handler)


class _Stop:
  """A signal handler that remembers, and passes the signal on."""

  def __init__(self, grace_s: float):
    self.requested = False
    self.children: Sequence[subprocess.Popen] = ()
    self.deadline = float('inf')
    self._grace_s = grace_s

  def __call__(self, number: int, frame: object) -> None:
    del frame
    # The second signal does not wait any longer.
    self.deadline = time.monotonic() + (0 if self.requested else self._grace_s)
    self.requested = True
    for child in self.children:
      _send(child, number)

  def sleep(self, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not self.requested:
      time.sleep(_POLL_S)


def _run_once(plan: plan_lib.Plan, stop: _Stop) -> int:
  children = []
  stop.deadline = float('inf')
  try:
    for process in plan.processes:
      children.append(_start(process))
      stop.children = tuple(children)
    if stop.requested:  # A signal came between two starts.
      stop(signal.SIGTERM, None)
    return _wait(children, stop, plan.grace_s)
  finally:
    stop.children = ()
    for child in children:
      _kill_group(child)


def _start(process: plan_lib.Process) -> subprocess.Popen:
  try:
    process.log.parent.mkdir(parents=True, exist_ok=True)
    with process.log.open('ab') as log:
      # A session of its own: Ctrl-C reaches the child once, through `_Stop`.
      return subprocess.Popen(
          process.argv,
          env={**os.environ, **dict(process.env)},
          stdin=subprocess.DEVNULL,
          stdout=log,
          stderr=subprocess.STDOUT,
          start_new_session=True,
      )
  except OSError as error:
    raise plan_lib.StartError(
        f'{process.argv[0]} with the log {process.log} cannot be started'
        f' ({error}); give another --run_dir or --python'
    ) from error


def _wait(
    children: Sequence[subprocess.Popen], stop: _Stop, grace_s: float
) -> int:
  """Waits for all; the first failure ends the others."""
  first = plan_lib.DONE
  deadline = float('inf')
  while True:
    codes = [child.poll() for child in children]
    failed = [_exit_code(code) for code in codes if code]
    if failed and first == plan_lib.DONE:
      first = failed[0]
      deadline = time.monotonic() + grace_s
      for child in children:
        _send(child, signal.SIGTERM)
    if None not in codes:
      return first
    if time.monotonic() > min(deadline, stop.deadline):
      for child in children:
        _kill_group(child)
    time.sleep(_POLL_S)


def _exit_code(code: int) -> int:
  """As a shell gives it: 128 + n for a process killed by signal n."""
  return plan_lib.KILLED - code if code < 0 else code


def _send(child: subprocess.Popen, number: int) -> None:
  if child.poll() is None:
    child.send_signal(number)


def _kill_group(child: subprocess.Popen) -> None:
  """Kills what is left of a child and of the workers it started."""
  try:
    os.killpg(child.pid, signal.SIGKILL)
  except ProcessLookupError:
    pass
  child.wait()


def _say(message: str) -> None:
  print(f'launch: {message}', file=sys.stderr, flush=True)


def _show_end(log: pathlib.Path, lines: int = 20) -> None:
  end = log.read_text(errors='replace', encoding='utf-8').splitlines()[-lines:]
  print(f'--- the end of {log}', *end, sep='\n', file=sys.stderr, flush=True)
