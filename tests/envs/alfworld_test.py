"""ALFWorld on the real engine: the shared suite, stock equality, bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from hgpo_jax import types
from hgpo_jax.envs import alfworld
from hgpo_jax.envs import household
from hgpo_jax.envs import household_pddl
from hgpo_jax.envs import textworld_engine
from hgpo_jax.envs import textworld_game
from tests.envs import conformance

MINI = household.Layout(receptacles=(5, 8), most_per_type=1, objects=(3, 6))


class TestGenerated(conformance.EnvConformance):
  splits = ('train', 'heldout')

  @pytest.fixture
  def spec(self):
    games = alfworld.HouseholdGames(layout=MINI, train_size=12, heldout_size=6)
    return alfworld.AlfworldEnv(games=games, max_steps=8)


@pytest.fixture(scope='module')
def official_folder(tmp_path_factory):
  """A folder in the official layout, holding generated games."""
  root = tmp_path_factory.mktemp('json_2.1.1')
  for split in alfworld.OFFICIAL_COUNTS:
    for i, kind in enumerate(household.KINDS[:3]):
      offset = sorted(alfworld.OFFICIAL_COUNTS).index(split)
      game = household.generate(10 * i + offset, kind, MINI)
      household_pddl.save(
          game, root / split / f'{kind}-X-None-Y-1' / f'trial_{i}'
      )
  return root


class TestOfficialLayout(conformance.EnvConformance):
  splits = tuple(alfworld.OFFICIAL_COUNTS)

  @pytest.fixture
  def spec(self, official_folder):
    games = alfworld.OfficialGames(folder=str(official_folder), any_count=True)
    return alfworld.AlfworldEnv(games=games, max_steps=8)


def test_official_counts_are_checked(official_folder):
  games = alfworld.OfficialGames(folder=str(official_folder))
  with pytest.raises(
      ValueError, match='holds 3 games in train/, expected 3553'
  ):
    games.check()
  with pytest.raises(ValueError, match='holds 0 games'):
    alfworld.OfficialGames(folder='/nowhere', any_count=True).check()


def test_official_task_kind_and_id_come_from_the_path(official_folder):
  games = alfworld.OfficialGames(folder=str(official_folder), any_count=True)
  task = games.split('valid_seen')[0]
  assert task.kind in household.KINDS
  assert task.task_id.startswith(f'valid_seen/{task.kind}-X-None-Y-1/trial_')


@pytest.mark.parametrize(
    'content, message',
    [
        (None, 'cannot read the game file'),
        ('{"pddl_domain": ', 'expected JSON'),
        ('[1, 2]', 'expected a JSON object'),
        ('{"pddl_domain": "x"}', "lacks the text fields ['grammar'"),
    ],
)
def test_a_file_that_is_not_a_game_is_refused(tmp_path, content, message):
  path = tmp_path / 'game.tw-pddl'
  if content is not None:
    path.write_text(content)
  with pytest.raises(textworld_game.GameError, match=re.escape(message)):
    textworld_game.read_game(path)


def test_a_game_that_does_not_translate_is_refused():
  game = household.generate(0, household.KINDS[0], MINI)
  data = household_pddl.game_data(game)
  broken = data['pddl_problem'].replace(':init', ':unit')
  with pytest.raises(textworld_game.GameError, match='does not translate'):
    textworld_game.compile_game({**data, 'pddl_problem': broken})
  with pytest.raises(textworld_game.GameError, match='no sentence'):
    textworld_game.compile_game({**data, 'grammar': 'grammar :: """{}""";'})


def test_other_engine_versions_are_refused(monkeypatch):
  monkeypatch.setitem(textworld_game.SUPPORTED, 'textworld', '9.9.9')
  message = re.escape('needs textworld==9.9.9, found 1.7.0')
  with pytest.raises(ImportError, match=message):
    textworld_game.check_versions()


def test_success_gives_ten_once_and_the_limit_truncates():
  games = alfworld.HouseholdGames(layout=MINI)
  task = games.split('train')[0]
  commands = games.load(task)['walkthrough']
  env = alfworld.AlfworldEnv(games=games, max_steps=len(commands)).make()
  env.reset(task)
  rewards = [env.step(c).reward for c in commands[:-1]]
  last = env.step(commands[-1])
  assert rewards == [0.0] * len(rewards) and last.reward == 10.0
  assert last.terminated and not last.truncated and last.success
  env.reset(task)
  for _ in commands:
    last = env.step('look')
  assert last.truncated and not last.terminated and last.success is False


# Plays games in one process with one engine; run once for each, because the
# fast engine changes how TextWorld computes texts in its whole process.
_TRANSCRIPT = """
import json, random, sys
# Kept: the translator replaces sys.argv.
_, mode, games_path, out_path = sys.argv
games = json.load(open(games_path))

def stock(data):
  import textworld
  from alfworld.agents.environment import alfred_tw_env
  from textworld.envs.pddl import PddlEnv
  path = out_path + '.game'
  json.dump(data, open(path, 'w'))
  infos = textworld.EnvInfos(won=True, admissible_commands=True, feedback=True)
  env = alfred_tw_env.AlfredDemangler(PddlEnv(infos))
  env.load(path)
  state = env.reset()
  command = yield state.feedback, list(state['admissible_commands']), False
  while True:
    state, _, _ = env.step(command)
    command = yield (
        state.feedback, list(state['admissible_commands']), state['won'])

def fast(data):
  from hgpo_jax.envs import textworld_engine, textworld_game
  engine = textworld_engine.Engine()
  text = engine.reset(textworld_game.compile_game(data))
  command = yield text, list(engine.admissible), engine.won
  while True:
    text = engine.step(command)
    command = yield text, list(engine.admissible), engine.won

transcript = []
for index, data in enumerate(games):
  rng = random.Random(index)
  game = {'stock': stock, 'fast': fast}[mode](data)
  answer = next(game)
  transcript.append(answer)
  for command in [None] * 15 + data['walkthrough']:
    if command is None:
      command = 'eat it' if rng.random() < 0.1 else rng.choice(answer[1])
    answer = game.send(command)
    transcript.append([command, answer])
json.dump(transcript, open(out_path, 'w'))
"""


def test_texts_commands_and_outcomes_equal_the_stock_engine(tmp_path):
  games = [
      household_pddl.game_data(household.generate(50 + i, kind, layout))
      for i, kind in enumerate(household.KINDS)
      for layout in (MINI, household.Layout(receptacles=(11, 14)))
  ]
  (tmp_path / 'games.json').write_text(json.dumps(games))
  for engine in ('stock', 'fast'):
    subprocess.run(
        [
            sys.executable,
            '-c',
            _TRANSCRIPT,
            engine,
            tmp_path / 'games.json',
            tmp_path / engine,
        ],
        check=True,
    )
  assert (tmp_path / 'fast').read_text() == (tmp_path / 'stock').read_text()


def test_spec_refuses_a_step_limit_below_one():
  with pytest.raises(ValueError, match='AlfworldEnv.max_steps is 0'):
    alfworld.AlfworldEnv(games=alfworld.HouseholdGames(), max_steps=0)


def test_step_after_the_end_is_an_error():
  games = alfworld.HouseholdGames(layout=MINI)
  env = alfworld.AlfworldEnv(games=games, max_steps=1).make()
  env.reset(games.split('train')[3])
  result = env.step('look')
  assert isinstance(result, types.StepResult) and result.done
  with pytest.raises(RuntimeError, match='call reset first'):
    env.step('look')
