"""Generated games as the `game.tw-pddl` files that ALFWorld plays.

A file holds the PDDL domain and the text grammar that the alfworld wheel ships
(MIT, (c) 2020 Mohit Shridhar and others), a PDDL problem of our own, and the
walkthrough of an expert who knows where everything is.
"""

from __future__ import annotations

import functools
import json
import pathlib
import re
import textwrap

from hgpo_jax.envs import alfworld_package
from hgpo_jax.envs import household
from hgpo_jax.envs import household_rooms as rooms


def walkthrough(game: household.Game) -> list[str]:
  """Commands of an expert who knows where everything is; wins on the last."""
  goal, commands = game.goal, []
  at, opened = None, set()

  def go(place: household.Receptacle, inside: bool) -> None:
    nonlocal at
    if at != place:
      commands.append(f'go to {place.name}')
      at = place
    if inside and place.openable and place.name not in opened:
      commands.append(f'open {place.name}')
      opened.add(place.name)

  wanted = [i for i in game.items if i.type == goal.object]
  target = next((r for r in game.receptacles if r.type == goal.target), None)
  for item in wanted[: 2 if goal.kind == 'pick_two_obj_and_place' else 1]:
    go(item.place, inside=True)
    commands.append(f'take {item.name} from {item.place.name}')
    if goal.kind in rooms.APPLIANCE:
      verb, type_ = rooms.APPLIANCE[goal.kind]
      go(next(r for r in game.receptacles if r.type == type_), inside=False)
      commands.append(f'{verb} {item.name} with {at.name}')
    if goal.target == 'DeskLamp':
      lamp = next(i for i in game.items if i.type == 'DeskLamp')
      go(lamp.place, inside=False)
      commands.append(f'use {lamp.name}')
    else:
      go(target, inside=True)
      commands.append(f'move {item.name} to {target.name}')
  return commands


def _facts(game: household.Game) -> list[str]:
  """The `:init` facts of the PDDL problem."""
  holds, able = rooms.alfred_tables()
  facts = ['(atLocation agent1 loc_bar_start)']
  for r in game.receptacles:
    facts.append(f'(receptacleType {r.pddl} {r.type}Type)')
    facts.append(f'(receptacleAtLocation {r.pddl} {r.location})')
    if r.openable:
      facts.append(f'(openable {r.pddl})')
  for i in game.items:
    facts.append(f'(objectType {i.pddl} {i.type}Type)')
    facts.append(f'(inReceptacle {i.pddl} {i.place.pddl})')
    facts.append(f'(objectAtLocation {i.pddl} {i.place.location})')
    if i.type == 'DeskLamp':
      facts.append(f'(toggleable {i.pddl})')
    else:
      facts.append(f'(pickupable {i.pddl})')
    if i.type in rooms.RECEPTACLE_OBJECTS:
      facts.append(f'(isReceptacleObject {i.pddl})')
    for name, types in able.items():
      if i.type in types and name != 'Toggleable':
        facts.append(f'({name.lower()} {i.pddl})')
  receptacle_types = sorted({r.type for r in game.receptacles})
  item_types = sorted({i.type for i in game.items})
  facts += [
      f'(canContain {r}Type {i}Type)'
      for r in receptacle_types
      for i in item_types
      if i in holds.get(r, ())
  ]
  return facts


def _problem(game: household.Game) -> str:
  goal_library = alfworld_package.load('alfworld.gen.goal_library')
  receptacle_types = {r.type for r in game.receptacles} | set(
      rooms.CONSTANT_RTYPES
  )
  item_types = {i.type for i in game.items} | set(rooms.CONSTANT_OTYPES)
  objects = (
      ['agent1 - agent', 'loc_bar_start - location']
      + [f'{r.location} - location' for r in game.receptacles]
      + [f'{r.pddl} - receptacle' for r in game.receptacles]
      + [f'{i.pddl} - object' for i in game.items]
      + [f'{t}Type - rtype' for t in sorted(receptacle_types)]
      + [f'{t}Type - otype' for t in sorted(item_types)]
  )
  # The library writes '#' for '-' and closes the problem itself.
  goal = goal_library.gdict[game.goal.kind]['pddl'].replace('#', '-')
  goal = goal.format(
      obj=game.goal.object, recep=game.goal.target, toggle=game.goal.target
  )
  lines = '\n    '
  return (
      '(define (problem household)\n  (:domain alfred)\n  (:objects\n    '
      f'{lines.join(objects)}\n  )\n  (:init\n    '
      f'{lines.join(_facts(game))}\n  )\n{textwrap.dedent(goal)}'
  )


@functools.lru_cache(maxsize=1)
def _domain_and_grammar() -> tuple[str, str]:
  package = alfworld_package.load('alfworld')
  data = pathlib.Path(package.__file__).parent / 'data'
  return (data / 'alfred.pddl').read_text(encoding='utf-8'), (
      data / 'alfred.twl2'
  ).read_text(encoding='utf-8')


def game_data(game: household.Game) -> dict[str, object]:
  """The content of the game's `game.tw-pddl`."""
  domain, grammar = _domain_and_grammar()
  return {
      'pddl_domain': domain,
      'grammar': re.sub('UNKNOWN GOAL', game.instruction, grammar),
      'pddl_problem': _problem(game),
      'walkthrough': walkthrough(game),
      'solvable': True,
  }


def save(game: household.Game, folder: pathlib.Path) -> pathlib.Path:
  """Writes `game.tw-pddl` in the official layout; returns its path."""
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / 'game.tw-pddl'
  path.write_text(json.dumps(game_data(game)), encoding='utf-8')
  return path
