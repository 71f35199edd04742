"""Modules of the installed alfworld package, without what its import does."""

from __future__ import annotations

import functools
import importlib
import os
import tempfile
import types

_DATA = 'ALFWORLD_DATA'


@functools.cache
def load(name: str) -> types.ModuleType:
  """The module `name` of alfworld.

  The first import of the package makes the folder $ALFWORLD_DATA, by default
  one in $HOME, and sets the variable. A home that cannot be written to is no
  reason to fail, and `OfficialGames` reads the variable as the user set it.
  """
  before = os.environ.get(_DATA)
  with tempfile.TemporaryDirectory() as folder:
    os.environ[_DATA] = folder
    try:
      return importlib.import_module(name)
    finally:
      if before is None:
        del os.environ[_DATA]
      else:
        os.environ[_DATA] = before
