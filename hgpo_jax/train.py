"""Trains: `python -m hgpo_jax.train --gin_file=... --run_dir=...`.

The same command again goes on with a run that was stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
import pathlib
import signal
import sys
from typing import Any

from absl import app
from absl import flags
from absl import logging

from hgpo_jax import entry

_RUN_DIR = flags.DEFINE_string('run_dir', None, 'Folder of the run.')
_DRY_RUN = flags.DEFINE_bool(
    'dry_run', False, 'Check everything, print the arithmetic and stop.'
)

# Exit code that asks the launcher to start the same command again.
PREEMPTED = 42


def _stop(signum: int, frame: Any) -> None:
  del frame
  logging.warning('stopped by signal %d; the same command goes on', signum)
  raise SystemExit(PREEMPTED)


def main(argv: Sequence[str]) -> None:
  signal.signal(signal.SIGTERM, _stop)
  entry.refuse_arguments(argv)
  spec, arithmetic = entry.load()
  print(arithmetic, flush=True)
  if _DRY_RUN.value:
    return
  if not _RUN_DIR.value:
    raise app.UsageError('--run_dir is required')
  from hgpo_jax.experiment import loop
  from hgpo_jax.experiment import run_folder

  run_dir = pathlib.Path(_RUN_DIR.value)
  try:
    loop.train(spec, run_dir)
  except loop.FAILURES as error:
    sys.exit(f'error: {error}')
  print(f'\n{run_folder.summary(run_dir)}\n\nrun folder: {run_dir}')


if __name__ == '__main__':
  app.run(main)
