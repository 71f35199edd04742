"""Refuses what gin would accept without effect.

Before anything is constructed: macros and required values. After: bindings
that nothing read.
"""

from __future__ import annotations

from typing import Any

import gin

from hgpo_jax import gin_parts
from hgpo_jax import gin_source

_CONSTANT = 'gin.constant'


def _references(value: Any, selector: str) -> list[Any]:
  return [
      ref
      for ref in gin.config.iterate_references(value)
      if ref.configurable.selector == selector
  ]


def check(bound: dict[gin_parts.Key, gin_parts.Binding]) -> None:
  """Checks what can be known before anything is constructed."""
  macros = {key[0] for key in bound if key[1] == gin_source.MACRO}
  used: dict[str, set[str]] = {}
  for key, binding in bound.items():
    for ref in _references(binding.value, gin_source.MACRO):
      name = '/'.join(ref.scopes)
      if name not in macros:
        raise gin_source.ConfigError(
            f'{binding.where}: {gin_source.text(key)} uses the macro %{name}, which is '
            f'never defined{gin_source.suggest(name, macros)} Define it: {name} = <value>'
        )
      used.setdefault(name, set()).add(
          key[0] if key[1] == gin_source.MACRO else ''
      )
    for ref in _references(binding.value, _CONSTANT):
      if ref.scopes == ['gin.REQUIRED']:
        raise gin_source.ConfigError(
            f'{gin_source.text(key)} is required ({binding.where}) and has no value. '
            f'Pass one: --gin_bindings "{gin_source.text(key)} = <value>"'
        )
  for name in sorted(macros):
    where = bound[name, gin_source.MACRO, 'value'].where
    if name not in used:
      raise gin_source.ConfigError(
          f'{where}: the macro {name} is defined but nothing uses it'
          f'{gin_source.suggest(name, macros - {name})} Use it as %{name} or remove it'
      )
    _check_cycle(name, used, (name,), where)


def _check_cycle(
    name: str, used: dict[str, set[str]], path: tuple[str, ...], where: str
) -> None:
  for user in used.get(name, set()) - {''}:
    if user in path:
      raise gin_source.ConfigError(
          f'{where}: the macro {name} is defined by itself'
      )
    _check_cycle(user, used, (*path, user), where)


def endless(bound: dict[gin_parts.Key, gin_parts.Binding]) -> str:
  """Says which part is made of itself, and where that was bound."""
  parts = {key[1] for key in bound}
  inside = {part: set() for part in parts}
  for key, binding in bound.items():
    inside[key[1]] |= gin_parts.references(binding.value) & parts
  for _ in parts:  # What is inside of what is inside, however deep.
    for found in inside.values():
      found |= {inner for part in set(found) for inner in inside[part]}
  for key, binding in bound.items():
    if key[1] in inside[key[1]] and any(
        key[1] in inside[part] | {part}
        for part in gin_parts.references(binding.value) & parts
    ):
      return (
          f'{binding.where}: {gin_source.text(key)} = {binding.value!r} makes a'
          ' part of itself, without end; refer to another part, as in'
          ' CovGPO.base = @GRPO()'
      )
  return 'parts refer to one another without end'


def check_consumed(bound: dict[gin_parts.Key, gin_parts.Binding]) -> None:
  """Refuses bindings that nothing read while the root was constructed."""
  # gin offers its record of calls as text only.
  calls = gin.config._OPERATIVE_CONFIG  # pylint: disable=protected-access
  consumed = set()
  for (scope, selector), read in calls.items():
    scopes = scope.split('/') if scope else []
    for parameter in read:
      for depth in range(len(scopes), -1, -1):
        key = ('/'.join(scopes[:depth]), selector, parameter)
        if key in bound:
          consumed.add(key)
          break
  unused = [k for k in bound if k not in consumed and k[1] != gin_source.MACRO]
  if not unused:
    return
  made = {selector for _, selector in calls if not selector.startswith('gin.')}
  names = sorted(selector.rsplit('.', 1)[-1] for selector in made)
  lines = []
  for key in unused:
    name = key[1].rsplit('.', 1)[-1]
    why = f'{name} is never constructed'
    if key[1] in made:
      why = f'{name} is constructed only where another value is bound'
      if key[0]:
        why = f'{name} is never constructed in the scope {key[0]}'
    binding = bound[key]
    lines.append(
        f'  {gin_source.text(key)} = {binding.value!r} ({binding.where}): {why}'
    )
  raise gin_source.ConfigError(
      'bindings without effect:\n' + '\n'.join(lines) + '\nConstructed were: '
      f'{", ".join(names)}. Remove the bindings, or refer to what they '
      'configure, as in: Experiment.estimator = @HGPO()'
  )
