"""Episodes of an iteration as gzipped JSONL: one line an episode, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import gzip
import json
import os
from typing import Any
import zlib

import numpy as np

from hgpo_jax import types
from hgpo_jax import whole_file

Decode = Callable[[Sequence[int]], str]

_ARRAYS = {
    'prompt_ids': np.int32,
    'response_ids': np.int32,
    'sampler_logprobs': np.float32,
}
_UNREADABLE = (
    AttributeError,
    EOFError,
    KeyError,
    TypeError,
    ValueError,
    gzip.BadGzipFile,
    zlib.error,
)
_TEXTS = ('prompt_text', 'response_text')


def file_name(iteration: int) -> str:
  """Name of the file of one iteration; sorts by iteration."""
  return f'iteration_{iteration:06d}.jsonl.gz'


def save(
    path: str | os.PathLike[str],
    trajectories: Sequence[types.Trajectory],
    decode: Decode | None = None,
) -> None:
  """Writes `trajectories` to `path`, whole or not at all.

  With `decode` each step also holds `prompt_text` and `response_text`, for
  reading; `load` goes by the ids. Equal episodes make equal bytes.
  """
  with whole_file.replacing(path) as partial, open(partial, 'wb') as raw:
    with gzip.GzipFile('', 'wb', fileobj=raw, mtime=0) as out:
      for trajectory in trajectories:
        line = json.dumps(_record(trajectory, decode), ensure_ascii=False)
        out.write(line.encode() + b'\n')


def load(path: str | os.PathLike[str]) -> list[types.Trajectory]:
  """Reads what `save` wrote; equal field by field to what was saved.

  Raises:
    ValueError: the file is cut off or a line is not an episode.
  """
  trajectories = []
  try:
    with gzip.open(path, 'rt', encoding='utf-8') as lines:
      for line in lines:
        trajectories.append(_trajectory(json.loads(line)))
  except _UNREADABLE as error:
    raise ValueError(
        f'{os.fspath(path)}: episode {len(trajectories) + 1} cannot be read '
        f'({error!r}); expected a whole gzipped file with one JSON episode a '
        'line, as hgpo_jax writes it. Remove the file or write it again.'
    ) from error
  return trajectories


def _record(
    trajectory: types.Trajectory, decode: Decode | None
) -> dict[str, Any]:
  record = _fields(trajectory)
  record['task'] = _fields(trajectory.task)
  record['steps'] = [_step_record(step, decode) for step in trajectory.steps]
  return record


def _step_record(step: types.Step, decode: Decode | None) -> dict[str, Any]:
  record = _fields(step)
  for name, dtype in _ARRAYS.items():
    record[name] = np.asarray(record[name], dtype).tolist()
  if decode is not None:
    record['prompt_text'] = decode(record['prompt_ids'])
    record['response_text'] = decode(record['response_ids'])
  return record


def _fields(record: Any) -> dict[str, Any]:
  return {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}


def _trajectory(record: dict[str, Any]) -> types.Trajectory:
  steps = tuple(_step(step) for step in record['steps'])
  task = types.Task(**record['task'])
  return types.Trajectory(**{**record, 'task': task, 'steps': steps})


def _step(record: dict[str, Any]) -> types.Step:
  fields = {k: v for k, v in record.items() if k not in _TEXTS}
  for name, dtype in _ARRAYS.items():
    fields[name] = np.array(fields[name], dtype)
    fields[name].flags.writeable = False
  return types.Step(**fields)
