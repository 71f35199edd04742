"""When two moments of ALFWorld games are the same state: three published ways.

Estimators compare steps that were taken in the same state, and know a state by
its key alone. Each way is a callable made anew for an episode; it is given
the command ('' at reset), the text that answered it and the commands that are
admissible now, and returns the key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import re

StateKey = Callable[[str, str, Sequence[str]], str]

_NOTHING = 'Nothing happens'
# After these the state has changed in a way that no later text shows.
_HIDDEN = ('You heat', 'You cool', 'You clean', 'You turn on')


class Observation:
  """The raw observation text: the anchor of GiGPO (2505.10978) and HGPO.

  Two states that look alike are one: a mug taken before or after the fridge
  was visited, and all moments at which nothing happened.
  """

  def __call__(self, command: str, text: str, admissible: Sequence[str]) -> str:
    del command, admissible
    return text


class ObservationAdmissible:
  """The observation and the admissible commands, as G2PO has it for ALFWorld.

  A text that says "Nothing happens" leaves the state as it was, and so keeps
  the previous key. A text that tells of heating, cooling, cleaning or turning
  on is joined with the next one that tells something, since what it changed is
  not seen in that. The first observation has its commands too, unlike in the
  published code, where a first step that does nothing leads to another state.
  """

  def __init__(self) -> None:
    self._last = ''
    self._key = ''

  def __call__(self, command: str, text: str, admissible: Sequence[str]) -> str:
    del command
    if self._key and text.startswith(_NOTHING):
      return self._key
    commands = '\n '.join(f"'{c}'" for c in admissible if c != 'help')
    told = f'{text}\nAdmissible actions:\n {commands}\n'
    joined = self._last.startswith(_HIDDEN)
    self._key = f'{self._last} {told}' if joined else told
    self._last = told
    return self._key


class ObservationInventory:
  """The observation, where the agent is, what it holds and what it moved.

  As GraphGPO has it: text, location, the object in hand with what was done to
  it (heated, cooled, cleaned, sliced), the objects that are elsewhere than
  where they were found or that something was done to, and the admissible
  commands. All of it follows from the texts. Unlike in the published code
  objects are listed by name, not by when they were first touched, and heating
  and cooling undo each other, as they do in the game.
  """

  def __init__(self) -> None:
    self._location = 'middle of a room'
    self._holding = ''
    self._found: dict[str, str] = {}
    self._place: dict[str, str] = {}
    self._done: dict[str, frozenset[str]] = {}

  def __call__(self, command: str, text: str, admissible: Sequence[str]) -> str:
    del command
    for pattern, act in _EVENTS.items():
      if match := re.match(pattern, text):
        act(self, **match.groupdict())
        break
    return ' '.join(
        (
            text,
            f'Location: {self._location}.',
            f'In hand: {self._describe(self._holding) or "nothing"}.',
            f'Moved: {"; ".join(self._moved()) or "nothing"}.',
            ','.join(sorted(admissible)),
        )
    )

  def _describe(self, thing: str) -> str:
    done = ' '.join(sorted(self._done.get(thing, ())))
    return f'{thing} ({done})' if done else thing

  def _moved(self) -> list[str]:
    return [
        f'{self._describe(thing)} from {self._found[thing]} to {place}'
        for thing, place in sorted(self._place.items())
        if place != self._found[thing] or self._done.get(thing)
    ]

  def _arrive(self, place: str) -> None:
    self._location = place

  def _take(self, thing: str) -> None:
    self._holding = thing
    self._found.setdefault(thing, self._location)
    self._place.pop(thing, None)

  def _put(self, thing: str, place: str) -> None:
    self._holding = ''
    self._found.setdefault(thing, place)
    self._place[thing] = place

  def _treat(self, how: str, thing: str) -> None:
    undone = {'heat': 'cool', 'cool': 'heat'}.get(how, '')
    self._done[thing] = self._done.get(thing, frozenset()) - {undone} | {how}
    if thing != self._holding:  # Sliced where it lies.
      self._found.setdefault(thing, self._location)
      self._place.setdefault(thing, self._location)


_EVENTS: Mapping[str, Callable[..., None]] = {
    r'You arrive at (?P<place>[^.]+)\.': ObservationInventory._arrive,
    r'(?:\w+: )?You pick up the (?P<thing>.+?)(?: from the [^.]+)?\.': (
        ObservationInventory._take
    ),
    r'(?:\w+: )?You (?:move|put) the (?P<thing>.+?) (?:to|in) the'
    r' (?P<place>[^.]+)\.': ObservationInventory._put,
    r'You (?P<how>heat|cool|clean|slice)d? the (?P<thing>.+?) (?:using|with) ': (
        ObservationInventory._treat
    ),
}

STATE_KEYS: Mapping[str, Callable[[], StateKey]] = {
    'observation': Observation,
    'admissible': ObservationAdmissible,
    'inventory': ObservationInventory,
}
