"""Trains: `python -m hgpo_jax.train --gin_file=... --run_dir=...`.

The same command again goes on with a run that was stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
import logging
import pathlib
import signal
import sys
from typing import Any

from absl import app
from absl import flags
from absl import logging as absl_logging

from hgpo_jax import config

_RUN_DIR = flags.DEFINE_string('run_dir', None, 'Folder of the run.')
_GIN_FILE = flags.DEFINE_multi_string(
    'gin_file', [], 'Gin files, by path or by name in gin/; repeatable.'
)
_GIN_BINDINGS = flags.DEFINE_multi_string(
    'gin_bindings', [], 'Bindings such as "HGPO.alpha = 0.5"; repeatable.'
)
_DRY_RUN = flags.DEFINE_bool(
    'dry_run', False, 'Check everything, print the arithmetic and stop.'
)

PREEMPTED = 42


def _ours(record: logging.LogRecord) -> bool:
  """Libraries tell their news at INFO; keep their warnings only."""
  return record.levelno >= logging.WARNING or 'hgpo_jax' in record.pathname


def _stop(signum: int, frame: Any) -> None:
  """Ends the run so that the launcher starts it again where it was saved."""
  del frame
  absl_logging.warning('stopped by signal %d; the same command goes on', signum)
  raise SystemExit(PREEMPTED)


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}')
  absl_logging.get_absl_handler().addFilter(_ours)
  # Here, since they import jax; --help needs none of it.
  from hgpo_jax.experiment import loop
  from hgpo_jax.experiment import plan
  from hgpo_jax.experiment import spec as spec_lib

  try:
    spec = config.load(
        _GIN_FILE.value, _GIN_BINDINGS.value, root=spec_lib.Experiment
    )
    arithmetic = plan.check(spec)
  except (ValueError, OSError, ImportError, KeyError) as error:
    sys.exit(f'error: {error}')
  print(arithmetic, flush=True)
  if _DRY_RUN.value:
    return
  if not _RUN_DIR.value:
    raise app.UsageError('--run_dir is required')
  signal.signal(signal.SIGTERM, _stop)
  run_dir = pathlib.Path(_RUN_DIR.value)
  loop.train(spec, run_dir)
  print(f'\n{loop.summary(run_dir)}\n\nrun folder: {run_dir}')


if __name__ == '__main__':
  app.run(main)
