"""Files that are there whole or not at all, however the process ends."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import errno
import os
import pathlib
import tempfile


def check(path: str | os.PathLike[str], flag: str) -> None:
  """Whether `replacing` can write there, before the work that it is to hold.

  Raises:
    OSError: it cannot; says which flag to change.
  """
  path = pathlib.Path(path)
  if not path.name or path.is_dir():
    raise IsADirectoryError(f'{flag}={path} is a folder; give a file in it')
  try:
    _refuse_special(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
      pass
  except OSError as error:
    raise OSError(
        f'{flag}={path} cannot be written to ({error}); give a file in a folder'
        ' that can'
    ) from error


def _refuse_special(path: pathlib.Path) -> None:
  """A file that took the place of a device or a pipe would be its end."""
  if path.exists() and not path.is_file() and not path.is_dir():
    raise OSError(errno.EINVAL, 'A device or a pipe, no file', str(path))


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
  """Lets an error of writing say where: of a full disk, none does."""
  try:
    yield
  except OSError as error:
    if error.errno and error.filename is None:
      error.filename = os.fspath(path)
    raise


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
  """Yields a path beside `path` to write to; it takes its place at the end.

  After an error `path` is as it was. Its folder is made if it is absent. For
  one writer at a time.

  Raises:
    OSError: `path` is a device or a pipe, which a file would replace.
  """
  path = pathlib.Path(path)
  _refuse_special(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_name(path.name + '.partial')
  try:
    with naming(path):
      yield partial
      os.replace(partial, path)
  finally:
    partial.unlink(missing_ok=True)
