"""PDDL problems translated to SAS, once a game: the slow part of loading one.

The translation of an official game takes 0.3 to 1 s of Python. What is kept of
it on disk depends on the PDDL texts and on the translator's version alone.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import importlib.metadata
import json
from typing import Any
import zlib

from hgpo_jax.envs import disk_cache

# Part of the name of a kept translation; another layout takes another number.
_LAYOUT = '1'
_TRANSLATOR = 'fast-downward-textworld'


class GameError(ValueError):
  """A game file that is not a playable game."""


@dataclasses.dataclass(frozen=True)
class Translation:
  """A PDDL problem as the engine takes it; plain data.

  Attributes:
    sas: the problem as fast-downward reads it.
    facts: (predicate, argument, ...) of what holds at the start, derived
      propositions excluded.
    types: PDDL object name -> type.
    parameters: action name -> its (parameter, type) pairs.
    supertypes: (type, its supertypes), in the order of the domain.
  """

  sas: str
  facts: tuple[tuple[str, ...], ...]
  types: Mapping[str, str]
  parameters: Mapping[str, tuple[tuple[str, str], ...]]
  supertypes: tuple[tuple[str, tuple[str, ...]], ...]

  def to_bytes(self) -> bytes:
    return zlib.compress(json.dumps(dataclasses.asdict(self)).encode(), 3)

  @classmethod
  def from_bytes(cls, data: bytes) -> Translation:
    fields = json.loads(zlib.decompress(data))
    return cls(
        sas=fields['sas'],
        facts=tuple(map(tuple, fields['facts'])),
        types=fields['types'],
        parameters={
            action: tuple(map(tuple, pairs))
            for action, pairs in fields['parameters'].items()
        },
        supertypes=tuple((n, tuple(s)) for n, s in fields['supertypes']),
    )


def translate(
    domain: str, problem: str, cache: disk_cache.DiskCache | None = None
) -> Translation:
  """The translation of a problem, from `cache` if it has it.

  Raises:
    GameError: if the PDDL cannot be read.
  """
  if cache is None:
    return _translate(domain, problem)
  version = importlib.metadata.version(_TRANSLATOR)
  entry = disk_cache.key(_LAYOUT, _TRANSLATOR, version, domain, problem)
  made = []

  def make() -> bytes:
    made.append(_translate(domain, problem))
    return made[0].to_bytes()

  data = cache.get(entry, make)
  return made[0] if made else Translation.from_bytes(data)


def _translate(domain: str, problem: str) -> Translation:
  import fast_downward

  try:
    task, sas = fast_downward.pddl2sas(domain, problem)
  except (Exception, SystemExit) as error:  # The translator exits on bad PDDL.
    raise GameError(
        f'the game does not translate: {type(error).__name__}: {error}'
    ) from error
  return Translation(
      sas=sas,
      facts=_start_facts(task),
      types={o.name: o.type_name for o in task.objects},
      parameters={
          a.name: tuple((p.name.strip('?'), p.type_name) for p in a.parameters)
          for a in task.actions
      },
      supertypes=tuple((t.name, tuple(t.supertype_names)) for t in task.types),
  )


def _start_facts(task: Any) -> tuple[tuple[str, ...], ...]:
  from fast_downward.translate.pddl import conditions

  return tuple(
      (a.predicate, *a.args)
      for a in task.init
      if isinstance(a, conditions.Atom) and a.predicate != '='
  )
