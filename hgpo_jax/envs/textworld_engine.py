"""The real TextWorld ALFRED engine, without the work it repeats.

State, actions and goal stay with fast-downward and every text is derived by
TextWorld's own grammar, so texts, commands and outcomes are those of the stock
`PddlEnv`. What differs is when things are computed: a game is translated to
SAS once instead of four times, a grammar is parsed once a process, parsed
rules are remembered, entities are not copied, and the text of an action is
derived once a game (it depends only on facts that never change). `Engine` follows the control flow of
`textworld.envs.pddl.PddlEnv` and `PddlState` (MIT, Microsoft Corporation).
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
import copy
import dataclasses
import functools
import importlib.metadata
import json
import pathlib
import re
from typing import Any

SUPPORTED = {'textworld': '1.7.0', 'fast-downward-textworld': '20.6.4'}
_TASK = re.compile(r'Your task is to: ([^"]*?)\.?"')
_PLACEHOLDER = 'Your task is to: TASK SENTENCE."'
_FIELDS = ('pddl_domain', 'grammar', 'pddl_problem')


class GameError(ValueError):
  """A game file that is not a playable game."""


def check_versions() -> None:
  """Raises ImportError unless the engine this module was written for is here."""
  for package, expected in SUPPORTED.items():
    try:
      found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      found = 'nothing'
    if found != expected:
      raise ImportError(
          f'the ALFWorld environment needs {package}=={expected}, found'
          f' {found}; install with the pins of constraints.txt'
      )


def read_game(path: pathlib.Path) -> dict[str, Any]:
  """The content of a `game.tw-pddl`.

  Raises:
    GameError: if the file is missing, is not JSON, or lacks a needed field.
  """
  try:
    data = json.loads(path.read_text())
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


@functools.lru_cache(maxsize=1)
def _quicken_text_generation() -> None:
  """Speeds up TextWorld's grammar for this whole process; same texts.

  Its two text parsers are pure, so they are memoized; contexts are copied as
  deep as they are written to.
  """
  from textworld.envs.pddl import textgen
  from textworld.logic import Rule

  parse_symbols = functools.lru_cache(maxsize=4096)(textgen._parse_and_convert)

  def fresh_symbols(text: str, **options: Any) -> list[Any]:
    # The caller writes contexts into the symbols, so each gets its own.
    return copy.deepcopy(parse_symbols(text, **options))

  textgen._parse_and_convert = fresh_symbols
  Rule.parse_conjunctive_query = functools.lru_cache(maxsize=4096)(
      Rule.parse_conjunctive_query
  )
  textgen.copy_context = _copy_context


@functools.lru_cache(maxsize=8)
def _logic(domain: str, grammar_without_task: str) -> Any:
  from textworld.envs.pddl import logic

  return logic.GameLogic(domain=domain, grammar=grammar_without_task)


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


def _start_facts(task: Any, types: Mapping[str, str]) -> list[Any]:
  from fast_downward.translate.pddl import conditions
  from textworld.logic import Proposition, Variable

  return [
      Proposition(a.predicate, [Variable(x, types[x]) for x in a.args])
      for a in task.init
      if isinstance(a, conditions.Atom) and a.predicate != '='
  ]


def compile_game(data: Mapping[str, Any]) -> CompiledGame:
  """Translates a game. About 0.1 s for small rooms, 0.4 s for large ones.

  Raises:
    GameError: if the PDDL or the grammar cannot be read.
  """
  import fast_downward
  import textworld.logic

  _quicken_text_generation()
  sentence = task_sentence(data['grammar'])
  grammar = _TASK.sub(_PLACEHOLDER, data['grammar'], count=1)
  try:
    logic = _logic(data['pddl_domain'], grammar)
    task, sas = fast_downward.pddl2sas(
        data['pddl_domain'], data['pddl_problem']
    )
  except (Exception, SystemExit) as error:  # The translator exits on bad PDDL.
    raise GameError(
        f'the game does not translate: {type(error).__name__}: {error}'
    ) from error
  for type_ in task.types:
    try:
      logic.types.add(textworld.logic.Type(type_.name, type_.supertype_names))
    except ValueError:
      pass  # Known from an earlier game of the same domain.
  types = {o.name: o.type_name for o in task.objects}
  return CompiledGame(
      logic=logic,
      task=sentence,
      sas=sas.encode('utf-8'),
      facts=tuple(_start_facts(task, types)),
      types=types,
      parameters={
          a.name: tuple((p.name.strip('?'), p.type_name) for p in a.parameters)
          for a in task.actions
      },
      entities={},
      commands={},
  )


def _demangled(names: list[str]) -> dict[str, str]:
  """PDDL ids -> names such as 'cabinet 3', as alfworld's Demangler does."""
  by_stem: dict[str, list[str]] = {}
  result = {}
  for name in sorted(names):
    stem, bar, _ = name.partition('_bar_')
    if not bar:
      result[name] = f'{name} '
      continue
    stem += 'basin' if 'basin' in name else ''
    by_stem.setdefault(stem, []).append(name)
  for stem, ids in by_stem.items():
    for i, name in enumerate(ids):
      result[name] = f'{stem} {len(ids) - i}'
  return result


def _empty_state(game_logic: Any) -> Any:
  """A PddlState with no facts.

  PddlState's own constructor would translate the problem again, twice; this
  sets the fields that the constructor sets before that.
  """
  from textworld.envs.pddl import logic

  state = logic.PddlState.__new__(logic.PddlState)
  state._facts = collections.defaultdict(set)
  state._vars_by_name = {}
  state._vars_by_type = collections.defaultdict(set)
  state._var_counts = collections.Counter()
  state._logic = game_logic
  return state


class Engine:
  """One live copy of fast-downward; plays one game after another.

  The native library can never be unloaded safely, so an engine is kept for
  the life of its process and reused.
  """

  def __init__(self) -> None:
    import fast_downward

    self._lib = fast_downward.load_lib()
    self._game: CompiledGame | None = None
    self._state: Any = None
    self._operators: dict[str, Any] = {}

  def reset(self, game: CompiledGame) -> str:
    """Starts a game; returns the opening text."""
    from textworld.envs.pddl import logic

    self._game = game
    self._lib.load_sas(game.sas)
    state = _empty_state(game.logic)
    state.add_facts(game.facts)
    atoms = (logic.Atom * self._lib.get_state_size())()
    self._lib.get_state(atoms)
    facts = [atom.get_fact(game.types) for atom in atoms]
    state.add_facts(f for f in facts if not f.is_negation)
    self._state = state
    if not game.entities:
      self._name_entities()
    self._list_actions()
    intro = self._derive('#intro#', {})
    return intro.replace(
        'Your task is to: TASK SENTENCE.', f'Your task is to: {game.task}.'
    )

  def step(self, command: str) -> str:
    """Acts; returns the feedback ("Nothing happens." if inadmissible)."""
    from textworld.envs.pddl import logic

    operator = self._operators.get(command.strip())
    if operator is None:
      return 'Nothing happens.'
    effects = (logic.Atom * operator.nb_effect_atoms)()
    self._lib.apply_operator(operator.id, effects)
    for effect in effects:
      fact = effect.get_fact(self._game.types)
      self._state.remove_fact(fact.negate())
      self._state.add_fact(fact)
    name = operator.name.split(' ', 1)[0]
    rule = self._game.logic.actions[name].feedback_rule
    feedback = self._derive(rule, self._mapping(operator.name))
    self._list_actions()
    return feedback

  @property
  def admissible(self) -> tuple[str, ...]:
    """The commands that would act now, sorted."""
    return tuple(sorted(self._operators))

  @property
  def won(self) -> bool:
    """The goal holds now."""
    return bool(self._lib.check_goal())

  def _name_entities(self) -> None:
    from textworld.generator.game import EntityInfo

    entities = {
        v.name: EntityInfo(v.name, v.type)
        for fact in self._state.facts
        for v in fact.arguments
    }
    names = _demangled(list(entities))
    for name, info in entities.items():
      info.name = names[name]
      info.definite, info.indefinite = 'the', 'a'
    self._game.entities.update(entities)

  def _mapping(self, operator_name: str) -> dict[Any, Any]:
    from textworld.logic import Placeholder, Variable

    name, *arguments = operator_name.split()
    return {
        Placeholder(parameter, type_): Variable(argument, type_)
        for (parameter, type_), argument in zip(
            self._game.parameters[name], arguments
        )
    }

  def _derive(self, start: str, mapping: dict[Any, Any]) -> str:
    entities = self._game.entities
    context = {
        'state': self._state,
        'facts': [],
        'variables': {p.name: entities[v.name] for p, v in mapping.items()},
        'mapping': mapping,
        'entity_infos': entities,
    }
    return self._game.logic.grammar.derive(start, context)

  def _command(self, operator_name: str) -> str:
    """Text of an operator; a function of the operator and static facts."""
    commands = self._game.commands
    if operator_name not in commands:
      mapping = self._mapping(operator_name)
      action = operator_name.split(' ', 1)[0]
      text = self._derive(self._game.logic.actions[action].template, mapping)
      names = {p.name: self._game.entities[v.name].name
               for p, v in mapping.items()}
      commands[operator_name] = text.format(**names)
    return commands[operator_name]

  def _list_actions(self) -> None:
    import fast_downward

    count = self._lib.get_applicable_operators_count()
    operators = (fast_downward.Operator * count)()
    self._lib.get_applicable_operators(operators)
    self._operators = {}
    for operator in operators:
      # The first of several operators with one text is the one that acts.
      self._operators.setdefault(self._command(operator.name), operator)
