"""A household player that has the skills but not the plan.

It plays the part that pre-training plays for a real model: it answers in the
right form, names things that are there, knows what the words of the task mean,
and can carry out each sub-goal (find, take, put, heat, cool, clean, use). What
it lacks is what reinforcement learning is to add: which sub-goal is due now,
such as heating before putting away, and where things usually lie.
It sees no more than the policy's prompt shows: the observation, the admissible
actions, and its own last actions.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import random

from hgpo_jax.envs import household
from hgpo_jax.envs import household_rooms


@dataclasses.dataclass(frozen=True)
class Habits:
  """How the player chooses; shares are probabilities.

  Attributes:
    aimless: share of steps spent on any admissible action.
    fetch: when empty-handed, share of going for the task's object rather
      than for any other that is in sight.
    put: when holding, share of putting the object away at the task's target,
      whether it is ready for that or not, rather than doing another thing
      that the task suggests.
    plan: share of steps on which it does know the right sub-goal.
    revisit: weight of a place already visited when choosing where to search.
  """

  aimless: float = 0.08
  fetch: float = 0.92
  put: float = 0.6
  plan: float = 0.0
  revisit: float = 0.1


@dataclasses.dataclass(frozen=True)
class Choice:
  """A thought that names the sub-goal, and the command that serves it."""

  thought: str
  action: str


def _noun(name: str) -> str:
  return name.rsplit(' ', 1)[0]


@dataclasses.dataclass(frozen=True)
class View:
  """What can be read off the prompt: actions now, and actions before.

  Attributes:
    admissible: commands on offer.
    past: own earlier commands, oldest first.
  """

  admissible: tuple[str, ...]
  past: tuple[str, ...]

  def commands(self, verb: str, noun: str = '', at: str = '') -> list[str]:
    """Admissible commands `verb noun N ... at N`; '' matches anything."""
    found = []
    for command in self.admissible:
      words = command.split()
      if words[0] != verb or (noun and words[1] != noun):
        continue
      if at and len(words) > 3 and words[-2] != at:
        continue
      found.append(command)
    return found

  @property
  def here(self) -> str:
    """The place last gone to, '' at the start."""
    for command in reversed(self.past):
      if command.startswith('go to '):
        return command[len('go to ') :]
    return ''

  @property
  def held(self) -> str:
    """The object in hand, '' if none: taken and not yet moved away."""
    for command in reversed(self.past):
      if command.startswith('take '):
        return command[len('take ') :].split(' from ')[0]
      if command.startswith('move '):
        return ''
    return ''

  def did(self, verb: str, name: str) -> bool:
    """Whether `verb name` was done since `name` was last taken... or before."""
    return any(c.startswith(f'{verb} {name} ') for c in self.past)

  def places(self) -> list[str]:
    """Places that can be gone to, the present one excluded."""
    found = [c[len('go to ') :] for c in self.commands('go')]
    return [p for p in found if p != self.here]


class Player:
  """Plays one episode."""

  def __init__(
      self, goal: household.Goal, habits: Habits, rng: random.Random
  ) -> None:
    self._kind = goal.kind
    self._object = goal.object.lower()
    self._target = goal.target.lower()
    self._verb = household_rooms.APPLIANCE.get(goal.kind, ('', ''))[0]
    self._habits = habits
    self._rng = rng

  def act(self, admissible: Sequence[str], past: Sequence[str]) -> Choice:
    """The next choice, always admissible."""
    view = View(tuple(a for a in admissible if ' ' in a), tuple(past))
    if self._rng.random() < self._habits.aimless:
      return self._explain(self._rng.choice(view.admissible))
    if self._rng.random() < self._habits.plan:
      return self.plan(view)
    if view.held:
      return self._with_full_hands(view)
    return self._with_empty_hands(view)

  def plan(self, view: View) -> Choice:
    """The sub-goal that the task calls for, carried out one step."""
    held = view.held
    if held and _noun(held) != self._object:
      return self._put(view, held, '')
    if not held:
      return self._fetch(view)
    if self._verb and not view.did(self._verb, held):
      return self._treat(view, self._verb, held)
    if self._target == 'desklamp':
      return self._use_lamp(view)
    return self._put(view, held, self._target)

  def _with_empty_hands(self, view: View) -> Choice:
    others = [c for c in view.commands('take') if c.split()[1] != self._object]
    if others and self._rng.random() > self._habits.fetch:
      return self._explain(self._rng.choice(others))
    return self._fetch(view)

  def _with_full_hands(self, view: View) -> Choice:
    target = '' if self._target == 'desklamp' else self._target
    if self._rng.random() < self._habits.put:
      return self._put(view, view.held, target)
    if self._rng.random() < 0.5:
      return self._search(view, self._object)
    if not target:
      return self._use_lamp(view)
    if self._verb and not view.did(self._verb, view.held):
      return self._treat(view, self._verb, view.held)
    return self._put(view, view.held, target)

  def _fetch(self, view: View) -> Choice:
    delivered = (
        self._kind == 'pick_two_obj_and_place'
        and _noun(view.here or ' ') == self._target
    )
    takes = view.commands('take', self._object)
    if takes and not delivered:
      return Choice(f'take {self._object}', self._rng.choice(takes))
    return self._search(view, self._object)

  def _search(self, view: View, noun: str) -> Choice:
    thought = f'find {noun}'
    opens = view.commands('open')
    if opens:
      return Choice(thought, self._rng.choice(opens))
    visited = {c[len('go to ') :] for c in view.past if c.startswith('go to ')}
    places = view.places()
    weights = [self._habits.revisit if p in visited else 1.0 for p in places]
    place = self._rng.choices(places, weights)[0]
    return Choice(thought, f'go to {place}')

  def _treat(self, view: View, verb: str, held: str) -> Choice:
    """Heats, cools or cleans; without the appliance, searches for it."""
    thought = f'{verb} {_noun(held)}'
    now = view.commands(verb, _noun(held))
    if now:
      return Choice(thought, now[0])
    appliance = {'heat': 'microwave', 'cool': 'fridge', 'clean': 'sinkbasin'}
    go = [p for p in view.places() if _noun(p) == appliance[verb]]
    if go:
      return Choice(thought, f'go to {self._rng.choice(go)}')
    return self._search(view, self._object)

  def _use_lamp(self, view: View) -> Choice:
    now = view.commands('use')
    if now:
      return Choice('use desklamp', now[0])
    return self._search(view, 'desklamp')

  def _put(self, view: View, held: str, target: str) -> Choice:
    """Puts the held object at a receptacle of type `target`, '' for any."""
    thought = f'put {_noun(held)}'
    moves = view.commands('move', at=target)
    if moves:
      return Choice(thought, self._rng.choice(moves))
    if target and _noun(view.here or ' ') == target and view.commands('open'):
      return Choice(thought, view.commands('open')[0])
    go = [p for p in view.places() if not target or _noun(p) == target]
    if go:
      return Choice(thought, f'go to {self._rng.choice(go)}')
    return self._search(view, self._object)

  def _explain(self, action: str) -> Choice:
    """A thought for an action that serves no sub-goal of the task."""
    verb, noun = action.split()[0], action.split()[1]
    if verb == 'go':
      return Choice(f'find {self._object}', action)
    verb = {'move': 'put', 'examine': 'look'}.get(verb, verb)
    return Choice(f'{verb} {noun}', action)
