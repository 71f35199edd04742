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
    EOFError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
    gzip.BadGzipFile,
    zlib.error,
)
_TEXTS = ('prompt_text', 'response_text')
# What JSON must hold where a record is annotated so; others have checks of
# their own.
_KINDS = {'int': (int,), 'float': (int, float), 'bool': (bool,), 'str': (str,)}


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
        # A lone surrogate becomes its JSON escape, which reads back as it was.
        out.write(line.encode('utf-8', 'backslashreplace') + b'\n')


def load(path: str | os.PathLike[str]) -> list[types.Trajectory]:
  """Reads what `save` wrote; equal field by field to what was saved.

  Raises:
    ValueError: the file is cut off or a line is not an episode, with every
      field of the type that it has in `types`.
  """
  trajectories = []
  try:
    with gzip.open(path, 'rt', encoding='utf-8') as lines:
      for line in lines:
        trajectories.append(_trajectory(json.loads(line)))
  except _UNREADABLE as error:
    raise ValueError(
        f'{os.fspath(path)}: episode {len(trajectories) + 1} cannot be read '
        f'({_reason(error)}); expected a whole gzipped file with one JSON episode a '
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


def _reason(error: Exception) -> str:
  return str(error) if type(error) is ValueError else repr(error)


def _trajectory(record: Any) -> types.Trajectory:
  _check(record, types.Trajectory, 'the episode')
  if record['end_reason'] not in types.END_REASONS:
    raise ValueError(
        f'its end_reason is {record["end_reason"]!r}, expected one of'
        f' {types.END_REASONS}'
    )
  if not isinstance(record['steps'], list):
    raise ValueError('its steps are not a list')
  _check(record['task'], types.Task, 'its task')
  steps = tuple(_step(*numbered) for numbered in enumerate(record['steps']))
  task = types.Task(**record['task'])
  return types.Trajectory(**{**record, 'task': task, 'steps': steps})


def _step(index: int, record: Any) -> types.Step:
  if isinstance(record, dict):
    record = {k: v for k, v in record.items() if k not in _TEXTS}
  _check(record, types.Step, f'step {index}')
  for name, dtype in _ARRAYS.items():
    record[name] = np.array(record[name], dtype)
    if record[name].ndim != 1:
      raise ValueError(f'step {index}: {name} is no list of numbers')
    record[name].flags.writeable = False
  return types.Step(**record)


def _check(record: Any, kind: type[Any], what: str) -> None:
  """A value of another type would be taken for what it is not."""
  if not isinstance(record, dict):
    raise ValueError(f'{what} is a JSON {type(record).__name__}, no object')
  fields = {field.name: field for field in dataclasses.fields(kind)}
  if unknown := record.keys() - fields.keys():
    raise ValueError(
        f'{what} has the unknown field {min(unknown)!r}; is the file of another'
        ' version of hgpo_jax?'
    )
  for name, field in fields.items():
    if name not in record:
      if field.default is dataclasses.MISSING:
        raise ValueError(
            f'{what} lacks the field {name!r}; is the file of another version'
            ' of hgpo_jax?'
        )
      continue
    wanted = _KINDS.get(field.type)
    if wanted and type(record[name]) not in wanted:
      raise ValueError(
          f'{what}: {name} is {record[name]!r}, expected {field.type}'
      )
