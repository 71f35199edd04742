"""State keys: what is told apart and what is not."""

from __future__ import annotations

import pytest

from hgpo_jax.envs import alfworld
from hgpo_jax.envs import alfworld_states
from hgpo_jax.envs import household

LOOK = ('go to fridge 1', 'help', 'look')
ROOM = 'You are in the middle of a room.'
ARRIVE = 'You arrive at fridge 1. The fridge 1 is closed.'
HEAT = 'You heat the egg 1 using the microwave 1.'
NOTHING = 'Nothing happens.'


def keys(name, texts, admissible=LOOK):
  key = alfworld_states.STATE_KEYS[name]()
  return [key('', text, admissible) for text in texts]


def test_observation_is_the_raw_text():
  assert keys('observation', [ROOM, NOTHING]) == [ROOM, NOTHING]


def test_admissible_commands_are_part_of_the_state():
  key = keys('admissible', [ROOM])[0]
  assert key == (f"{ROOM}\nAdmissible actions:\n 'go to fridge 1'\n 'look'\n")
  assert keys('admissible', [ROOM], ('look',))[0] != key


def test_nothing_happens_keeps_the_state():
  start, again, arrive, after = keys(
      'admissible', [ROOM, NOTHING, ARRIVE, 'Nothing happens at all.']
  )
  assert start == again and arrive == after != start


@pytest.mark.parametrize('verb', ['heat', 'cool', 'clean', 'turn on'])
def test_what_cannot_be_seen_is_joined_with_what_is_seen_next(verb):
  hidden = f'You {verb} the egg 1.'
  seen = keys('admissible', [ROOM, hidden, NOTHING, ARRIVE, NOTHING, ROOM])
  plain = keys('admissible', [ROOM, ARRIVE])
  told = keys('admissible', [hidden])[0]
  assert seen[1] == seen[2] == told  # Itself is seen, and not joined.
  assert seen[3] == seen[4] == f'{told} {plain[1]}'
  assert seen[5] == plain[0]  # Joined once.


def story(*texts):
  return keys('inventory', texts, ('look', 'help'))[-1]


def test_inventory_and_places():
  assert story(ROOM) == (
      f'{ROOM} Location: middle of a room. In hand: nothing. Moved: nothing.'
      ' help,look'
  )
  arrive, take = ARRIVE, 'You pick up the egg 1 from the fridge 1.'
  sink = 'You arrive at sink basin 1. On the sink basin 1, you see nothing.'
  held = story(ROOM, arrive, take, NOTHING)
  assert 'Nothing happens. Location: fridge 1. In hand: egg 1.' in held
  put = 'You move the egg 1 to the sink basin 1.'
  moved = story(ROOM, arrive, take, sink, put)
  assert (
      'Location: sink basin 1. In hand: nothing. Moved: egg 1 from fridge 1 to'
      ' sink basin 1. help' in moved
  )
  back = story(arrive, take, 'You move the egg 1 to the fridge 1.')
  assert 'In hand: nothing. Moved: nothing.' in back


def test_what_was_done_to_an_object_stays_with_it():
  take = 'You pick up the egg 1 from the fridge 1.'
  assert 'In hand: egg 1 (heat). Moved: nothing.' in story(ARRIVE, take, HEAT)
  cooled = story(ARRIVE, take, HEAT, 'You cool the egg 1 using the fridge 1.')
  assert 'In hand: egg 1 (cool).' in cooled
  put = story(ARRIVE, take, HEAT, 'You move the egg 1 to the fridge 1.')
  assert 'Moved: egg 1 (heat) from fridge 1 to fridge 1.' in put
  sliced = story(ARRIVE, 'You sliced the egg 1 with the knife 1.')
  assert 'Moved: egg 1 (slice) from fridge 1 to fridge 1.' in sliced


def test_the_order_of_handling_is_no_state():
  def carry(name):
    return (
        'You arrive at drawer 1. It.',
        f'You pick up the {name} from the drawer 1.',
        'You arrive at bed 1. On the bed 1, you see nothing.',
        f'You move the {name} to the bed 1.',
    )

  end = 'You arrive at drawer 1. It.'
  assert story(*carry('pen 1'), *carry('cd 1'), end) == story(
      *carry('cd 1'), *carry('pen 1'), end
  )


@pytest.mark.parametrize('name', alfworld_states.STATE_KEYS)
def test_keys_on_the_real_engine_follow_the_game_alone(name):
  layout = household.Layout(receptacles=(5, 8), objects=(3, 6))
  games = alfworld.HouseholdGames(layout=layout)
  env = alfworld.AlfworldEnv(games=games, state_key=name).make()
  task = games.split('train')[4]
  commands = games.load(task)['walkthrough']

  def play(actions):
    return [env.reset(task), *map(env.step, actions)]

  before, after = play(commands), play(commands)
  assert before == after
  found = [result.state_key for result in before]
  if name != 'observation':  # A walkthrough never comes back to a state.
    assert len(set(found)) == len(found)
  nothing = play(['eat it', 'eat it'])
  assert nothing[1].state_key == nothing[2].state_key
  assert (nothing[0].state_key == nothing[1].state_key) == (
      name == 'admissible'
  )
