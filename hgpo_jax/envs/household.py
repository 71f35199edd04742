"""Seeded generator of ALFWorld-format household games.

The same seed always gives the same game, on every machine. `household_pddl`
writes a game as the PDDL and the grammar that the TextWorld engine plays.
"""

from __future__ import annotations

import dataclasses
import functools
import random

from hgpo_jax import config
from hgpo_jax.envs import alfworld_package
from hgpo_jax.envs import household_rooms as rooms
from hgpo_jax.envs import textworld_game

KINDS = rooms.KINDS


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
    if not 0.0 <= self.stuck <= 1.0:
      raise ValueError(
          f'Layout.stuck is {self.stuck}; expected a share, 0 to 1'
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


def _candidate_goals(kind: str, layout: Layout) -> list[tuple[str, Goal]]:
  """Every (room, goal) that the rooms and ALFRED's tables allow for a kind."""
  holds, able = rooms.alfred_tables()
  verb, appliance = rooms.APPLIANCE.get(kind, (None, None))
  goals = []
  for room, usual in rooms.USUAL_PLACES.items():
    if appliance and appliance not in rooms.ROOMS[room]:
      continue
    for item in sorted(usual):
      if verb and item not in able[rooms.ABLE[verb]]:
        continue
      if kind == 'look_at_obj_in_light':
        if rooms.LAMP_STANDS & set(rooms.ROOMS[room]) and room != 'kitchen':
          goals.append((room, Goal(kind, item, 'DeskLamp')))
        continue
      targets = [
          r for r in sorted(rooms.ROOMS[room]) if item in holds.get(r, ())
      ]
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
  stem, tail = rooms.BASINS.get(kind, kind), ''
  if kind in rooms.BASINS:
    tail = f'_bar_{kind}'
  while True:
    place = '_bar_'.join(_coordinate(rng) for _ in range(3))
    name = f'{stem}_bar_{place}{tail}'
    if name not in taken:
      taken.add(name)
      return name


def _choose_receptacle_types(
    room: str, goal: Goal, layout: Layout, rng: random.Random
) -> list[str]:
  """Receptacle types of the room, those that the task needs first."""
  holds, _ = rooms.alfred_tables()
  types = []
  if goal.kind in rooms.APPLIANCE:
    types.append(rooms.APPLIANCE[goal.kind][1])
  if goal.target == 'DeskLamp':
    types.append(rng.choice(sorted(rooms.LAMP_STANDS & set(rooms.ROOMS[room]))))
  else:
    types.append(goal.target)
  usual = [
      r
      for r in rooms.USUAL_PLACES[room][goal.object]
      if r in rooms.ROOMS[room]
      and r != goal.target
      and goal.object in holds.get(r, ())
  ]
  others = [
      r
      for r in sorted(rooms.ROOMS[room])
      if r != goal.target and goal.object in holds.get(r, ())
  ]
  if not set(types) & set(others):
    types.append(rng.choice(usual or others))
  pool = [
      r
      for r, most in sorted(rooms.ROOMS[room].items())
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
  holds, _ = rooms.alfred_tables()
  usual = rooms.USUAL_PLACES[room].get(item, ())
  fits = [
      r
      for r in receptacles
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
  receptacles = [
      _receptacle(type_, i, layout, rng, taken)
      for i, type_ in enumerate(
          _choose_receptacle_types(room, goal, layout, rng)
      )
  ]
  items = _items(room, goal, receptacles, layout, rng, taken)
  return _named(goal, _instruction(goal, rng), receptacles, items)


def _receptacle(
    type_: str, index: int, layout: Layout, rng: random.Random, taken: set[str]
) -> Receptacle:
  stuck = type_ in rooms.SOMETIMES_STUCK and rng.random() < layout.stuck
  return Receptacle(
      type_,
      _thor_id(type_, rng, taken),
      f'loc_bar_{index}_bar_{rng.randint(0, 9)}_bar_{rng.randint(0, 3)}'
      f'_bar_{rng.choice((0, 15, 30, 45, 60))}',
      type_ in rooms.OPENABLE and not stuck,
  )


def _items(
    room: str,
    goal: Goal,
    receptacles: list[Receptacle],
    layout: Layout,
    rng: random.Random,
    taken: set[str],
) -> list[Item]:
  """The objects of the task, the lamp if it needs one, and others."""
  items = []

  def put(type_: str, avoid: str = '') -> None:
    place = _place(type_, room, receptacles, layout, rng, avoid)
    if place is not None:
      items.append(Item(type_, _thor_id(type_, rng, taken), place))

  for _ in range(2 if goal.kind == 'pick_two_obj_and_place' else 1):
    put(goal.object, avoid=goal.target)
  if goal.target == 'DeskLamp':
    stands = [r for r in receptacles if r.type in rooms.LAMP_STANDS]
    items.append(
        Item('DeskLamp', _thor_id('DeskLamp', rng, taken), rng.choice(stands))
    )
  others = sorted(set(rooms.USUAL_PLACES[room]) - {goal.object})
  for _ in range(rng.randint(*layout.objects)):
    put(rng.choice(others))
  return items


def _named(
    goal: Goal,
    instruction: str,
    receptacles: list[Receptacle],
    items: list[Item],
) -> Game:
  """The game, with the names that players see."""
  names = textworld_game.display_names([x.pddl for x in (*receptacles, *items)])
  named = {
      r.pddl: dataclasses.replace(r, name=names[r.pddl]) for r in receptacles
  }
  return Game(
      goal,
      instruction,
      tuple(named.values()),
      tuple(
          dataclasses.replace(i, name=names[i.pddl], place=named[i.place.pddl])
          for i in items
      ),
  )


def _instruction(goal: Goal, rng: random.Random) -> str:
  goal_library = alfworld_package.load('alfworld.gen.goal_library')
  template = rng.choice(goal_library.gdict[goal.kind]['templates'])
  return template.format(
      obj=goal.object.lower(),
      recep=goal.target.lower(),
      toggle=goal.target.lower(),
  )
