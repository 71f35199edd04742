"""The folder of a run: whether it can be used, and what a finished one says."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import fcntl
import json
import os
import pathlib
import socket
import tempfile
from typing import TextIO

from absl import logging

from hgpo_jax import config
from hgpo_jax.experiment import evaluate
from hgpo_jax.experiment import spec as spec_lib
from hgpo_jax.io import metrics


def finished(spec: spec_lib.Experiment, run_dir: pathlib.Path) -> bool:
  """Whether the last evaluation of the run is in its metrics."""
  try:
    return metrics.read(run_dir)[-1]['iteration'] == spec.iterations
  except (OSError, ValueError, LookupError, TypeError):  # Absent, or damaged.
    return False


def check_length(spec: spec_lib.Experiment, done: int) -> None:
  if done > spec.iterations:
    raise config.ConfigError(
        f'Experiment.iterations is {spec.iterations}, but the run has a'
        f' checkpoint after {done} iterations; give at least {done}, or'
        ' another --run_dir'
    )


def check_writable(run_dir: pathlib.Path) -> None:
  """Makes the folder; fails before anything has started."""
  try:
    run_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=run_dir):
      pass
  except OSError as error:
    raise OSError(
        f'--run_dir={run_dir} cannot be written to ({error}); give a folder'
        ' that can'
    ) from error


@contextlib.contextmanager
def claimed(run_dir: pathlib.Path) -> Iterator[None]:
  """Keeps the folder for this process; the kernel frees it however it ends.

  Raises:
    OSError: another process trains in it.
  """
  path = run_dir / '.lock'
  with contextlib.ExitStack() as stack:
    while True:
      file = stack.enter_context(open(path, 'a+', encoding='utf-8'))
      _lock(file, run_dir)
      if _is_at(file, path):
        break
    file.truncate(0)
    print(f'process {os.getpid()} on {socket.gethostname()}', file=file)
    file.flush()
    try:
      yield
    finally:
      path.unlink(missing_ok=True)


def _is_at(file: TextIO, path: pathlib.Path) -> bool:
  """False if its last owner has removed the file since it was opened."""
  try:
    return os.path.samestat(os.fstat(file.fileno()), path.stat())
  except FileNotFoundError:
    return False


def _lock(file: TextIO, run_dir: pathlib.Path) -> None:
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    file.seek(0)
    owner = file.read().strip() or 'another process'
    raise OSError(
        f'{owner} trains in --run_dir={run_dir} at this moment; wait for its'
        ' end, or give another --run_dir'
    ) from error
  except OSError as error:  # A file system without locks.
    logging.warning(
        '%s: nothing keeps a second run out of it: %s', run_dir, error
    )


def summary(run_dir: pathlib.Path) -> str:
  """The table of a finished run: its first and its last evaluation."""
  paths = sorted((run_dir / 'eval').glob('iteration_*.json'))
  if not paths:
    return f'{run_dir / "eval"} holds no evaluation any more'
  chosen = dict.fromkeys((paths[0], paths[-1]))
  results = {}
  for path in chosen:
    iteration = json.loads(path.read_text(encoding='utf-8'))['iteration']
    name = 'before training' if iteration == 0 else f'after {iteration}'
    results[name] = evaluate.load(path)
  return evaluate.table(results)
