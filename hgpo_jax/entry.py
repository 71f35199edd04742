"""What the entry points share: the flags of the configuration, and its load."""

from __future__ import annotations

from collections.abc import Sequence
import logging
import sys
from typing import TYPE_CHECKING

from absl import app
from absl import flags
from absl import logging as absl_logging

from hgpo_jax import config

if TYPE_CHECKING:  # It imports jax, which --help does not need.
  from hgpo_jax.experiment import spec as spec_lib

_GIN_FILE = flags.DEFINE_multi_string(
    'gin_file', [], 'Gin files, by path or by name in gin/; repeatable.'
)
_GIN_BINDINGS = flags.DEFINE_multi_string(
    'gin_bindings', [], 'Bindings such as "HGPO.alpha = 0.5"; repeatable.'
)


def refuse_arguments(argv: Sequence[str]) -> None:
  """Flags only: a word on its own is a flag without its dashes."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}')


def load(
    default: Sequence[str] = (),
    bindings: Sequence[str] = (),
) -> tuple[spec_lib.Experiment, str]:
  """The checked experiment and the arithmetic of its batch.

  Ends the process with one line if anything is wrong with the configuration.

  Args:
    default: gin files to read if none is given by flag.
    bindings: what another flag stands for; they win over --gin_bindings.
  """
  absl_logging.get_absl_handler().addFilter(_ours)
  from hgpo_jax.experiment import arithmetic
  from hgpo_jax.experiment import spec as spec_lib

  files = _GIN_FILE.value or list(default)
  if not files:
    sys.exit('error: --gin_file is missing; give one, as runs/quickstart.gin')
  try:
    given = [*_GIN_BINDINGS.value, *bindings]
    spec = config.load(files, given, root=spec_lib.Experiment)
    return spec, arithmetic.check(spec)
  except (ValueError, OSError, ImportError, KeyError) as error:
    # A KeyError puts its text into quotes.
    text = error.args[0] if isinstance(error, KeyError) else error
    sys.exit(f'error: {text}')


def _ours(record: logging.LogRecord) -> bool:
  """Libraries tell their news at INFO; keep their warnings only.

  Of orbax errors only: it warns of every folder that it opens for reading.
  """
  if 'hgpo_jax' in record.pathname:
    return True
  least = logging.ERROR if 'orbax' in record.pathname else logging.WARNING
  return record.levelno >= least
