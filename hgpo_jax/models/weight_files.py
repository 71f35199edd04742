"""The safetensors files of a Hugging Face folder: finding, reading, writing.

A folder holds either `model.safetensors`, or shards and an index that says
which shard holds which tensor. Pickled checkpoints are never opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import contextlib
import json
import math
import os
import pathlib
import types

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

SINGLE = 'model.safetensors'
INDEX = 'model.safetensors.index.json'

_FLOATS = {'F32', 'F16', 'BF16'}
_DTYPES = {
    'float32': np.dtype(np.float32),
    'float16': np.dtype(np.float16),
    'bfloat16': np.dtype(ml_dtypes.bfloat16),
}


class WeightFiles:
  """The tensors of a folder by name; a context manager that keeps files open.

  Opening reads the headers only and checks that every file is whole and that
  the index and the files agree.
  """

  def __init__(self, folder: str | os.PathLike[str]):
    self._folder = pathlib.Path(folder)
    self._stack = contextlib.ExitStack()
    self._handles = {}
    self.file_of: dict[str, str] = {}

  def __enter__(self) -> WeightFiles:
    with self._stack:
      if self._is_sharded():
        self._open_shards()
      else:
        self.file_of = dict.fromkeys(self._open(SINGLE), SINGLE)
      self._stack = self._stack.pop_all()
    return self

  def __exit__(
      self,
      kind: type[BaseException] | None,
      error: BaseException | None,
      trace: types.TracebackType | None,
  ) -> None:
    self._stack.close()

  def read(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor `name` as float32; raises unless it is a float of `shape`.

    One with nan or inf in it is refused too: that file is damaged.
    """
    path = self._folder / self.file_of[name]
    piece = self._handles[self.file_of[name]].get_slice(name)
    found = tuple(piece.get_shape())
    if found != shape:
      raise ValueError(
          f'{path}: tensor {name!r} has shape {found}, but config.json makes'
          f' it {shape}. The weights belong to another config: use the'
          ' config.json that they were saved with.'
      )
    if piece.get_dtype() not in _FLOATS:
      raise ValueError(
          f'{path}: tensor {name!r} has dtype {piece.get_dtype()}, expected'
          f' one of {sorted(_FLOATS)}. Quantized weights are not supported:'
          ' use the unquantized model.'
      )
    tensor = self._handles[self.file_of[name]].get_tensor(name)
    return _finite(tensor.astype(np.float32), f'{path}: tensor {name!r}')

  def _is_sharded(self) -> bool:
    single = (self._folder / SINGLE).exists()
    index = (self._folder / INDEX).exists()
    if single and index:
      raise ValueError(
          f'{self._folder} holds both {SINGLE} and {INDEX}; it is unclear'
          ' which are the weights. Remove the one that is out of date.'
      )
    if single or index:
      return index
    pickled = sorted(p.name for p in self._folder.glob('*.bin'))
    if pickled:
      raise ValueError(
          f'{self._folder} holds only pickled weights ({pickled[0]}), which'
          ' can run code when read. Convert them to safetensors, for example'
          ' with transformers: save_pretrained(folder,'
          ' safe_serialization=True).'
      )
    raise FileNotFoundError(
        f'{self._folder} holds no weights: expected {SINGLE}, or {INDEX} and'
        ' its shards.'
    )

  def _open(self, name: str) -> list[str]:
    """Opens one file; returns the names of its tensors."""
    path = self._folder / name
    try:
      handle = safetensors.safe_open(str(path), framework='numpy')
    except safetensors.SafetensorError as error:
      raise ValueError(
          f'{path} ({path.stat().st_size} bytes) is truncated or damaged:'
          f' {error}. Download or copy it again.'
      ) from error
    self._handles[name] = self._stack.enter_context(handle)
    return list(self._handles[name].keys())

  def _open_shards(self) -> None:
    index = self._folder / INDEX
    weight_map = _read_index(index)
    shards = sorted(set(weight_map.values()))
    missing = [s for s in shards if not (self._folder / s).exists()]
    if missing:
      raise FileNotFoundError(
          f'{index} names {len(shards)} shards, of which {missing} are not in'
          f' {self._folder}. Download the missing files.'
      )
    held = {name: shard for shard in shards for name in self._open(shard)}
    for name in sorted(weight_map.keys() | held.keys()):
      if weight_map.get(name) != held.get(name):
        raise ValueError(
            f'{index} says that tensor {name!r} is in'
            f' {weight_map.get(name, "no shard")}, but it is in'
            f' {held.get(name, "none of the shards")}. The index and the'
            ' shards are from different saves: download the folder again.'
        )
    self.file_of = held


def _read_index(path: pathlib.Path) -> dict[str, str]:
  try:
    weight_map = json.loads(path.read_text(encoding='utf-8'))['weight_map']
  except (json.JSONDecodeError, KeyError, TypeError) as error:
    raise ValueError(
        f'{path} is not an index of safetensors shards (an object with'
        f' "weight_map"): {error!r}. Download it again.'
    ) from error
  outside = [s for s in weight_map.values() if pathlib.Path(s).name != s]
  if outside:
    raise ValueError(
        f'{path} names the shard {outside[0]!r}; a shard must be a file in'
        ' the same folder.'
    )
  return weight_map


def write(
    folder: pathlib.Path,
    shapes: Mapping[str, tuple[int, ...]],
    get: Callable[[str], np.ndarray],
    dtype: str,
    max_shard_bytes: int,
) -> None:
  """Writes one file, or shards of at most `max_shard_bytes` and an index.

  Args:
    folder: an existing folder.
    shapes: shape of each tensor, in the order to write.
    get: gives a tensor by name; called once each, in that order.
    dtype: 'float32', 'float16' or 'bfloat16'.
    max_shard_bytes: a tensor larger than this gets a shard of its own.
  """
  if dtype not in _DTYPES:
    raise ValueError(f'dtype {dtype!r}: expected one of {sorted(_DTYPES)}.')
  kind = _DTYPES[dtype]
  sizes = {n: math.prod(s) * kind.itemsize for n, s in shapes.items()}
  shards = _split(sizes, max_shard_bytes)
  weight_map = {}
  for number, names in enumerate(shards, start=1):
    file_name = f'model-{number:05d}-of-{len(shards):05d}.safetensors'
    file_name = file_name if len(shards) > 1 else SINGLE
    tensors = {n: _cast(n, get(n), kind) for n in names}
    safetensors.numpy.save_file(
        tensors, folder / file_name, metadata={'format': 'pt'}
    )
    weight_map.update(dict.fromkeys(names, file_name))
  if len(shards) > 1:
    index = {
        'metadata': {'total_size': sum(sizes.values())},
        'weight_map': weight_map,
    }
    (folder / INDEX).write_text(
        json.dumps(index, indent=2) + '\n', encoding='utf-8'
    )


def _cast(name: str, tensor: np.ndarray, kind: np.dtype) -> np.ndarray:
  with np.errstate(over='ignore'):  # The check says more.
    cast = np.ascontiguousarray(tensor.astype(kind))
  return _finite(cast, f'tensor {name!r} as {kind.name}')


def _finite(tensor: np.ndarray, what: str) -> np.ndarray:
  if not np.isfinite(tensor).all():
    raise ValueError(
        f'{what} has values that are nan or inf. Take a copy of the weights'
        ' that is whole, or float32 or bfloat16, which hold larger numbers'
        ' than float16.'
    )
  return tensor


def _split(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
  """Names in order, cut before the size of a part would pass the limit."""
  parts, total = [[]], 0
  for name, size in sizes.items():
    if parts[-1] and total + size > limit:
      parts.append([])
      total = 0
    parts[-1].append(name)
    total += size
  return parts
