"""Checks a value against an annotation; the type check of gin gives none.

Annotations that say more than can be checked are accepted leniently: what is
left is to catch the mistakes a configuration makes, such as `lr = '1e-5'` or
`@HGPO` where `@HGPO()` is meant.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import numbers
import types as python_types
import typing
from typing import Any

# What a float of the configuration becomes on the device, and what it must not
# turn into there: a temperature of 1e-300 would be 0, which means greedy.
_SMALLEST, _LARGEST = 2.0**-126, 2.0**128 * (1 - 2.0**-24)
_FLOAT = f'float of size {_SMALLEST:.2g} to {_LARGEST:.2g}, or 0, as float32 has them'

# Values that are surely not an object made by a configurable.
_PLAIN = (str, bytes, bool, int, float, tuple, list, dict, type(None))


class Mismatch(TypeError):
  """The value is not of the annotated type; the text says what is wanted."""


def describe(hint: Any) -> str:
  """Returns the annotation as someone would write it."""
  args = typing.get_args(hint)
  if typing.get_origin(hint) in (typing.Union, python_types.UnionType):
    return ' | '.join(describe(arg) for arg in args)
  if inspect.isclass(hint) and not args:
    return 'None' if hint is type(None) else hint.__name__
  return str(hint).replace('typing.', '')


def coerce(value: Any, hint: Any) -> Any:
  """Returns `value` as the type `hint`.

  Only two conversions are made, and both lose nothing: an int becomes the
  float it stands for, and a list becomes the tuple that is wanted.

  Raises:
    Mismatch: `value` is not what `hint` allows.
  """
  if isinstance(hint, dataclasses.InitVar):
    return coerce(value, hint.type)
  origin, args = typing.get_origin(hint), typing.get_args(hint)
  if origin is typing.Annotated or origin is typing.Final:
    return coerce(value, args[0])
  if origin is typing.Literal:
    if any(type(value) is type(a) and value == a for a in args):
      return value
    raise Mismatch('one of ' + ', '.join(repr(a) for a in args))
  if origin in (typing.Union, python_types.UnionType):
    return _coerce_union(value, hint, args)
  if origin is not None:
    return _coerce_generic(value, hint, origin, args)
  if inspect.isclass(hint) and hint is not Any:  # Any is a class too.
    return _coerce_class(value, hint)
  return value  # Any, a type variable, a string that names nothing known.


def _coerce_union(value: Any, hint: Any, args: tuple[Any, ...]) -> Any:
  """The first member that takes `value` unchanged, else the first that can."""
  results = []
  for member in args:
    try:
      results.append(coerce(value, member))
    except Mismatch:
      continue
    if type(results[-1]) is type(value):
      return results[-1]
  if not results:
    raise Mismatch(describe(hint))
  return results[0]


def _coerce_generic(
    value: Any, hint: Any, origin: Any, args: tuple[Any, ...]
) -> Any:
  """Containers and callables; what is inside containers is checked too."""
  try:
    if origin is tuple:
      return _coerce_tuple(value, args)
    if origin is dict or origin is collections.abc.Mapping:
      if isinstance(value, collections.abc.Mapping):
        return {
            coerce(k, args[0]): coerce(v, args[1]) for k, v in value.items()
        }
      raise Mismatch(describe(hint))
    if origin in (list, collections.abc.Sequence):
      if isinstance(value, (list, tuple)):
        return type(value)(coerce(v, args[0]) for v in value)
      raise Mismatch(describe(hint))
  except Mismatch as inner:
    raise Mismatch(describe(hint)) from inner
  if origin is collections.abc.Callable and not callable(value):
    raise Mismatch(describe(hint))
  if origin is type and not inspect.isclass(value):
    raise Mismatch(describe(hint))
  return value


def _coerce_tuple(value: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
  if not isinstance(value, (list, tuple)):
    raise Mismatch
  if len(args) == 2 and args[1] is Ellipsis:
    return tuple(coerce(v, args[0]) for v in value)
  if len(args) != len(value):
    raise Mismatch
  return tuple(coerce(v, a) for v, a in zip(value, args))


def _coerce_number(value: Any, hint: type) -> int | float:
  """Numbers that the types of the device can hold; a bool is none."""
  kind = numbers.Real if hint is float else numbers.Integral
  if isinstance(value, bool) or not isinstance(value, kind):
    raise Mismatch(hint.__name__)
  if hint is int:
    if not -(2**63) <= value < 2**63:
      raise Mismatch('int of at most 64 bits')
    return value
  if value != 0 and not _SMALLEST <= abs(value) <= _LARGEST:  # nan too.
    raise Mismatch(_FLOAT)
  return float(value)


def _coerce_class(value: Any, hint: type) -> Any:
  """Plain classes; protocols ask for a value that is not plain, and a call."""
  if hint in (float, int):
    return _coerce_number(value, hint)
  if hint is tuple and isinstance(value, list):
    return tuple(value)
  if getattr(hint, '_is_protocol', False):
    if isinstance(value, _PLAIN) and hint is not collections.abc.Callable:
      raise Mismatch(describe(hint))
    if inspect.isclass(value):
      raise Mismatch(
          f'an instance of {describe(hint)}: write @{value.__name__}(), with '
          'the parentheses'
      )
    if '__call__' in vars(hint) and not callable(value):
      raise Mismatch(f'{describe(hint)}, something to call')
    return value
  if inspect.isclass(value) and hint not in (type, object):
    raise Mismatch(
        f'an instance of {describe(hint)}: write @{value.__name__}(), with '
        'the parentheses'
    )
  if hint is collections.abc.Callable:
    if callable(value):
      return value
  elif isinstance(value, hint):
    return value
  raise Mismatch(describe(hint))
