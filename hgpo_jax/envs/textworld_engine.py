"""The real TextWorld ALFRED engine, without the work it repeats.

State, actions and goal stay with fast-downward and every text is derived by
TextWorld's own grammar, so texts, commands and outcomes are those of the stock
`PddlEnv`. What differs is when things are computed: see `textworld_game` for
what is done once a game; and the text of an action is derived once a game too,
since it depends only on facts that never change. `Engine` follows the control
flow of `textworld.envs.pddl.PddlEnv` and `PddlState` (MIT, Microsoft
Corporation).
"""

from __future__ import annotations

import collections
import re
from typing import Any

from hgpo_jax.envs import textworld_game


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
    self._game: textworld_game.CompiledGame | None = None
    self._state: Any = None
    self._operators: dict[str, Any] = {}

  def reset(self, game: textworld_game.CompiledGame) -> str:
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
        textworld_game.PLACEHOLDER, f'Your task is to: {game.task}.'
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
    names = textworld_game.display_names(list(entities))
    for name, info in entities.items():
      info.name = names[name]
      info.definite, info.indefinite = 'the', 'a'
    self._game.entities.update(entities)

  def _mapping(self, operator_name: str) -> dict[Any, Any]:
    from textworld.logic import Placeholder
    from textworld.logic import Variable

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
    """Text of an operator; a function of static facts and of some arguments.

    Going somewhere is another operator from everywhere, but one text: only
    arguments that the template names can be in it.
    """
    commands = self._game.commands
    if operator_name not in commands:
      action, *arguments = operator_name.split()
      template = self._game.logic.actions[action].template
      parameters = self._game.parameters[action]
      named = [
          argument
          for (parameter, _), argument in zip(parameters, arguments)
          if re.search(rf'\b{parameter}\b', template)
      ]
      # No operator has a name that begins with a space.
      key = ' '.join(['', action, *named])
      if key not in commands:
        commands[key] = self._command_text(operator_name, template)
      commands[operator_name] = commands[key]
    return commands[operator_name]

  def _command_text(self, operator_name: str, template: str) -> str:
    mapping = self._mapping(operator_name)
    text = self._derive(template, mapping)
    names = {
        p.name: self._game.entities[v.name].name for p, v in mapping.items()
    }
    return text.format(**names)

  def _list_actions(self) -> None:
    import fast_downward

    count = self._lib.get_applicable_operators_count()
    operators = (fast_downward.Operator * count)()
    self._lib.get_applicable_operators(operators)
    self._operators = {}
    for operator in operators:
      # The first of several operators with one text is the one that acts.
      self._operators.setdefault(self._command(operator.name), operator)
