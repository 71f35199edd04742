"""What a run folder says about how the run was made.

config.gin     every binding; running it makes the same run
operative.gin  every parameter that was read, defaults included
run.json       the configuration as resolved values, its fingerprint, the
               seed, and one entry a start: command, versions, commit, devices
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import datetime
import hashlib
from importlib import metadata
import inspect
import json
import pathlib
import platform
import shlex
import subprocess
import sys
from typing import Any

from hgpo_jax import gin_source
from hgpo_jax import whole_file

_PACKAGES = (
    'hgpo-jax jax jaxlib flax optax orbax-checkpoint numpy transformers '
    'tokenizers textworld alfworld fast-downward-textworld gin-config'
).split()
_MAY_CHANGE = 'may_change_on_resume'


def may_change(default: Any) -> Any:
  """A dataclass field that a resumed run may have another value of.

  For what does not change the numbers of the steps already taken: how many
  iterations in all, what is logged.

    iterations: int = config.may_change(100)
  """
  return dataclasses.field(default=default, metadata={_MAY_CHANGE: True})


def unread(part: Any) -> Mapping[str, str]:
  """What the `unread` of a dataclass says, if it has one; see `config`."""
  told = getattr(type(part), 'unread', None)
  if not (dataclasses.is_dataclass(part) and callable(told)):
    return {}
  result = part.unread()
  names = {field.name for field in dataclasses.fields(part)}
  unknown = {*result, *result.values()} - names
  if unknown:
    raise gin_source.ConfigError(
        f'{type(part).__name__}.unread gives {sorted(unknown)}, which are no'
        f' fields; expected of {sorted(names)}'
    )
  return result


def flatten(root: Any, *, strict_only: bool = False) -> dict[str, Any]:
  """Returns {'Root.part.field': value} over nested dataclasses.

  Args:
    root: an instance of a dataclass.
    strict_only: leave out the fields that may change on resume, and those
      that are not read (`config.configurable`).
  """
  result: dict[str, Any] = {}
  _flatten(type(root).__name__, root, strict_only, result)
  return result


def _flatten(path: str, value: Any, strict_only: bool, result: dict) -> None:
  if dataclasses.is_dataclass(value) and not inspect.isclass(value):
    result[path] = type(value).__name__
    passed_over = unread(value)
    for field in dataclasses.fields(value):
      loose = field.metadata.get(_MAY_CHANGE) or field.name in passed_over
      if not (strict_only and loose):
        child = getattr(value, field.name)
        _flatten(f'{path}.{field.name}', child, strict_only, result)
  elif isinstance(value, Mapping):
    result[path] = 'mapping'
    for key in sorted(value, key=str):
      _flatten(f'{path}[{key!r}]', value[key], strict_only, result)
  elif isinstance(value, (list, tuple)):
    result[path] = f'{len(value)} items'
    for index, item in enumerate(value):
      _flatten(f'{path}[{index}]', item, strict_only, result)
  elif value is None or isinstance(value, (bool, int, float, str)):
    result[path] = value
  elif hasattr(value, '__qualname__'):
    result[path] = f'{value.__module__}.{value.__qualname__}'
  else:
    result[path] = str(value)


def fingerprint(root: Any) -> str:
  """sha256 of the values that must not change on resume."""
  values = flatten(root, strict_only=True)
  return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def write(
    run_dir: pathlib.Path,
    root: Any,
    texts: Mapping[str, str],
    *,
    seed: int | None,
    devices: Sequence[str],
) -> dict[str, Any]:
  """Writes `texts` by name, and run.json; returns what run.json holds."""
  run_dir.mkdir(parents=True, exist_ok=True)
  before = _read(run_dir) or {}
  record = {
      'fingerprint': fingerprint(root),
      'seed': seed,
      'config': flatten(root),
      'attempts': [*before.get('attempts', []), _attempt(devices)],
  }
  for name, content in texts.items():
    with whole_file.replacing(run_dir / name) as partial:
      partial.write_text(content, encoding='utf-8')
  with whole_file.replacing(run_dir / 'run.json') as partial:
    partial.write_text(json.dumps(record, indent=1) + '\n', encoding='utf-8')
  return record


def check_resume(run_dir: pathlib.Path, root: Any) -> bool:
  """Returns whether there is a run to go on with; see `config.check_resume`."""
  record = _read(run_dir)
  if record is None:
    return False
  if record['fingerprint'] == fingerprint(root):
    return True
  old, new = record['config'], flatten(root, strict_only=True)
  loose = set(flatten(root)) - set(new)
  # A field that is younger than the run: its default is what was done before.
  younger = {key for key in new if key not in old and _by_default(root, key)}
  lines = differences(old, new, loose | younger)
  if not lines:
    return True
  raise gin_source.ConfigError(
      f'{run_dir} holds a run of another configuration:\n'
      + '\n'.join(lines)
      + '\nGo on with the old values, or give another --run_dir'
  )


def differences(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    passed_over: Collection[str] = (),
) -> list[str]:
  """A line for each setting, as `flatten` gives them, that has changed."""
  lines = []
  for key in sorted((set(old) | set(new)) - set(passed_over)):
    was, now = old.get(key, '(absent)'), new.get(key, '(absent)')
    if was != now:
      lines.append(f'  {key}: {was!r} in the run, {now!r} now')
  return lines


def _by_default(root: Any, key: str) -> bool:
  """Whether a key of `flatten` is or lies in a field that has its default."""
  value = root
  for name in key.split('.')[1:]:
    usual = defaults(value)
    name, item, _ = name.partition('[')  # Of a sequence or mapping.
    if name not in usual:
      return False
    value = getattr(value, name)
    if value == usual[name]:
      return True
    if item or not dataclasses.is_dataclass(value):
      return False
  return False


def defaults(part: Any) -> dict[str, Any]:
  """What each field of a dataclass has where nobody gives a value."""
  return {
      field.name: field.default
      if field.default_factory is dataclasses.MISSING
      else field.default_factory()
      for field in dataclasses.fields(part)
  }


def _read(run_dir: pathlib.Path) -> dict[str, Any] | None:
  path = run_dir / 'run.json'
  if not path.exists():
    return None
  try:
    record = json.loads(path.read_text(encoding='utf-8'))
    return {**record, **{k: record[k] for k in ('fingerprint', 'config')}}
  except (ValueError, KeyError, TypeError) as error:
    raise gin_source.ConfigError(
        f'{path} is not the record of a run ({error}); give another --run_dir'
    ) from error


def _attempt(devices: Sequence[str]) -> dict[str, Any]:
  now = datetime.datetime.now(datetime.UTC)
  return {
      'started': now.isoformat(timespec='seconds'),
      'command': shlex.join([sys.executable, *sys.orig_argv[1:]]),
      'python': platform.python_version(),
      'platform': platform.platform(),
      'versions': _versions(),
      'git': _git(),
      'devices': list(devices),
  }


def _versions() -> dict[str, str | None]:
  """Versions by name, read from metadata so that nothing heavy is imported."""
  found: dict[str, str | None] = {}
  for name in _PACKAGES:
    try:
      found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
      found[name] = None
  return found


def _git() -> dict[str, Any] | None:
  """The commit of the checkout the code runs from; None outside of one."""
  root = pathlib.Path(__file__).resolve().parent.parent
  if not (root / '.git').exists():
    return None
  try:
    run = lambda *args: subprocess.run(
        ('git', '-C', str(root), *args),
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    ).stdout.strip()
    return {
        'commit': run('rev-parse', 'HEAD'),
        'dirty': bool(run('status', '--porcelain')),
    }
  except (OSError, subprocess.SubprocessError):
    return None
