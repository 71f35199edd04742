"""Reads gin files, with errors that say where and what to write instead.

gin's own parser and binder are used; the walk over the statements is ours, to
know where each binding came from and which one it replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
import difflib
import inspect
import io
import pathlib
import re
import tokenize
from typing import Any

from absl import logging
import gin
from gin import config_parser

from hgpo_jax import gin_parts

# The scopes a binding or a reference may name.
SCOPES = ('train', 'eval')

_PACKAGE = pathlib.Path(__file__).resolve().parent
MACRO = 'gin.macro'


class ConfigError(ValueError):
  """The configuration is wrong; the text says what to change."""

  def __init__(self, message: str):
    super().__init__(message)
    self.message = message


def _search_path() -> tuple[pathlib.Path, ...]:
  """The gin folder: of the installed package, or of the checkout."""
  checkout = _PACKAGE.parent
  folders = [_PACKAGE / 'gin_files']
  # Beside an installed package lies the gin library, also called gin.
  if (checkout / 'setup.py').is_file():
    folders.insert(0, checkout / 'gin')
  return tuple(folder for folder in folders if folder.is_dir())


SEARCH_PATH = _search_path()


def suggest(name: str, known: Iterable[str]) -> str:
  """Returns '; did you mean X?', or the full stop of the sentence."""
  known = sorted(set(known))
  lower = {k.lower(): k for k in known}
  close = difflib.get_close_matches(name.lower(), lower, n=2, cutoff=0.6)
  if not close:
    return '.'
  return f'; did you mean {" or ".join(lower[name] for name in close)}?'


def complete(selector: str, where: str) -> str:
  """Returns the full name of a configurable, 'module.Name'."""
  # gin has no public list of what is registered.
  registry = gin.config._REGISTRY  # pylint: disable=protected-access
  matches = registry.matching_selectors(selector)
  if len(matches) == 1:
    return matches[0]
  if matches:
    raise ConfigError(
        f'{where}: {selector} is ambiguous, it may be any of '
        f'{", ".join(sorted(matches))}; write more of the module'
    )
  names = [
      name.rsplit('.', 1)[-1]
      for name, _ in registry.items()
      if not name.startswith('gin.')
  ]
  if files := _files_with(selector):
    raise ConfigError(
        f'{where}: {selector} is in no gin file given so far; give'
        f' --gin_file={files[0]} too, or include it'
    )
  raise ConfigError(
      f'{where}: no configurable is called {selector}'
      f'{suggest(selector, names)} If it exists, the gin file must import the '
      'module that defines it, as in: import hgpo_jax.advantages.hgpo'
  )


def _files_with(selector: str) -> list[str]:
  """Gin files that import something and refer to a configurable.

  The one that is named after it comes first.
  """
  refers = re.compile(
      rf'^import .*@(\w+/)*{re.escape(selector)}\b', re.M | re.S
  )
  found = [
      path
      for folder in SEARCH_PATH
      for path in folder.rglob('*.gin')
      if refers.search(path.read_text(encoding='utf-8'))
  ]
  found.sort(key=lambda path: (path.stem != selector.lower(), path))
  return [_short(path) for path in found]


def parameters(selector: str) -> tuple[list[str], bool]:
  """Returns the parameters of a configurable, and whether it takes any."""
  found = inspect.signature(gin.get_configurable(selector)).parameters.values()
  anything = any(p.kind is p.VAR_KEYWORD for p in found)
  return [p.name for p in found], anything


def text(key: gin_parts.Key) -> str:
  """Returns a key as it is written in a file."""
  scope, selector, parameter = key
  if selector == MACRO:
    return scope
  name = f'{selector.rsplit(".", 1)[-1]}.{parameter}'
  return f'{scope}/{name}' if scope else name


def parse(
    gin_files: Sequence[str], bindings: Sequence[str]
) -> dict[gin_parts.Key, gin_parts.Binding]:
  """Binds everything and returns what was bound."""
  reader = _Reader()
  for name in gin_files:
    reader.read_whole(name, '--gin_file')
  for line in bindings:
    reader.read(io.StringIO(line), f'--gin_bindings {line!r}', ())
  for part, count, by in gin_parts.drop_replaced(reader.bound, reader.replaced):
    logging.info(
        'config: %d bindings of %s are dropped: %r (%s) is there instead',
        *(count, part.rsplit('.', 1)[-1], by.value, by.where),
    )
  for key, binding in reader.bound.items():
    gin.bind_parameter(key, binding.value)
  return reader.bound


class _Delegate(gin.config.ParserDelegate):
  """Adds a helpful error to references that name nothing."""

  where = ''

  def configurable_reference(self, scoped_selector: str, evaluate: bool) -> Any:
    *scopes, selector = scoped_selector.split('/')
    complete(selector, self.where)
    _check_scopes(scopes, scoped_selector, self.where)
    return super().configurable_reference(scoped_selector, evaluate)


class _Reader:
  """Walks files, includes and bindings in order.

  Attributes:
    bound: the last binding of each key, in the order in which they were made.
    replaced: keys that were bound again, with what they were bound to before.
  """

  def __init__(self):
    self.bound: dict[gin_parts.Key, gin_parts.Binding] = {}
    self.replaced: list[tuple[gin_parts.Key, gin_parts.Binding]] = []
    self._read: set[pathlib.Path] = set()

  def read_whole(self, name: str, where: str) -> None:
    """Reads a file and all it includes, whatever was read before."""
    self._read.clear()
    self.read_file(name, (), where)

  def read_file(
      self, name: str, parents: tuple[pathlib.Path, ...], where: str
  ) -> None:
    path = _find(name, parents, where)
    if path in parents:
      raise ConfigError(f'{where}: {name} includes itself')
    # A second include would bind over what its parent overrode since the first.
    if path in self._read:
      return
    self._read.add(path)
    try:
      source = io.StringIO(path.read_text(encoding='utf-8'))
    except UnicodeDecodeError as error:
      raise ConfigError(
          f'{where}: {path} is no gin file: {error}. Save it as UTF-8 text'
      ) from error
    self.read(source, _short(path), (*parents, path))

  def read(
      self, source: io.StringIO, name: str, parents: tuple[pathlib.Path, ...]
  ) -> None:
    delegate = _Delegate()
    delegate.where = name
    parser = None
    try:
      parser = config_parser.ConfigParser(source, delegate)
      while statement := parser.parse_statement():
        self._statement(statement, name, parents)
    except (SyntaxError, tokenize.TokenError) as error:
      raise ConfigError(_syntax_text(error, name)) from None
    except ConfigError as error:
      # The parser knows the line of a bad reference, its delegate does not.
      message = error.message
      if parents and message.startswith(f'{name}: '):
        line = parser.current_token.start[0]
        message = f'{name}:{line}: {message[len(name) + 2:]}'
      raise ConfigError(message) from None

  def _statement(
      self, statement: Any, name: str, parents: tuple[pathlib.Path, ...]
  ) -> None:
    where = f'{name}:{statement.location.line_num}' if parents else name
    if isinstance(statement, config_parser.IncludeStatement):
      self.read_file(statement.filename, parents, where)
    elif isinstance(statement, config_parser.ImportStatement):
      try:
        gin.parse_config(statement.format())
      except ImportError as error:
        raise ConfigError(
            f'{where}: cannot import {statement.module}: '
            + str(error).split('\n')[0]
            + '. A module outside the package must be in a folder of PYTHONPATH'
        ) from error
    elif isinstance(statement, config_parser.BlockDeclaration):
      complete(statement.selector, where)
    else:
      self._bind(
          _key(statement, where), gin_parts.Binding(statement.value, where)
      )

  def _bind(self, key: gin_parts.Key, binding: gin_parts.Binding) -> None:
    old = self.bound.pop(key, None)
    if old is not None and old.value != binding.value:
      self.replaced.append((key, old))
      logging.info(
          'config: %s = %r (%s) replaces %r (%s)',
          *(text(key), binding.value, binding.where, old.value, old.where),
      )
    self.bound[key] = binding


def _key(
    statement: config_parser.BindingStatement, where: str
) -> gin_parts.Key:
  scope, selector, parameter = statement[:3]
  if not parameter:
    return f'{scope}/{selector}' if scope else selector, MACRO, 'value'
  full = complete(selector, where)
  known, anything = parameters(full)
  if parameter not in known and not anything:
    raise ConfigError(
        f'{where}: {selector} has no parameter {parameter}'
        f'{suggest(parameter, known)} It takes: {", ".join(known)}'
    )
  scopes = scope.split('/') if scope else []
  _check_scopes(scopes, text((scope, full, parameter)), where)
  return scope, full, parameter


def _check_scopes(scopes: Sequence[str], written: str, where: str) -> None:
  for scope in scopes:
    if scope not in SCOPES:
      raise ConfigError(
          f'{where}: {written} has the unknown scope {scope}'
          f'{suggest(scope, SCOPES)} The scopes are: {", ".join(SCOPES)}'
      )


def _find(
    name: str, parents: tuple[pathlib.Path, ...], where: str
) -> pathlib.Path:
  folders = [parents[-1].parent] if parents else [pathlib.Path.cwd()]
  folders += SEARCH_PATH
  for folder in folders:
    if (folder / name).is_file():
      return (folder / name).resolve()
  known = [
      str(path.relative_to(folder))
      for folder in SEARCH_PATH
      for path in folder.rglob('*.gin')
  ]
  raise ConfigError(
      f'{where}: no gin file {name}{suggest(name, known)} Searched: '
      + ', '.join(str(folder) for folder in folders)
  )


def _short(path: pathlib.Path) -> str:
  for folder in SEARCH_PATH:
    if path.is_relative_to(folder):
      return str(path.relative_to(folder))
  return str(path)


def _syntax_text(error: Exception, name: str) -> str:
  if isinstance(error, tokenize.TokenError):
    reason, (line, _) = error.args
    source = ''
  else:
    reason, line, source = error.msg, error.lineno, (error.text or '').strip()
  # The part before names an object of Python's parser, at an address.
  reason = reason.split('\n')[-1].strip().rstrip('.')
  return (
      f'{name}:{line}: {reason}. Got: {source!r}. A value is a Python literal '
      "(True, None, 0.5, 'text', (1, 2)), a %MACRO or a @Reference()"
  )
