"""Trains: `python -m hgpo_jax.train --gin_file=... --run_dir=...`.

The same command again goes on with a run that was stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
import os
import pathlib
import signal
import sys
from typing import Any, TYPE_CHECKING

from absl import app
from absl import flags

from hgpo_jax import config
from hgpo_jax import entry

if TYPE_CHECKING:  # It imports jax, which --help does not need.
  from hgpo_jax.experiment import spec as spec_lib

flags.adopt_module_key_flags(entry)
_RUN_DIR = flags.DEFINE_string('run_dir', None, 'Folder of the run.')
_DRY_RUN = flags.DEFINE_bool(
    'dry_run', False, 'Check everything, print the arithmetic and stop.'
)

# Exit code that asks the launcher to start the same command again.
PREEMPTED = 42
_EXIT_CODES = {signal.SIGTERM: PREEMPTED, signal.SIGINT: 128 + signal.SIGINT}


def _stop(signum: int, frame: Any) -> None:
  """Ends the process here and now; its workers end with it.

  The run folder is whole at any moment, so there is nothing to tidy up. An
  exception would be raised in whatever runs now: a callback that swallows it,
  or a library that waits for good for the half it has not done.
  """
  del frame
  name = signal.Signals(signum).name
  text = f'stopped by {name}; the same command goes on from its last checkpoint'
  os.write(2, f'\n{text}\n'.encode())
  os._exit(_EXIT_CODES[signum])


def _memory(spec: spec_lib.Experiment) -> str:
  """The line on the devices' memory; ends the process if it cannot be enough.

  A dry run only says so: it may run elsewhere than the training.
  """
  from hgpo_jax.experiment import footprint

  try:
    return footprint.check(spec)
  except ValueError as error:
    if _DRY_RUN.value:
      return f'memory       {error}'
    sys.exit(f'error: {error}')


def main(argv: Sequence[str]) -> None:
  for number in _EXIT_CODES:
    signal.signal(number, _stop)
  entry.refuse_arguments(argv)
  if not _DRY_RUN.value and not _RUN_DIR.value:
    raise app.UsageError('--run_dir is required')
  spec, arithmetic = entry.load()
  print(f'{arithmetic}\n{_memory(spec)}', flush=True)
  from hgpo_jax.experiment import loop
  from hgpo_jax.experiment import run_folder

  run_dir = _RUN_DIR.value and pathlib.Path(_RUN_DIR.value)
  try:
    if _DRY_RUN.value:
      if run_dir:
        config.check_resume(run_dir)
      return
    loop.train(spec, run_dir)
  except loop.FAILURES as error:
    sys.exit(f'error: {error}')
  print(f'\n{run_folder.summary(run_dir)}\n\nrun folder: {run_dir}')


if __name__ == '__main__':
  app.run(main)
