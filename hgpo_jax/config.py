"""Gin is the only configuration; this module makes it strict.

gin 0.5.0 accepts silently a binding that nothing reads, a misspelt scope, an
unused macro, a string where a number is wanted, and a bound parameter that
the caller passes anyway. Here each of them is a `ConfigError` at start-up,
before weights load or environments start. The one entry point is `load`:

  parse files -> parse bindings -> check -> finalize -> construct the root
  -> check that every binding was read

After it nothing binds. Configurables are frozen dataclasses, cheap to make:

  @config.configurable
  @dataclasses.dataclass(frozen=True)
  class AdamW:
    learning_rate: float = 1e-6

One whose fields depend on one another says with `unread` which of them its
own settings leave without effect; to bind those is an error too. A weight of 0
is no such setting: comparisons start there. Subclasses inherit it.

    def unread(self) -> dict[str, str]:  # Field -> setting that leaves it so.
      return {} if self.schedule == 'cosine' else {'final_rate': 'schedule'}

gin's state is global to the process, and so is this module's; `reset` clears
both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
import contextlib
import dataclasses
import functools
import inspect
import pathlib
import sys
import typing
from typing import Any, TypeVar

import gin

from hgpo_jax import field_types
from hgpo_jax import gin_checks
from hgpo_jax import gin_parts
from hgpo_jax import gin_source
from hgpo_jax import run_record

ConfigError = gin_source.ConfigError
REQUIRED = gin.REQUIRED
SCOPES = gin_source.SCOPES
SEARCH_PATH = gin_source.SEARCH_PATH
may_change = run_record.may_change

_T = TypeVar('_T')


@dataclasses.dataclass
class _State:
  """What `load` made; the one mutable global beside gin's own."""

  bindings: dict[gin_parts.Key, gin_parts.Binding] = dataclasses.field(
      default_factory=dict
  )
  root: Any = None
  constructing: bool = False


_state = _State()


def configurable(target: _T) -> _T:
  """`gin.configurable` for classes and functions, with checked values.

  Values are checked against the annotations whenever one is constructed, by
  gin or by hand: an int becomes the float that is wanted, anything else that
  does not fit is a `ConfigError`. A value that is both bound in gin and passed
  by the caller is one too, for gin would drop the bound one in silence.
  """
  selector = f'{target.__module__}.{target.__name__}'
  # A module may be imported after `load` locked gin. Registering binds
  # nothing, and no binding can be waiting: it would have been refused.
  locked = gin.config_is_locked()
  with gin.unlock_config() if locked else contextlib.nullcontext():
    if not inspect.isclass(target):
      inner = _checked(target, target, selector)
      return _guarded(gin.configurable(inner), target, selector)
    target.__init__ = _checked(target.__init__, target, selector)
    gin.configurable(target)
  target.__init__ = _guarded(target.__init__, target, selector)
  return target


def _hint(annotation: Any, target: Any) -> Any:
  """Resolves an annotation; one that names nothing known is not checked."""
  if not isinstance(annotation, str):
    return annotation
  try:
    scope = dict(vars(sys.modules[target.__module__]))
    holder = type('_', (), {'__annotations__': {'x': annotation}})
    return typing.get_type_hints(holder, scope, include_extras=True)['x']
  except (NameError, AttributeError, TypeError, SyntaxError):
    return Any


def _checked(
    function: Callable[..., Any], target: Any, selector: str
) -> Callable[..., Any]:
  """Wraps so that the values which arrive are those the annotations want."""
  signature = inspect.signature(function)

  @functools.wraps(function)
  def wrapper(*args, **kwargs):
    try:
      bound = signature.bind(*args, **kwargs)
    except TypeError as error:
      raise ConfigError(
          f'{target.__name__}: {error}. Bind it in gin as '
          f'{target.__name__}.<parameter> = <value>'
      ) from None
    for name, value in bound.arguments.items():
      parameter = signature.parameters[name]
      if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        continue
      if parameter.annotation is parameter.empty:
        continue
      try:
        hint = _hint(parameter.annotation, target)
        bound.arguments[name] = field_types.coerce(value, hint)
      except field_types.Mismatch as mismatch:
        raise ConfigError(
            f'{target.__name__}.{name}: got {value!r} '
            f'({type(value).__name__}), expected {mismatch}'
            f'{_where(selector, name)}'
        ) from None
    return function(*bound.args, **bound.kwargs)

  # gin reads the signature of what it wraps without following wrappers.
  wrapper.__signature__ = signature
  return wrapper


def _guarded(
    function: Callable[..., Any], target: Any, selector: str
) -> Callable[..., Any]:
  """Wraps so that a caller cannot override what gin has bound."""
  signature = inspect.signature(function)
  required = [
      name for name, p in signature.parameters.items() if p.default is REQUIRED
  ]

  @functools.wraps(function)
  def wrapper(*args, **kwargs):
    bound = gin.get_bindings(selector, resolve_references=False)
    passed = {}
    with contextlib.suppress(TypeError):  # A wrong call fails further in.
      passed = signature.bind_partial(*args, **kwargs).arguments
    if bound:
      both = sorted(set(bound) & set(passed))
      # A caller who passes every field leaves nothing to the configuration:
      # that is `dataclasses.replace`, fine once the root is made.
      whole = set(signature.parameters) - {'self'} <= set(passed)
      if both and (_state.constructing or not whole):
        name = both[0]
        raise ConfigError(
            f'{target.__name__}.{name} is bound to {bound[name]!r}'
            f'{_where(selector, name)}, but the code passes '
            f'{passed[name]!r}, which would win. Remove the binding, or let '
            'gin supply the parameter'
        )
    for name in required:
      if name not in bound and name not in passed:
        raise ConfigError(
            f'{target.__name__}.{name} is required and has no value. Pass one: '
            f'--gin_bindings "{target.__name__}.{name} = <value>"'
        )
    result = function(*args, **kwargs)
    supplied = set(bound) - set(passed)
    if supplied and inspect.isclass(target):
      _check_read(args[0], supplied, selector)
    return result

  return wrapper


def _check_read(part: Any, bound: Collection[str], selector: str) -> None:
  """Refuses a binding that the part's other settings leave without effect.

  Not where it says what the field is anyway: files spell out defaults, and a
  file that includes them may choose another setting.
  """
  name = type(part).__name__
  for field, setting in run_record.unread(part).items():
    value, usual = getattr(part, field), run_record.defaults(part)[field]
    if field in bound and value != usual:
      raise ConfigError(
          f'{name}.{field} = {value!r}{_where(selector, field)} has'
          f' no effect where {name}.{setting} is {getattr(part, setting)!r}.'
          f' Remove the binding or bind the default, {usual!r}; or change'
          f' {name}.{setting}'
      )


def _where(selector: str, parameter: str) -> str:
  """Says where a parameter was bound, in the innermost scope that did."""
  scope = gin.current_scope()
  for depth in range(len(scope), -1, -1):
    key = ('/'.join(scope[:depth]), selector, parameter)
    if key in _state.bindings:
      return f' (bound at {_state.bindings[key].where})'
  return ''


def load(
    gin_files: Sequence[str],
    bindings: Sequence[str] = (),
    root: Callable[..., Any] | str = 'Experiment',
) -> Any:
  """Reads the configuration, checks all of it and returns the root instance.

  Args:
    gin_files: names of gin files, found from the working directory or on
      `SEARCH_PATH` ('runs/quickstart.gin'). Later ones override.
    bindings: lines of gin such as 'HGPO.alpha = 0.5'; they override files.
    root: what to construct: a configurable or its name.

  Raises:
    ConfigError: anything is wrong; nothing stays bound then.
  """
  reset()
  try:
    _state.bindings = gin_source.parse(gin_files, bindings)
    gin_checks.check(_state.bindings)
    gin.finalize()
    _state.root = _construct(root)
    gin_checks.check_consumed(_state.bindings)
  except BaseException:
    reset()
    raise
  return _state.root


def _construct(root: Callable[..., Any] | str) -> Any:
  """Calls the root; what goes wrong inside is the configuration's fault."""
  if isinstance(root, str):
    root = gin.get_configurable(gin_source.complete(root, 'root'))
  _state.constructing = True
  try:
    return root()
  except ConfigError as error:
    # gin appends where it was called from; the bare message says it better.
    raise ConfigError(error.message) from None
  except RecursionError:
    raise ConfigError(gin_checks.endless(_state.bindings)) from None
  except (ValueError, TypeError, RuntimeError) as error:
    text = str(error).split('\n  In call to configurable ')[0]  # By gin.
    raise ConfigError(text) from error
  finally:
    _state.constructing = False


def reset() -> None:
  """Forgets every binding; for tests and notebooks that load twice."""
  gin.clear_config()
  _state.bindings, _state.root = {}, None


def flat() -> dict[str, Any]:
  """The loaded configuration as {'Experiment.optimizer.learning_rate': ...}.

  Every field of every part is in it, defaults too, macros and scopes resolved.
  """
  return run_record.flatten(_loaded())


def fingerprint() -> str:
  """sha256 of the loaded configuration, less the fields that may change."""
  return run_record.fingerprint(_loaded())


def write(
    run_dir: str | pathlib.Path,
    *,
    seed: int | None = None,
    devices: Sequence[str] = (),
) -> dict[str, Any]:
  """Writes config.gin, operative.gin and run.json; returns the last.

  config.gin alone makes the same run again. A start that resumes a run adds an
  entry to `attempts` of run.json.

  Raises:
    ConfigError: the folder holds a run of another configuration.
  """
  check_resume(run_dir)
  texts = {
      'config.gin': gin.config_str(),
      'operative.gin': gin.operative_config_str(),
  }
  return run_record.write(
      pathlib.Path(run_dir), _loaded(), texts, seed=seed, devices=devices
  )


def check_resume(run_dir: str | pathlib.Path) -> bool:
  """Returns whether `run_dir` holds a run that the configuration goes on with.

  Raises:
    ConfigError: it holds a run of another configuration; the text is the diff.
  """
  return run_record.check_resume(pathlib.Path(run_dir), _loaded())


def _loaded() -> Any:
  if _state.root is None:
    raise ConfigError('no configuration is loaded; call config.load first')
  return _state.root
