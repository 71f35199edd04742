"""Seeded generator of ALFWorld-format household games.

A game is what `game.tw-pddl` holds: the PDDL domain and the text grammar that
the alfworld wheel ships, a PDDL problem of our own, and a walkthrough by an
expert who knows where everything is. The same seed always gives the same game,
on every machine. Facts about what fits where and what can be heated, cooled or
cleaned come from ALFRED's tables in alfworld (MIT, (c) 2020 Mohit Shridhar and
others); rooms, usual places and layout are ours.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import random
import re
import textwrap

from hgpo_jax import config

KINDS = (
    'pick_and_place_simple',
    'look_at_obj_in_light',
    'pick_clean_then_place_in_recep',
    'pick_heat_then_place_in_recep',
    'pick_cool_then_place_in_recep',
    'pick_two_obj_and_place',
)

# What a task kind does to the object, at which receptacle type.
APPLIANCE = {
    'pick_clean_then_place_in_recep': ('clean', 'SinkBasin'),
    'pick_heat_then_place_in_recep': ('heat', 'Microwave'),
    'pick_cool_then_place_in_recep': ('cool', 'Fridge'),
}
_ABLE = {'clean': 'Cleanable', 'heat': 'Heatable', 'cool': 'Coolable'}

_OPENABLE = frozenset(['Cabinet', 'Drawer', 'Fridge', 'Microwave', 'Safe'])
_SOMETIMES_STUCK = frozenset(['Cabinet', 'Drawer'])
_BASINS = {'SinkBasin': 'Sink', 'BathtubBasin': 'Bathtub'}
_LAMP_STANDS = frozenset(['Desk', 'SideTable', 'Dresser', 'Shelf'])
# The domain's actions name these constants, so every problem declares them.
_CONSTANT_RTYPES = ('Fridge', 'Microwave', 'SinkBasin')
_CONSTANT_OTYPES = ('Knife', 'ButterKnife')
_RECEPTACLE_OBJECTS = frozenset(
    ['Bowl', 'Box', 'Cup', 'Mug', 'Pan', 'Plate', 'Pot']
)

# Room -> receptacle type -> most instances there.
ROOMS = {
    'kitchen': {
        'Cabinet': 6, 'CounterTop': 3, 'Drawer': 4, 'Fridge': 1,
        'GarbageCan': 1, 'Microwave': 1, 'Shelf': 3, 'SinkBasin': 1,
        'StoveBurner': 4, 'DiningTable': 1, 'CoffeeMachine': 1, 'Toaster': 1,
        'SideTable': 1,
    },
    'bedroom': {
        'ArmChair': 1, 'Bed': 1, 'Desk': 1, 'Drawer': 5, 'Dresser': 1,
        'GarbageCan': 1, 'LaundryHamper': 1, 'Safe': 1, 'Shelf': 4,
        'SideTable': 2,
    },
    'living room': {
        'ArmChair': 2, 'Cabinet': 3, 'CoffeeTable': 1, 'DiningTable': 1,
        'Drawer': 4, 'Dresser': 1, 'GarbageCan': 1, 'Ottoman': 1, 'Safe': 1,
        'Shelf': 3, 'SideTable': 2, 'Sofa': 1,
    },
    'bathroom': {
        'BathtubBasin': 1, 'Cabinet': 4, 'CounterTop': 1, 'Drawer': 3,
        'GarbageCan': 1, 'HandTowelHolder': 2, 'Shelf': 2, 'SideTable': 1,
        'SinkBasin': 2, 'Toilet': 1, 'ToiletPaperHanger': 1, 'TowelHolder': 1,
    },
}

# Room -> object type -> receptacle types where it usually lies there.
USUAL_PLACES = {
    'kitchen': {
        'Apple': ('CounterTop', 'DiningTable', 'Fridge'),
        'Bowl': ('Cabinet', 'Shelf', 'DiningTable'),
        'Bread': ('CounterTop', 'DiningTable'),
        'ButterKnife': ('Drawer', 'CounterTop'),
        'Cup': ('Cabinet', 'Shelf', 'SinkBasin'),
        'DishSponge': ('SinkBasin', 'CounterTop'),
        'Egg': ('Fridge',),
        'Fork': ('Drawer', 'DiningTable'),
        'Kettle': ('StoveBurner',),
        'Knife': ('Drawer', 'CounterTop'),
        'Ladle': ('Drawer', 'CounterTop'),
        'Lettuce': ('Fridge',),
        'Mug': ('Cabinet', 'CoffeeMachine', 'Shelf'),
        'Pan': ('StoveBurner',),
        'PepperShaker': ('Cabinet', 'CounterTop', 'Shelf'),
        'Plate': ('Cabinet', 'Shelf', 'DiningTable'),
        'Pot': ('StoveBurner',),
        'Potato': ('Fridge', 'CounterTop'),
        'SaltShaker': ('Cabinet', 'CounterTop', 'Shelf'),
        'SoapBottle': ('CounterTop', 'Cabinet'),
        'Spatula': ('Drawer', 'CounterTop'),
        'Spoon': ('Drawer', 'DiningTable'),
        'Tomato': ('Fridge', 'CounterTop'),
        'WineBottle': ('Fridge', 'Cabinet'),
    },
    'bedroom': {
        'AlarmClock': ('Desk', 'SideTable'),
        'BaseballBat': ('Bed',),
        'BasketBall': ('ArmChair', 'Dresser'),
        'Book': ('Bed', 'Shelf', 'Desk'),
        'Box': ('Dresser', 'ArmChair'),
        'CD': ('Desk', 'Drawer', 'Shelf'),
        'CellPhone': ('Bed', 'Desk', 'SideTable'),
        'Cloth': ('LaundryHamper', 'Dresser'),
        'CreditCard': ('Drawer', 'Desk'),
        'KeyChain': ('Drawer', 'SideTable'),
        'Laptop': ('Desk', 'Bed'),
        'Mug': ('Desk', 'SideTable'),
        'Pen': ('Desk', 'Drawer'),
        'Pencil': ('Desk', 'Drawer'),
        'Pillow': ('Bed',),
        'Statue': ('Shelf', 'Dresser'),
        'TennisRacket': ('Bed', 'Dresser'),
        'TissueBox': ('SideTable', 'Dresser'),
        'Vase': ('Shelf', 'Dresser'),
        'Watch': ('Safe', 'Drawer'),
    },
    'living room': {
        'Book': ('Sofa', 'CoffeeTable', 'Shelf'),
        'Box': ('Sofa', 'ArmChair'),
        'Candle': ('CoffeeTable', 'Shelf'),
        'CellPhone': ('Sofa', 'ArmChair'),
        'CreditCard': ('Drawer', 'ArmChair'),
        'KeyChain': ('Drawer', 'Safe'),
        'Laptop': ('CoffeeTable', 'Sofa'),
        'Newspaper': ('Sofa', 'CoffeeTable', 'ArmChair'),
        'Pillow': ('Sofa', 'ArmChair'),
        'Plate': ('DiningTable', 'CoffeeTable'),
        'RemoteControl': ('Sofa', 'ArmChair'),
        'Statue': ('Shelf', 'Dresser'),
        'TissueBox': ('SideTable', 'CoffeeTable'),
        'Vase': ('Shelf', 'Cabinet'),
        'Watch': ('Safe', 'Drawer'),
        'WateringCan': ('SideTable', 'Dresser'),
    },
    'bathroom': {
        'Candle': ('Toilet', 'CounterTop'),
        'Cloth': ('Cabinet', 'BathtubBasin'),
        'DishSponge': ('BathtubBasin', 'SinkBasin'),
        'HandTowel': ('HandTowelHolder',),
        'SoapBar': ('SinkBasin', 'BathtubBasin'),
        'SoapBottle': ('Toilet', 'CounterTop'),
        'SprayBottle': ('Cabinet', 'CounterTop'),
        'TissueBox': ('Toilet', 'CounterTop'),
        'ToiletPaper': ('ToiletPaperHanger', 'Cabinet'),
    },
}


@config.configurable
@dataclasses.dataclass(frozen=True)
class Layout:
  """How large and how orderly the generated rooms are.

  Attributes:
    receptacles: fewest and most receptacles of a room.
    most_per_type: most receptacles of one type; 1 leaves no 'cabinet 2'.
    objects: fewest and most objects besides those of the task.
    tidiness: how much likelier one of an object's usual places is than any
      other place that can hold it; 1.0 hides everything anywhere.
    stuck: share of cabinets and drawers that do not open, as in ALFRED.
  """

  receptacles: tuple[int, int] = (11, 24)
  most_per_type: int = 6
  objects: tuple[int, int] = (10, 24)
  tidiness: float = 6.0
  stuck: float = 0.25

  def __post_init__(self) -> None:
    low, high = self.receptacles
    if not 4 <= low <= high:
      raise ValueError(
          f'Layout.receptacles is {self.receptacles}; expected (low, high)'
          ' with 4 <= low <= high'
      )
    if self.most_per_type < 1 or self.tidiness < 1.0:
      raise ValueError(
          'Layout needs most_per_type >= 1 and tidiness >= 1.0, got'
          f' {self.most_per_type} and {self.tidiness}'
      )
    if not 0 <= self.objects[0] <= self.objects[1]:
      raise ValueError(
          f'Layout.objects is {self.objects}; expected 0 <= low <= high'
      )


@dataclasses.dataclass(frozen=True)
class Receptacle:
  """A receptacle: THOR-style `pddl` id, shown to players as `name`."""

  type: str
  pddl: str
  location: str
  openable: bool
  name: str = ''


@dataclasses.dataclass(frozen=True)
class Item:
  """An object and the receptacle that it lies in at the start."""

  type: str
  pddl: str
  place: Receptacle
  name: str = ''


@dataclasses.dataclass(frozen=True)
class Goal:
  """What the task asks for; `target` is a receptacle type or the lamp."""

  kind: str
  object: str
  target: str


@dataclasses.dataclass(frozen=True)
class Game:
  """A generated game before it is written as PDDL."""

  goal: Goal
  instruction: str
  receptacles: tuple[Receptacle, ...]
  items: tuple[Item, ...]


@functools.lru_cache(maxsize=1)
def _tables() -> tuple[dict[str, frozenset[str]], dict[str, frozenset[str]]]:
  """ALFRED's tables: what a receptacle type may hold, what can be done."""
  from alfworld.gen import constants

  holds = constants.VAL_RECEPTACLE_OBJECTS
  able = constants.VAL_ACTION_OBJECTS
  return (
      {k: frozenset(v) for k, v in holds.items()},
      {k: frozenset(v) for k, v in able.items()},
  )


def _candidate_goals(kind: str, layout: Layout) -> list[tuple[str, Goal]]:
  """Every (room, goal) that the rooms and ALFRED's tables allow for a kind."""
  holds, able = _tables()
  verb, appliance = APPLIANCE.get(kind, (None, None))
  goals = []
  for room, usual in USUAL_PLACES.items():
    if appliance and appliance not in ROOMS[room]:
      continue
    for item in sorted(usual):
      if verb and item not in able[_ABLE[verb]]:
        continue
      if kind == 'look_at_obj_in_light':
        if _LAMP_STANDS & set(ROOMS[room]) and room != 'kitchen':
          goals.append((room, Goal(kind, item, 'DeskLamp')))
        continue
      targets = [r for r in sorted(ROOMS[room]) if item in holds.get(r, ())]
      for target in targets:
        elsewhere = [r for r in targets if r != target]
        # Heat in the microwave and put in the microwave is a loop of its own
        # that ALFRED never asks for.
        if elsewhere and target != appliance:
          goals.append((room, Goal(kind, item, target)))
  return goals


_cached_goals = functools.lru_cache(maxsize=64)(_candidate_goals)


def _coordinate(rng: random.Random) -> str:
  value = rng.randint(-399, 399)
  sign = 'minus' if value < 0 else 'plus'
  whole, cents = divmod(abs(value), 100)
  return f'_{sign}_{whole:02d}_dot_{cents:02d}'


def _thor_id(kind: str, rng: random.Random, taken: set[str]) -> str:
  """A fresh THOR-style id such as Mug_bar__plus_01_dot_20_bar_..."""
  stem, tail = _BASINS.get(kind, kind), ''
  if kind in _BASINS:
    tail = f'_bar_{kind}'
  while True:
    place = '_bar_'.join(_coordinate(rng) for _ in range(3))
    name = f'{stem}_bar_{place}{tail}'
    if name not in taken:
      taken.add(name)
      return name


def _display_names(pddl_ids: list[str]) -> dict[str, str]:
  """The names that TextWorld's ALFRED demangler gives, e.g. 'cabinet 3'.

  Ids are sorted in lower case and numbers handed out from the highest.
  """
  by_type: dict[str, list[str]] = {}
  for pddl in sorted(pddl_ids, key=str.lower):
    stem = pddl.lower().split('_bar_', 1)[0]
    if 'basin' in pddl.lower():
      stem += 'basin'
    by_type.setdefault(stem, []).append(pddl)
  return {
      pddl: f'{stem} {len(ids) - i}'
      for stem, ids in by_type.items()
      for i, pddl in enumerate(ids)
  }


def _choose_receptacle_types(
    room: str, goal: Goal, layout: Layout, rng: random.Random
) -> list[str]:
  """Receptacle types of the room, those that the task needs first."""
  holds, _ = _tables()
  types = []
  if goal.kind in APPLIANCE:
    types.append(APPLIANCE[goal.kind][1])
  if goal.target == 'DeskLamp':
    types.append(rng.choice(sorted(_LAMP_STANDS & set(ROOMS[room]))))
  else:
    types.append(goal.target)
  usual = [
      r for r in USUAL_PLACES[room][goal.object]
      if r in ROOMS[room] and r != goal.target
      and goal.object in holds.get(r, ())
  ]
  others = [
      r for r in sorted(ROOMS[room])
      if r != goal.target and goal.object in holds.get(r, ())
  ]
  if not set(types) & set(others):
    types.append(rng.choice(usual or others))
  pool = [
      r for r, most in sorted(ROOMS[room].items())
      for _ in range(min(most, layout.most_per_type) - types.count(r))
  ]
  rng.shuffle(pool)
  count = rng.randint(*layout.receptacles)
  return types + pool[: max(0, count - len(types))]


def _place(
    item: str,
    room: str,
    receptacles: list[Receptacle],
    layout: Layout,
    rng: random.Random,
    avoid: str = '',
) -> Receptacle | None:
  """A receptacle for an object: its usual places are likelier."""
  holds, _ = _tables()
  usual = USUAL_PLACES[room].get(item, ())
  fits = [
      r for r in receptacles
      if r.type != avoid and item in holds.get(r.type, ())
  ]
  if not fits:
    return None
  weights = [layout.tidiness if r.type in usual else 1.0 for r in fits]
  return rng.choices(fits, weights)[0]


def generate(seed: int, kind: str, layout: Layout) -> Game:
  """The game of `seed`: a pure function of its arguments.

  Raises:
    ValueError: for an unknown kind.
  """
  if kind not in KINDS:
    raise ValueError(f'unknown task kind {kind!r}; expected one of {KINDS}')
  rng = random.Random(f'household 1 {seed} {kind}')
  room, goal = rng.choice(_cached_goals(kind, layout))
  taken: set[str] = set()
  receptacles = []
  for i, type_ in enumerate(_choose_receptacle_types(room, goal, layout, rng)):
    stuck = type_ in _SOMETIMES_STUCK and rng.random() < layout.stuck
    receptacles.append(
        Receptacle(
            type_,
            _thor_id(type_, rng, taken),
            f'loc_bar_{i}_bar_{rng.randint(0, 9)}_bar_{rng.randint(0, 3)}'
            f'_bar_{rng.choice((0, 15, 30, 45, 60))}',
            type_ in _OPENABLE and not stuck,
        )
    )
  items = []

  def put(type_: str, avoid: str = '') -> None:
    place = _place(type_, room, receptacles, layout, rng, avoid)
    if place is not None:
      items.append(Item(type_, _thor_id(type_, rng, taken), place))

  for _ in range(2 if goal.kind == 'pick_two_obj_and_place' else 1):
    put(goal.object, avoid=goal.target)
  if goal.target == 'DeskLamp':
    stands = [r for r in receptacles if r.type in _LAMP_STANDS]
    items.append(
        Item('DeskLamp', _thor_id('DeskLamp', rng, taken), rng.choice(stands))
    )
  distractors = sorted(set(USUAL_PLACES[room]) - {goal.object})
  for _ in range(rng.randint(*layout.objects)):
    put(rng.choice(distractors))
  names = _display_names([r.pddl for r in receptacles] + [i.pddl for i in items])
  named = {
      r.pddl: dataclasses.replace(r, name=names[r.pddl]) for r in receptacles
  }
  return Game(
      goal,
      _instruction(goal, rng),
      tuple(named.values()),
      tuple(
          dataclasses.replace(i, name=names[i.pddl], place=named[i.place.pddl])
          for i in items
      ),
  )


def _instruction(goal: Goal, rng: random.Random) -> str:
  from alfworld.gen import goal_library

  template = rng.choice(goal_library.gdict[goal.kind]['templates'])
  return template.format(
      obj=goal.object.lower(),
      recep=goal.target.lower(),
      toggle=goal.target.lower(),
  )


def walkthrough(game: Game) -> list[str]:
  """Commands of an expert who knows where everything is; wins on the last."""
  goal, commands = game.goal, []
  at, opened = None, set()

  def go(place: Receptacle, inside: bool) -> None:
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
    if goal.kind in APPLIANCE:
      verb, type_ = APPLIANCE[goal.kind]
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


def _facts(game: Game) -> list[str]:
  """The `:init` facts of the PDDL problem."""
  holds, able = _tables()
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
    if i.type in _RECEPTACLE_OBJECTS:
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


def _problem(game: Game) -> str:
  from alfworld.gen import goal_library

  receptacle_types = {r.type for r in game.receptacles} | set(_CONSTANT_RTYPES)
  item_types = {i.type for i in game.items} | set(_CONSTANT_OTYPES)
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
  import alfworld.gen  # Found by path: importing alfworld.info makes folders.

  data = pathlib.Path(alfworld.gen.__file__).parent.parent / 'data'
  return (data / 'alfred.pddl').read_text(), (data / 'alfred.twl2').read_text()


def game_data(game: Game) -> dict[str, object]:
  """The content of the game's `game.tw-pddl`."""
  domain, grammar = _domain_and_grammar()
  return {
      'pddl_domain': domain,
      'grammar': re.sub('UNKNOWN GOAL', game.instruction, grammar),
      'pddl_problem': _problem(game),
      'walkthrough': walkthrough(game),
      'solvable': True,
  }


def save(game: Game, folder: pathlib.Path) -> pathlib.Path:
  """Writes `game.tw-pddl` in the official layout; returns its path."""
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / 'game.tw-pddl'
  path.write_text(json.dumps(game_data(game)))
  return path
