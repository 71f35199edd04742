"""A folder of small results that are slow to make, shared by any processes.

An entry is named by the hash of everything it depends on, so it never gets
out of date, and whoever writes it writes the same. It is written under another
name and renamed, so a reader sees all of it or nothing; it carries the hash of
its own content, so what a crash or a bad disk left behind is found and made
again. A cache that cannot be read or written costs time, never a result.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import functools
import hashlib
import os
import pathlib
import uuid

from absl import logging

from hgpo_jax.envs import counters

_HASH_BYTES = hashlib.sha256().digest_size


def user_folder() -> pathlib.Path:
  """Where this package keeps things: `$XDG_CACHE_HOME` or `~/.cache`."""
  root = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(root) / 'hgpo_jax'


def key(*parts: str) -> str:
  """The name of an entry that depends on `parts`, in order."""
  digest = hashlib.sha256()
  for part in parts:
    data = part.encode()
    digest.update(len(data).to_bytes(8, 'big') + data)
  return digest.hexdigest()


class DiskCache:
  """Entries in `folder`.

  Counts `<name>_hits`, `<name>_misses`, `<name>_corrupt` and `<name>_errors`:
  the disk is full, or the folder cannot be read or written.
  """

  def __init__(self, folder: str | os.PathLike[str], name: str):
    self.folder = pathlib.Path(folder)
    self._name = name

  def get(self, entry: str, make: Callable[[], bytes]) -> bytes:
    """The content of `entry`: what was kept of it, or what `make` returns."""
    content = self._read(entry)
    if content is None:
      content = make()
      self._write(entry, content)
    return content

  def path(self, entry: str) -> pathlib.Path:
    """The file of an entry."""
    return self.folder / entry[:2] / entry

  def _read(self, entry: str) -> bytes | None:
    path = self.path(entry)
    try:
      data = path.read_bytes()
    except FileNotFoundError:
      counters.add(f'{self._name}_misses')
      return None
    except OSError as error:
      self._trouble(error)
      return None
    digest, content = data[:_HASH_BYTES], data[_HASH_BYTES:]
    if hashlib.sha256(content).digest() != digest:
      counters.add(f'{self._name}_corrupt')
      logging.warning('%s is damaged and will be made again', path)
      return None
    counters.add(f'{self._name}_hits')
    return content

  def _write(self, entry: str, content: bytes) -> None:
    path = self.path(entry)
    partial = path.with_name(f'.partial-{uuid.uuid4().hex}')
    try:
      path.parent.mkdir(parents=True, exist_ok=True)
      partial.write_bytes(hashlib.sha256(content).digest() + content)
      os.replace(partial, path)
    except OSError as error:
      self._trouble(error)
      with contextlib.suppress(OSError):
        partial.unlink(missing_ok=True)

  def _trouble(self, error: OSError) -> None:
    counters.add(f'{self._name}_errors')
    _warn_once(str(self.folder), str(error))


@functools.cache
def _warn_once(folder: str, error: str) -> None:
  # Entries have paths of their own: the text before them tells them apart.
  logging.warning(
      'the cache %s cannot be used: %s; going on without it', folder, error
  )
