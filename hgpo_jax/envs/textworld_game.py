"""ALFWorld game files, read, checked and translated for the engine.

The stock `PddlEnv` translates a game to SAS four times, parses its grammar
each time, and copies every entity whenever it derives a text. Here a game is
translated once, a grammar is parsed once a process, parsed rules are
remembered, and contexts are copied as deep as they are written to.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import copy
import dataclasses
import functools
import importlib.metadata
import json
import pathlib
import re
from typing import Any

from absl import logging

from hgpo_jax.envs import disk_cache
from hgpo_jax.envs import textworld_translation

SUPPORTED = {'textworld': '1.7.0', 'fast-downward-textworld': '20.6.4'}
_TASK = re.compile(r'Your task is to: ([^"]*?)\.?"')
# Stands for the task sentence, so that games share one parsed grammar.
PLACEHOLDER = 'Your task is to: TASK SENTENCE.'
_FIELDS = ('pddl_domain', 'grammar', 'pddl_problem')
GameError = textworld_translation.GameError


@functools.cache
def check_versions() -> bool:
  """Whether the engine is of the versions that the fast one was written for.

  Warns if not: the stock engine has to be played then.

  Raises:
    ImportError: there is no engine at all.
  """
  found = {}
  for package, expected in SUPPORTED.items():
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as error:
      raise ImportError(
          f'the ALFWorld environment needs {package}=={expected}, found'
          ' nothing; install with the pins of constraints.txt'
      ) from error
  if found != SUPPORTED:
    logging.warning(
        'the fast ALFWorld engine was written for %s, found %s: playing with'
        ' the stock engine, which takes a hundred times as long; install with'
        ' the pins of constraints.txt',
        SUPPORTED,
        found,
    )
  return found == SUPPORTED


def read_game(path: pathlib.Path) -> dict[str, Any]:
  """The content of a `game.tw-pddl`.

  Raises:
    GameError: if the file is missing, is not JSON, or lacks a needed field.
  """
  try:
    data = json.loads(path.read_text(encoding='utf-8'))
  except OSError as error:
    raise GameError(f'cannot read the game file {path}: {error}') from error
  except ValueError as error:
    raise GameError(
        f'{path} is not a game: expected JSON, got {error}'
    ) from error
  if not isinstance(data, dict):
    raise GameError(f'{path} is not a game: expected a JSON object')
  missing = [k for k in _FIELDS if not isinstance(data.get(k), str)]
  if missing:
    raise GameError(
        f'{path} is not a game: it lacks the text fields {missing}; an ALFWorld'
        f' game holds {list(_FIELDS)}'
    )
  return data


def task_sentence(grammar: str) -> str:
  """The task in words, cut out of a game's grammar."""
  match = _TASK.search(grammar)
  if match is None:
    raise GameError('the grammar has no sentence "Your task is to: ..."')
  return match.group(1)


def _copy_context(context: Mapping[str, Any]) -> dict[str, Any]:
  """A context whose bindings can be added to without touching the original.

  TextWorld copies every bound entity too, which is nearly all the time of a
  step; entities are only read while text is derived.
  """
  return {
      **context,
      'variables': dict(context['variables']),
      'mapping': dict(context['mapping']),
  }


def _copy_symbols(symbols: Any) -> Any:
  """Symbols whose contexts can be set without touching the originals.

  TextWorld copies as deep as it goes; contexts are set in symbols and in what
  a list is of, and nothing else is written to.
  """
  if isinstance(symbols, list):
    return [_copy_symbols(symbol) for symbol in symbols]
  fresh = copy.copy(symbols)
  if type(symbols).__name__ == 'ListSymbol':
    fresh.symbol = _copy_symbols(symbols.symbol)
  return fresh


_code = functools.lru_cache(maxsize=4096)(
    lambda expression: compile(expression, '<grammar>', 'eval')
)


def _evaluate(symbol: Any, context: Mapping[str, Any] | None = None) -> Any:
  """`EvalSymbol.derive` with its expression compiled once."""
  from textworld.envs.pddl import textgen

  context = context or symbol.context
  names = {'self': symbol, 'context': context, **context['variables']}
  value = eval(_code(symbol.expression), vars(textgen), names)
  return [textgen.TerminalSymbol(value)]


@functools.lru_cache(maxsize=1)
def _quicken_text_generation() -> None:
  """Speeds up TextWorld's grammar for this whole process; same texts.

  Its parsers are pure, so they are memoized; contexts and symbols are copied
  as deep as they are written to.
  """
  from textworld.envs.pddl import textgen
  from textworld.logic import Rule

  parse = textgen._parse_and_convert

  @functools.lru_cache(maxsize=4096)
  def parse_symbols(text: str, **options: Any) -> list[Any]:
    symbols = parse(text, **options)
    _forget_callers(textgen._PARSER)
    return symbols

  def fresh_symbols(text: str, **options: Any) -> list[Any]:
    # The caller writes contexts into the symbols, so each gets its own.
    return _copy_symbols(parse_symbols(text, **options))

  textgen._parse_and_convert = fresh_symbols
  Rule.parse_conjunctive_query = functools.lru_cache(maxsize=4096)(
      Rule.parse_conjunctive_query
  )
  textgen.copy_context = _copy_context
  textgen.deepcopy = _copy_symbols
  textgen.EvalSymbol.derive = _evaluate
  textgen.check_flag = functools.cache(textgen.check_flag)


@functools.lru_cache(maxsize=8)
def _logic(domain: str, grammar_without_task: str) -> Any:
  from textworld.envs.pddl import logic

  parsed = logic.GameLogic(domain=domain, grammar=grammar_without_task)
  _forget_callers(logic._PARSER)
  return parsed


def _forget_callers(parser: Any) -> None:
  """A parser keeps its last error, and that the frames that led to it."""
  parser._furthest_exception = None


@dataclasses.dataclass(frozen=True)
class CompiledGame:
  """A game after translation: everything a reset needs, shared by episodes.

  Attributes:
    logic: TextWorld's parsed grammar and actions.
    task: the task sentence.
    sas: the problem as fast-downward reads it.
    facts: propositions that hold at the start, derived ones excluded.
    types: PDDL object name -> type.
    parameters: action name -> its (parameter, type) pairs.
    entities: TextWorld's entity descriptions, with display names.
    commands: operator name -> command text, filled in as operators turn up.
  """

  logic: Any
  task: str
  sas: bytes
  facts: tuple[Any, ...]
  types: Mapping[str, str]
  parameters: Mapping[str, tuple[tuple[str, str], ...]]
  entities: Mapping[str, Any]
  commands: dict[str, str]


def compile_game(
    data: Mapping[str, Any], cache: disk_cache.DiskCache | None = None
) -> CompiledGame:
  """Makes a game ready to play.

  About 0.1 s for small rooms and 0.4 s for large ones, a tenth of it when
  `cache` has the translation.

  Raises:
    GameError: if the PDDL or the grammar cannot be read.
  """
  import textworld.logic
  from textworld.logic import Proposition
  from textworld.logic import Variable

  _quicken_text_generation()
  sentence = task_sentence(data['grammar'])
  grammar = _TASK.sub(PLACEHOLDER + '"', data['grammar'], count=1)
  try:
    logic = _logic(data['pddl_domain'], grammar)
  except Exception as error:
    raise GameError(
        f'the game does not translate: {type(error).__name__}: {error}'
    ) from error
  found = textworld_translation.translate(
      data['pddl_domain'], data['pddl_problem'], cache
  )
  for name, supertypes in found.supertypes:
    try:
      logic.types.add(textworld.logic.Type(name, supertypes))
    except ValueError:
      pass  # Known from an earlier game of the same domain.
  variables = {n: Variable(n, type_) for n, type_ in found.types.items()}
  return CompiledGame(
      logic=logic,
      task=sentence,
      sas=found.sas.encode('utf-8'),
      facts=tuple(
          Proposition(predicate, [variables[a] for a in arguments])
          for predicate, *arguments in found.facts
      ),
      types=found.types,
      parameters=found.parameters,
      entities={},
      commands={},
  )


def display_names(pddl_ids: Sequence[str]) -> dict[str, str]:
  """PDDL ids -> names such as 'cabinet 3', as alfworld's Demangler gives them.

  Ids are sorted in lower case and numbers handed out from the highest. An id
  without a place ('agent1') keeps its name, with the Demangler's space.
  """
  by_stem: dict[str, list[str]] = {}
  result = {}
  for pddl in sorted(pddl_ids, key=str.lower):
    stem, bar, _ = pddl.lower().partition('_bar_')
    if not bar:
      result[pddl] = f'{stem} '
      continue
    stem += 'basin' if 'basin' in pddl.lower() else ''
    by_stem.setdefault(stem, []).append(pddl)
  for stem, ids in by_stem.items():
    for i, pddl in enumerate(ids):
      result[pddl] = f'{stem} {len(ids) - i}'
  return result
