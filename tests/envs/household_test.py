"""Generated games: deterministic, varied, disjoint, and won by the expert."""

from __future__ import annotations

import hashlib
import json
import re

import pytest

from hgpo_jax.envs import alfworld
from hgpo_jax.envs import household
from hgpo_jax.envs import household_pddl
from hgpo_jax.envs import household_rooms
from hgpo_jax.envs import textworld_engine
from hgpo_jax.envs import textworld_game

MINI = household.Layout(receptacles=(5, 8), most_per_type=1, objects=(3, 6))

GOLDEN_INSTRUCTION = 'put a clean plate in microwave'
GOLDEN_WALKTHROUGH = [
    'go to shelf 1',
    'take plate 1 from shelf 1',
    'go to sinkbasin 1',
    'clean plate 1 with sinkbasin 1',
    'go to microwave 1',
    'open microwave 1',
    'move plate 1 to microwave 1',
]


@pytest.mark.parametrize('kind', household.KINDS)
@pytest.mark.parametrize('layout', [MINI, household.Layout()])
def test_walkthrough_wins_on_its_last_step(kind, layout):
  engine = textworld_engine.Engine()
  for seed in range(2):
    game = household.generate(seed, kind, layout)
    engine.reset(textworld_game.compile_game(household_pddl.game_data(game)))
    for command in household_pddl.walkthrough(game):
      assert not engine.won
      assert command in engine.admissible
      engine.step(command)
    assert engine.won


def _fingerprint(seed: int, kind: str) -> str:
  game = household_pddl.game_data(household.generate(seed, kind, MINI))
  return hashlib.sha256(json.dumps(game, sort_keys=True).encode()).hexdigest()


def test_a_seed_gives_the_same_game_on_every_machine():
  game = household.generate(7, household.KINDS[2], MINI)
  assert game == household.generate(7, household.KINDS[2], MINI)
  assert game.instruction == GOLDEN_INSTRUCTION
  assert household_pddl.walkthrough(game) == GOLDEN_WALKTHROUGH


def test_splits_share_no_seed_and_no_game():
  games = alfworld.HouseholdGames(layout=MINI, train_size=300)
  train, heldout = games.split('train'), games.split('heldout')
  train_seeds = {train[i].seed for i in range(len(train))}
  heldout_seeds = {heldout[i].seed for i in range(len(heldout))}
  assert len(train_seeds) == 300 and len(heldout_seeds) == 256
  assert not train_seeds & heldout_seeds
  texts = [_fingerprint(s, k) for s in range(60) for k in household.KINDS]
  assert len(set(texts)) == len(texts)


def test_layout_bounds_are_kept():
  for seed in range(40):
    game = household.generate(seed, household.KINDS[seed % 6], MINI)
    assert 5 <= len(game.receptacles) <= 8
    types = [r.type for r in game.receptacles]
    assert len(set(types)) == len(types)
    assert len({r.name for r in game.receptacles}) == len(types)


def test_objects_lie_in_usual_places_more_often_when_tidy():
  def share(tidiness: float) -> float:
    layout = household.Layout(receptacles=(8, 8), tidiness=tidiness)
    usual = total = 0
    for seed in range(60):
      game = household.generate(seed, 'pick_and_place_simple', layout)
      for item in game.items:
        places = {
            p
            for room in household_rooms.USUAL_PLACES.values()
            for p in room.get(item.type, ())
        }
        usual += item.place.type in places
        total += 1
    return usual / total

  assert share(20.0) > share(1.0) + 0.15


def test_every_usual_place_can_hold_the_object():
  holds, _ = household_rooms.alfred_tables()
  for room, objects in household_rooms.USUAL_PLACES.items():
    for item, places in objects.items():
      for place in places:
        assert place in household_rooms.ROOMS[room], (room, item, place)
        assert item in holds[place], (room, item, place)


@pytest.mark.parametrize(
    'wrong, message',
    [
        (dict(receptacles=(2, 3)), 'Layout.receptacles is (2, 3)'),
        (dict(most_per_type=0), 'most_per_type >= 1'),
        (dict(objects=(5, 2)), 'Layout.objects is (5, 2)'),
        (dict(stuck=1.5), 'Layout.stuck is 1.5'),
    ],
)
def test_impossible_layouts_are_refused(wrong, message):
  with pytest.raises(ValueError, match=re.escape(message)):
    household.Layout(**wrong)


def test_unknown_kind_is_refused():
  with pytest.raises(ValueError, match="unknown task kind 'sweep'"):
    household.generate(0, 'sweep', MINI)
