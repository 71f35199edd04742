"""ALFWorld on the real engine: the shared suite, stock equality, bad input."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import tarfile
from unittest import mock

import pytest

from hgpo_jax import types
from hgpo_jax.envs import alfworld
from hgpo_jax.envs import alfworld_official
from hgpo_jax.envs import household
from hgpo_jax.envs import household_pddl
from hgpo_jax.envs import textworld_game
from tests import alfworld_equality
from tests import alfworld_walkthroughs
from tests.envs import conformance

KIND = household.KINDS[0]
MINI = household.Layout(receptacles=(5, 8), most_per_type=1, objects=(3, 6))


class _Conformance(conformance.EnvConformance):

  def solution(self, spec, task):
    return spec.games.load(task)['walkthrough']


class TestGenerated(_Conformance):
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


class TestOfficialLayout(_Conformance):
  splits = tuple(alfworld.OFFICIAL_COUNTS)

  @pytest.fixture
  def spec(self, official_folder):
    games = alfworld.OfficialGames(folder=str(official_folder), any_count=True)
    return alfworld.AlfworldEnv(games=games, max_steps=8)


def test_official_counts_are_checked(official_folder, tmp_path):
  games = alfworld.OfficialGames(folder=str(official_folder))
  with pytest.raises(
      ValueError, match='holds 3 games in train/, expected 3553'
  ):
    games.check()
  with pytest.raises(ValueError, match='holds 0 games'):
    alfworld.OfficialGames(folder=str(tmp_path), any_count=True).check()
  with pytest.raises(ValueError, match="'/nowhere' does not exist; give the"):
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


@pytest.fixture
def versions():
  """Versions are looked up once a process."""
  textworld_game.check_versions.cache_clear()
  yield textworld_game.SUPPORTED
  textworld_game.check_versions.cache_clear()


def test_other_engine_versions_play_with_the_stock_engine(
    versions, monkeypatch, caplog
):
  games = alfworld.HouseholdGames(layout=MINI)
  task = games.split('train')[0]
  spec = alfworld.AlfworldEnv(games=games, cache='none')
  fast = spec.make().reset(task)
  monkeypatch.setitem(versions, 'textworld', '9.9.9')
  textworld_game.check_versions.cache_clear()
  other = dataclasses.replace(spec, max_steps=49)  # Loads the game again.
  other.check()
  assert 'written for' in caplog.text and "'9.9.9'" in caplog.text
  assert 'install with the pins' in caplog.text
  env = other.make()
  assert type(env._engine).__name__ == 'StockEngine'
  assert env.reset(task) == fast
  first = env.step('look')
  assert env.reset(task) == fast and env.step('look') == first


def test_no_engine_at_all_is_refused(versions, monkeypatch):
  monkeypatch.setitem(versions, 'no-such-engine', '1.0')
  message = re.escape('needs no-such-engine==1.0, found nothing')
  with pytest.raises(ImportError, match=message):
    alfworld.AlfworldEnv(games=alfworld.HouseholdGames()).check()


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


def test_texts_commands_and_outcomes_equal_the_stock_engine():
  large = household.Layout(receptacles=(11, 14))
  games = [
      household_pddl.game_data(household.generate(50 + i, kind, layout))
      for i, (kind, layout) in enumerate(
          zip(household.KINDS, itertools.cycle([MINI, large]))
      )
  ]
  assert not alfworld_equality.differences(games, household.KINDS)


def test_the_comparison_with_the_stock_engine_sees_one_byte():
  game = household_pddl.game_data(household.generate(7, KIND, MINI))
  lines = json.loads(json.dumps(alfworld_equality.play('fast', game, seed=0)))
  other = json.loads(json.dumps(lines))
  other[3][1][0] += ' '
  assert 'step 3: stock' in alfworld_equality._first(lines, other)


def test_official_games_to_compare_are_of_all_types_and_both_splits(
    official_folder,
):
  games = alfworld.OfficialGames(folder=str(official_folder), any_count=True)
  tasks = alfworld_equality.choose(games, 6)
  assert len({task.task_id for task in tasks}) == 6
  assert {t.split for t in tasks} == {'valid_seen', 'valid_unseen'}
  assert {t.kind for t in tasks} == set(household.KINDS[:3])


def test_walkthroughs_are_checked(official_folder):
  games = alfworld.OfficialGames(folder=str(official_folder), any_count=True)
  spec = alfworld.AlfworldEnv(games=games)
  task = games.split('train')[0]
  commands = games.load(task)['walkthrough']
  check = alfworld_walkthroughs.trouble
  assert check(spec, spec.make(), task) == ''
  for wrong, words in (
      (commands[:-1], 'does not win'),
      (['eat it'], "step 0: 'eat it' is not admissible"),
      ([*commands, 'look'], f'ends with step {len(commands)} of'),
  ):
    source = mock.Mock()
    source.load.return_value = {'walkthrough': wrong}
    assert words in check(mock.Mock(games=source), spec.make(), task)


def test_spec_refuses_a_step_limit_below_one():
  games = alfworld.HouseholdGames()
  with pytest.raises(ValueError, match='AlfworldEnv.max_steps is 0'):
    alfworld.AlfworldEnv(games=games, max_steps=0)
  with pytest.raises(ValueError, match="state_key is 'x'; expected one of"):
    alfworld.AlfworldEnv(games=games, state_key='x')
  with pytest.raises(ValueError, match="engine is 'x'; expected one of"):
    alfworld.AlfworldEnv(games=games, engine='x')


def test_step_after_the_end_is_an_error():
  games = alfworld.HouseholdGames(layout=MINI)
  env = alfworld.AlfworldEnv(games=games, max_steps=1).make()
  env.reset(games.split('train')[3])
  result = env.step('look')
  assert isinstance(result, types.StepResult) and result.done
  with pytest.raises(RuntimeError, match='call reset first'):
    env.step('look')


@pytest.fixture
def archive(official_folder, tmp_path):
  path = tmp_path / 'games.tar.xz'
  with tarfile.open(path, 'w:xz') as file:
    file.add(official_folder, 'json_2.1.1')
  return path


def test_an_archive_is_unpacked_once(
    archive, official_folder, tmp_path, monkeypatch
):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  games = alfworld.OfficialGames(folder=str(archive), any_count=True)
  games.check()
  folder = alfworld.OfficialGames(folder=str(official_folder), any_count=True)
  for name in alfworld.OFFICIAL_COUNTS:
    assert games.split(name) == folder.split(name)
  task = games.split('train')[0]
  assert games.load(task) == folder.load(task)
  kept = list((tmp_path / 'cache').rglob('json_2.1.1'))
  assert kept == [games.root]
  alfworld_official._root.cache_clear()
  monkeypatch.setattr(tarfile, 'open', None)  # Not opened again.
  assert games.root == kept[0]


@pytest.mark.parametrize('content', [b'no archive', None])
def test_an_archive_that_cannot_be_unpacked(
    archive, content, tmp_path, monkeypatch
):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  if content is None:  # Cut off, as a download may be.
    content = archive.read_bytes()[:-200]
  archive.write_bytes(content)
  games = alfworld.OfficialGames(folder=str(archive))
  with pytest.raises(ValueError, match='games.tar.xz.* cannot be unpacked'):
    games.check()
  assert not list((tmp_path / 'cache').rglob('*game*'))


def test_the_folder_above_and_the_environment_name_the_games(
    official_folder, tmp_path, monkeypatch
):
  above = tmp_path / 'data'
  above.mkdir()
  (above / 'json_2.1.1').symlink_to(official_folder)
  games = alfworld.OfficialGames(folder=str(above), any_count=True)
  assert len(games.split('train')) == 3
  monkeypatch.setenv('ALFWORLD_DATA', str(above))
  assert alfworld.OfficialGames(any_count=True).split('train') == games.split(
      'train'
  )
  for unset in ('', os.path.expanduser('~/.cache/alfworld')):
    monkeypatch.setenv('ALFWORLD_DATA', unset)
    if os.path.isdir(os.path.join(unset or '/nowhere', 'json_2.1.1')):
      continue
    with pytest.raises(ValueError, match='ALFWORLD_DATA is not set; give the'):
      alfworld.OfficialGames()


def test_games_that_the_protocol_leaves_out(tmp_path, monkeypatch):
  monkeypatch.setitem(alfworld.OFFICIAL_COUNTS, 'train', 2)
  game = household_pddl.game_data(household.generate(0, KIND, MINI))

  def add(name, **changes):
    path = tmp_path / 'train' / name / 'trial' / 'game.tw-pddl'
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**game, **changes}))

  for name in ('a-X', 'b-X', 'look-movable', 'c-BreadSliced-None'):
    add(name)
  add('d-X', solvable=False)
  games = alfworld.OfficialGames(folder=str(tmp_path))
  split = games.split('train')
  assert [split[i].kind for i in range(len(split))] == ['a', 'b']


def test_games_of_some_kinds_alone():
  kinds = ('pick_heat_then_place_in_recep', 'look_at_obj_in_light')
  some = alfworld.HouseholdGames(kinds=kinds, heldout_size=4).split('heldout')
  every = alfworld.HouseholdGames().split('heldout')
  assert [some[i].kind for i in range(4)] == [*kinds, *kinds]
  assert [some[i].seed for i in range(4)] == [every[i].seed for i in range(4)]
  assert not {some[i].task_id for i in range(4)} & {
      alfworld.HouseholdGames(kinds=kinds).split('train')[i].task_id
      for i in range(4)
  }
  for wrong in ((), ('pick_heat',)):
    with pytest.raises(ValueError, match='HouseholdGames.kinds is'):
      alfworld.HouseholdGames(kinds=wrong)
