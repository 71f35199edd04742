"""The official ALFWorld games: a folder in their layout, or their archive."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import pathlib
import shutil
import tarfile
import tempfile
from typing import Any

from absl import logging

from hgpo_jax import config
from hgpo_jax import types
from hgpo_jax.envs import disk_cache
from hgpo_jax.envs import textworld_game

# Games of the official release json_2.1.1, by split.
COUNTS = {'train': 3553, 'valid_seen': 140, 'valid_unseen': 134}
_RELEASE = 'json_2.1.1'
_PACKAGE_DEFAULT = '~/.cache/alfworld'
# Games of these kinds are in no list of the published protocol.
_EXCLUDED = ('movable', 'Sliced')


@dataclasses.dataclass(frozen=True)
class OfficialSplit:
  """Game files of one folder of the official layout, sorted by path."""

  name: str
  paths: tuple[str, ...]

  def __len__(self) -> int:
    return len(self.paths)

  def __getitem__(self, index: int) -> types.Task:
    if not 0 <= index < len(self):
      raise IndexError(
          f'task {index} of split {self.name!r} with {len(self)} tasks'
      )
    path = self.paths[index]
    kind = path.split('/')[1].split('-')[0]
    return types.Task(self.name, index, path, 0, kind)


@config.configurable
@dataclasses.dataclass(frozen=True)
class OfficialGames:
  """The official ALFWorld games, read from disk (never downloaded).

  Task type and split come from the path, so `traj_data.json` is not needed.

  Attributes:
    folder: the folder json_2.1.1 that holds train/, valid_seen/ and
      valid_unseen/, or the folder that holds it, or a .tar.xz of it (unpacked
      once into the user's cache folder); '' for `$ALFWORLD_DATA`.
    any_count: accept other numbers of games than the official ones.
  """

  folder: str = config.may_change('')
  any_count: bool = False

  def __post_init__(self) -> None:
    if not self._given:
      raise ValueError(
          'OfficialGames.folder is not given, and ALFWORLD_DATA is not set;'
          f' give the folder {_RELEASE} of the official data, or a .tar.xz of'
          ' it (nothing is downloaded)'
      )

  @property
  def _given(self) -> str:
    named = os.environ.get('ALFWORLD_DATA', '')
    # The package sets it, to a folder that it makes, wherever it is imported.
    if named == os.path.expanduser(_PACKAGE_DEFAULT):
      named = named if os.path.isdir(os.path.join(named, _RELEASE)) else ''
    return self.folder or named

  @property
  def root(self) -> pathlib.Path:
    """The folder that holds the splits; unpacks an archive if need be."""
    return _root(self._given)

  def check(self) -> None:
    if not pathlib.Path(self._given).expanduser().exists():
      raise ValueError(
          f'OfficialGames.folder = {self._given!r} does not exist; give the'
          f' folder {_RELEASE} of the official data, or a .tar.xz of it'
      )
    for name, expected in COUNTS.items():
      found = len(_game_paths(self.root, name))
      if not found or (found != expected and not self.any_count):
        raise ValueError(
            f'OfficialGames.folder = {self._given!r} holds {found} games in'
            f' {name}/, expected {expected}; give the folder {_RELEASE} of the'
            ' official data, or set OfficialGames.any_count = True for a part'
            ' of it'
        )

  def split(self, name: str) -> OfficialSplit:
    if name not in COUNTS:
      raise KeyError(
          f'unknown split {name!r} of OfficialGames; known: {tuple(COUNTS)}'
      )
    return OfficialSplit(name, _game_paths(self.root, name))

  def load(self, task: types.Task) -> dict[str, Any]:
    return textworld_game.read_game(self.root / task.task_id)


@functools.lru_cache(maxsize=8)
def _root(given: str) -> pathlib.Path:
  path = pathlib.Path(given).expanduser()
  if path.is_file():
    path = _unpacked(path)
  nested = path / _RELEASE
  return nested if nested.is_dir() else path


@functools.lru_cache(maxsize=8)
def _game_paths(root: pathlib.Path, split: str) -> tuple[str, ...]:
  """Paths of a split's playable games under `root`, sorted."""
  found = sorted(
      p.relative_to(root).as_posix()
      for p in (root / split).glob('*/*/game.tw-pddl')
  )
  kept = [p for p in found if not any(word in p for word in _EXCLUDED)]
  if len(kept) > COUNTS[split]:
    # A full download has games that no plan solves; the files say so.
    games = {p: textworld_game.read_game(root / p) for p in kept}
    kept = [p for p, game in games.items() if game.get('solvable', True)]
  return tuple(kept)


def _unpacked(archive: pathlib.Path) -> pathlib.Path:
  """The folder an archive is unpacked in, named by the archive's content.

  Raises:
    ValueError: it is no archive, or there is no room for its games.
  """
  digest = hashlib.sha256(archive.read_bytes()).hexdigest()[:16]
  target = disk_cache.user_folder() / 'alfworld' / digest
  if target.is_dir():
    return target
  logging.info('unpacking %s into %s', archive, target)
  try:
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = tempfile.mkdtemp(prefix='partial-', dir=target.parent)
    try:
      with tarfile.open(archive) as file:
        file.extractall(partial, filter='data')
      os.chmod(partial, 0o755)
      with contextlib.suppress(OSError):  # Another run was first.
        os.rename(partial, target)
    finally:
      shutil.rmtree(partial, ignore_errors=True)
    if not target.is_dir():
      raise OSError(f'{target} cannot be made')
  except (OSError, EOFError, tarfile.TarError) as error:
    raise ValueError(
        f'OfficialGames.folder = {str(archive)!r} cannot be unpacked into'
        f' {target}: {error}; unpack it yourself and give the folder, or set'
        ' XDG_CACHE_HOME to a folder with 400 MB of room'
    ) from error
  return target
