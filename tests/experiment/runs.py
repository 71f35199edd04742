"""Runs of the toy experiment, in this process or in one of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from typing import Any

from absl import flags

from hgpo_jax import config
from hgpo_jax import train as train_lib
from hgpo_jax.experiment import loop
from hgpo_jax.experiment import spec as spec_lib
from hgpo_jax.io import metrics

GIN = pathlib.Path(__file__).with_name('boxes.gin')
_ROOT = GIN.parents[2]
_DEVICES = re.compile(r'--xla_force_host_platform_device_count=\d+')


def load(policy: pathlib.Path, *bindings: str) -> spec_lib.Experiment:
  """The experiment of boxes.gin with `bindings`."""
  return config.load([str(GIN)], [_folder(policy), *bindings])


def train(policy: pathlib.Path, run_dir: pathlib.Path, *bindings: str) -> None:
  """Trains in this process."""
  loop.train(load(policy, *bindings), run_dir)


def main(*arguments: str) -> str:
  """Runs the entry point here; the message that it ends with, '' if none."""
  flags.FLAGS(['train', *arguments])
  try:
    train_lib.main(['train'])
  except SystemExit as end:
    return str(end.code)
  finally:
    flags.FLAGS.unparse_flags()
    for name in ('gin_file', 'gin_bindings', 'run_dir', 'dry_run'):
      flags.FLAGS[name].unparse()
  return ''


def arguments(
    policy: pathlib.Path, run_dir: pathlib.Path | None, *bindings: str
) -> list[str]:
  """Command-line flags of a run."""
  found = [f'--gin_file={GIN}']
  found += [f'--gin_bindings={b}' for b in (_folder(policy), *bindings)]
  return found + ([f'--run_dir={run_dir}'] if run_dir else [])


def lines(run_dir: pathlib.Path) -> list[dict[str, Any]]:
  """The metrics, less those that differ from run to run."""
  loose = ('time/', 'memory/', 'env/')
  return [
      {name: v for name, v in line.items() if not name.startswith(loose)}
      for line in metrics.read(run_dir)
  ]


def files(run_dir: pathlib.Path, folder: str) -> dict[str, bytes]:
  """Name and content of the files of a folder of the run."""
  return {p.name: p.read_bytes() for p in (run_dir / folder).iterdir()}


class Process:
  """`python -m hgpo_jax.<module>` with one device."""

  def __init__(self, module: str, flags_: Sequence[str], log: pathlib.Path):
    xla_flags = _DEVICES.sub('', os.environ.get('XLA_FLAGS', ''))
    self._log = log
    with open(log, 'w', encoding='utf-8') as out:
      self._process = subprocess.Popen(
          [sys.executable, '-m', f'hgpo_jax.{module}', *flags_],
          cwd=_ROOT,
          env={**os.environ, 'XLA_FLAGS': xla_flags},
          stdout=out,
          stderr=subprocess.STDOUT,
      )

  @property
  def output(self) -> str:
    """Everything it has printed and logged so far."""
    return self._log.read_text(encoding='utf-8')

  def wait(self, timeout_s: float = 300.0) -> int:
    """Waits for the end; returns the exit code."""
    try:
      return self._process.wait(timeout_s)
    finally:
      self._process.kill()

  def wait_until(self, happened: Callable[[], bool], timeout_s=300.0) -> None:
    """Waits for something that the process does."""
    deadline = time.monotonic() + timeout_s
    while not happened():
      if self._process.poll() is not None or time.monotonic() > deadline:
        self._process.kill()
        raise AssertionError(f'it did not happen:\n{self.output}')
      time.sleep(0.002)

  def stop(self, number: signal.Signals) -> int:
    """Sends a signal to the process alone; all its descendants must end too.

    Returns the exit code.
    """
    family = _descendants(self._process.pid)
    self._process.send_signal(number)
    code = self.wait()
    deadline = time.monotonic() + 30.0
    while left := [pid for pid in family if _lives(pid)]:
      assert time.monotonic() < deadline, f'processes left behind: {left}'
      time.sleep(0.02)
    return code


def _folder(policy: pathlib.Path) -> str:
  return f'PolicySource.folder = {str(policy)!r}'


def _descendants(pid: int) -> list[int]:
  try:
    text = pathlib.Path(f'/proc/{pid}/task/{pid}/children').read_text()
  except OSError:
    return []
  children = [int(child) for child in text.split()]
  return children + [pid for c in children for pid in _descendants(c)]


def _lives(pid: int) -> bool:
  try:
    state = pathlib.Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1]
  except OSError:
    return False
  return state.split()[0] != 'Z'
