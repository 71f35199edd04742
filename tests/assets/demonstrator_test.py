"""The demonstrator: always admissible, skilled, and short of the plan."""

from __future__ import annotations

import random

from hgpo_jax.assets import demonstrations
from hgpo_jax.assets import demonstrator
from hgpo_jax.envs import alfworld
from hgpo_jax.envs import household
from hgpo_jax.envs import textworld_engine
from hgpo_jax.envs import textworld_game


def _episodes(habits, count, by_plan=False, steps=20):
  """[(won, [(choice, admissible, past)])] of `count` training games."""
  games = alfworld.HouseholdGames(layout=demonstrations.MINI)
  engine, split = textworld_engine.Engine(), games.split('train')
  for index in range(count):
    task = split[index]
    goal = household.generate(task.seed, task.kind, games.layout).goal
    player = demonstrator.Player(goal, habits, random.Random(index))
    engine.reset(textworld_game.compile_game(games.load(task)))
    past, seen = [], []
    while len(past) < steps and not engine.won:
      admissible = tuple(a for a in engine.admissible if ' ' in a)
      view = demonstrator.View(admissible, tuple(past))
      choice = player.plan(view) if by_plan else player.act(admissible, past)
      seen.append((choice, engine.admissible, tuple(past)))
      engine.step(choice.action)
      past.append(choice.action)
    yield engine.won, seen


def test_every_choice_is_admissible_and_has_a_two_word_thought():
  for _, seen in _episodes(demonstrator.Habits(), 12):
    for choice, admissible, _ in seen:
      assert choice.action in admissible
      assert len(choice.thought.split()) == 2


def test_the_skills_suffice_but_the_plan_is_missing():
  usual = demonstrator.Habits()
  planned = [won for won, _ in _episodes(usual, 18, by_plan=True, steps=30)]
  played = [won for won, _ in _episodes(usual, 18)]
  assert sum(planned) >= 16
  assert sum(played) <= sum(planned) - 3


def test_what_is_held_follows_from_own_actions():
  view = demonstrator.View(
      ('go to desk 1', 'move mug 1 to shelf 1', 'examine shelf 1'),
      ('go to desk 1', 'take mug 1 from desk 1', 'go to shelf 1'),
  )
  assert view.held == 'mug 1' and view.here == 'shelf 1'
  assert view.places() == ['desk 1']
  assert view.commands('move', at='shelf') == ['move mug 1 to shelf 1']
  assert not view.commands('move', at='desk')
  after = demonstrator.View((), (*view.past, 'move mug 1 to shelf 1'))
  assert not after.held


def test_demonstrations_are_reproducible_and_slips_are_not_imitated():
  recipe = demonstrations.Recipe(games=2, episodes=2, slips=0.3)
  examples = demonstrations.collect(recipe, workers=1)
  assert examples == demonstrations.collect(recipe, workers=2)
  assert any('Now: Nothing happens.' in e.prompt for e in examples)
  for example in examples:
    action = example.response.split('<action>')[1].removesuffix('</action>')
    listed = example.prompt.split('Actions:\n')[1].split('\nTask: ')[0]
    assert action in listed.split('\n')
