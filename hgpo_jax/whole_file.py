"""Files that are there whole or not at all, however the process ends."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
import pathlib


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
  """Yields a path beside `path` to write to; it takes its place at the end.

  After an error `path` is as it was. Its folder is made if it is absent. For
  one writer at a time.
  """
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(path.name + '.partial')
  try:
    yield partial
    os.replace(partial, path)
  finally:
    partial.unlink(missing_ok=True)
