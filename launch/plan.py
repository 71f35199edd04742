"""What a launch will do, as plain data.

A target builds a `Plan` from a `Request` and touches nothing. `--dry_run`
prints the plan; a submit executes the same object.
"""

from __future__ import annotations

import dataclasses
import pathlib
import shlex

# What the exit code of a training process means.
DONE = 0
PREEMPTED = 42
KILLED = 128  # and above: 128 + the number of the signal


class StartError(RuntimeError):
  """A process could not be started at all; says what to change."""


def may_retry(code: int) -> bool:
  """Whether the same command may succeed if started again.

  Preempted and killed processes may; any other failure is a bug, which would
  only come again.
  """
  return code == PREEMPTED or code >= KILLED


@dataclasses.dataclass(frozen=True)
class Request:
  """What the user asks for, whatever the target.

  Attributes:
    run_dir: where the run keeps its files; the same folder resumes the run.
    gin_files: names of gin files, in order.
    gin_bindings: lines of gin that override the files.
    max_restarts: how often a preempted or killed run is started again.
    python: the interpreter that runs the training.
    module: what it runs.
    extra: further arguments, passed on as they are.
  """

  run_dir: pathlib.Path
  gin_files: tuple[str, ...]
  gin_bindings: tuple[str, ...] = ()
  max_restarts: int = 20
  python: str = 'python3'
  module: str = 'hgpo_jax.train'
  extra: tuple[str, ...] = ()

  def argv(self) -> tuple[str, ...]:
    """The command of one training process."""
    return (
        self.python,
        '-m',
        self.module,
        f'--run_dir={self.run_dir}',
        *(f'--gin_file={name}' for name in self.gin_files),
        *(f'--gin_bindings={line}' for line in self.gin_bindings),
        *self.extra,
    )


@dataclasses.dataclass(frozen=True)
class Process:
  """One process: its command, what it adds to the environment, its log."""

  argv: tuple[str, ...]
  env: tuple[tuple[str, str], ...]
  log: pathlib.Path


@dataclasses.dataclass(frozen=True)
class Plan:
  """Processes that live and die together.

  Attributes:
    target: name of the target that made the plan.
    processes: started together; the first that fails ends all.
    max_restarts: restarts of the whole, after the first start.
    grace_s: seconds between SIGTERM and SIGKILL, for a checkpoint.
    backoff_s: seconds before the first restart; doubles, up to 60.
  """

  target: str
  processes: tuple[Process, ...]
  max_restarts: int
  grace_s: float = 30.0
  backoff_s: float = 1.0

  def render(self) -> str:
    """The plan as shell commands."""
    lines = [f'# target {self.target}, at most {self.max_restarts} restarts']
    for process in self.processes:
      env = [f'{key}={shlex.quote(value)}' for key, value in process.env]
      command = ' '.join([*env, shlex.join(process.argv)])
      lines.append(f'{command} >>{shlex.quote(str(process.log))} 2>&1')
    return '\n'.join(lines)
