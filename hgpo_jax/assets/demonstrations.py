"""Demonstrations on the real engine: what the tiny policy is trained to imitate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import concurrent.futures
import dataclasses
import functools
import multiprocessing
import random

from hgpo_jax import types
from hgpo_jax.assets import demonstrator
from hgpo_jax.envs import alfworld
from hgpo_jax.envs import household
from hgpo_jax.rollout import prompt

# Small rooms with one receptacle of each type: the games of the quick start.
MINI = household.Layout(
    receptacles=(5, 8), most_per_type=1, objects=(3, 6), tidiness=8.0
)


@dataclasses.dataclass(frozen=True)
class Example:
  """One step of a demonstration as text."""

  prompt: str
  response: str


@dataclasses.dataclass(frozen=True)
class Recipe:
  """How demonstrations are made.

  Attributes:
    games: training games, from the split 'train' only.
    episodes: episodes of each game.
    max_steps: steps of an episode.
    history_length: own past actions that the prompt shows.
    slips: share of steps on which a command that is not there is sent before
      the choice, so that "Nothing happens." is a state like any other. Slips
      are never imitated.
    seed: of every random choice.
    planned: share of episodes whose player knows the plan.
    plan: how that player chooses.
    habits: how the other one does.
  """

  games: int = 2400
  episodes: int = 4
  max_steps: int = 20
  history_length: int = 20
  slips: float = 0.03
  seed: int = 0
  planned: float = 0.17
  plan: demonstrator.Habits = demonstrator.Habits(aimless=0.03, plan=1.0)
  habits: demonstrator.Habits = demonstrator.Habits()


def response_text(choice: demonstrator.Choice) -> str:
  """The answer in the required form."""
  return f'<think>{choice.thought}</think><action>{choice.action}</action>'


def _slip(admissible: Sequence[str], rng: random.Random) -> str:
  """A command that reads well but names something that is not here."""
  noun = rng.choice(['mug 3', 'desk 4', 'apple 2', 'book 5', 'shelf 6'])
  words = rng.choice(admissible).split()
  return ' '.join([words[0], noun] if words[0] != 'go' else ['go', 'to', noun])


def play(
    env: alfworld.LiveAlfworld,
    task: types.Task,
    goal: household.Goal,
    recipe: Recipe,
    rng: random.Random,
) -> Iterator[Example]:
  """One episode of the demonstrator; yields what it saw and answered."""
  template = prompt.CompactPrompt()
  planned = rng.random() < recipe.planned
  habits = recipe.plan if planned else recipe.habits
  player = demonstrator.Player(goal, habits, rng)
  result = env.reset(task)
  instruction, turns, effective = result.instruction, [], []
  while not result.done:
    slip = rng.random() < recipe.slips
    action = _slip(result.admissible, rng) if slip else ''
    if not slip or action in result.admissible:
      shown = turns[-recipe.history_length :] if recipe.history_length else []
      text = template.render(
          instruction, shown, 1, result.observation, result.admissible, 1
      )
      choice = player.act(
          result.admissible, effective[-recipe.history_length :]
      )
      yield Example(text, response_text(choice))
      action = choice.action
      effective.append(action)
    turns.append(prompt.Turn(result.observation, action))
    result = env.step(action)


def _demonstrate(recipe: Recipe, indices: Sequence[int]) -> list[Example]:
  games = alfworld.HouseholdGames(layout=MINI, train_size=recipe.games)
  spec = alfworld.AlfworldEnv(games=games, max_steps=recipe.max_steps)
  env, split, examples = spec.make(), games.split('train'), []
  for index in indices:
    task = split[index]
    goal = household.generate(task.seed, task.kind, MINI).goal
    for episode in range(recipe.episodes):
      rng = random.Random(f'{recipe.seed} {index} {episode}')
      examples += play(env, task, goal, recipe, rng)
  return examples


def collect(recipe: Recipe, workers: int = 2) -> list[Example]:
  """All demonstrations of a recipe, in an order that workers do not change."""
  chunks = [
      range(first, min(first + 50, recipe.games))
      for first in range(0, recipe.games, 50)
  ]
  context = multiprocessing.get_context('forkserver')
  with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
    parts = list(pool.map(functools.partial(_demonstrate, recipe), chunks))
  return [example for part in parts for example in part]
