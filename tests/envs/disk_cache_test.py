"""The cache of translated games under crashes, full disks and other runs."""

from __future__ import annotations

import errno
import multiprocessing
import pathlib

import pytest

from hgpo_jax.envs import alfworld
from hgpo_jax.envs import counters
from hgpo_jax.envs import disk_cache
from hgpo_jax.envs import household
from hgpo_jax.envs import household_pddl
from hgpo_jax.envs import pool
from hgpo_jax.envs import textworld_translation

MINI = household.Layout(receptacles=(5, 8), most_per_type=1, objects=(3, 6))


@pytest.fixture(autouse=True)
def _no_counts():
  counters.take()


@pytest.fixture(name='cache')
def _cache(tmp_path):
  return disk_cache.DiskCache(tmp_path / 'deep' / 'cache', 'games')


def refuse() -> bytes:
  raise AssertionError('made again')


def test_an_entry_is_made_once(cache):
  entry = disk_cache.key('a', 'b')
  assert cache.get(entry, lambda: b'content') == b'content'
  assert cache.get(entry, refuse) == b'content'
  assert counters.take() == {'games_misses': 1, 'games_hits': 1}
  assert [p.name for p in cache.path(entry).parent.iterdir()] == [entry]


def test_names_depend_on_every_part_and_on_where_it_ends():
  keys = {
      disk_cache.key(*parts)
      for parts in (
          ('ab', 'c'),
          ('a', 'bc'),
          ('abc',),
          ('abc', ''),
          ('c', 'ab'),
      )
  }
  assert len(keys) == 5


@pytest.mark.parametrize(
    'damage',
    [
        lambda data: b'',
        lambda data: data[:-1],
        lambda data: data[:10],
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: bytes(len(data)),
    ],
)
def test_damaged_entries_are_made_again(cache, damage):
  entry = disk_cache.key('a')
  cache.get(entry, lambda: b'content')
  path = cache.path(entry)
  path.write_bytes(damage(path.read_bytes()))
  counters.take()
  assert cache.get(entry, lambda: b'content') == b'content'
  assert counters.take() == {'games_corrupt': 1}
  assert cache.get(entry, refuse) == b'content'


@pytest.mark.parametrize('where', ['write_bytes', 'mkdir'])
def test_a_full_disk_costs_time_only(cache, where, monkeypatch, caplog):
  full = OSError(errno.ENOSPC, 'No space left on device')

  def fail(path, *args, **kwargs):
    if where == 'write_bytes':  # As far as it goes.
      with open(path, 'wb') as file:
        file.write(b'half')
    raise full

  monkeypatch.setattr(pathlib.Path, where, fail)
  for name in 'ab':
    entry = disk_cache.key(name)
    if where == 'write_bytes':
      cache.path(entry).parent.mkdir(parents=True)
    assert cache.get(entry, name.encode) == name.encode()
    assert not list(cache.path(entry).parent.glob('*'))
  assert counters.take() == {'games_misses': 2, 'games_errors': 2}
  warnings = [r for r in caplog.records if 'No space left' in r.getMessage()]
  assert len(warnings) == 1  # However many entries there are.


def test_a_folder_that_is_a_file_costs_time_only(tmp_path):
  (tmp_path / 'file').write_text('')
  cache = disk_cache.DiskCache(tmp_path / 'file', 'games')
  assert cache.get(disk_cache.key('a'), lambda: b'x') == b'x'
  assert counters.take() == {'games_errors': 2}


def _race(folder: str, go: multiprocessing.Barrier, wrong) -> None:
  cache = disk_cache.DiskCache(folder, 'games')
  for number in range(30):
    content = bytes([number]) * 50_000
    go.wait(60)
    got = cache.get(disk_cache.key(str(number)), lambda c=content: c)
    wrong.value += got != content
  wrong.value += counters.take().get('games_corrupt', 0)


def test_two_runs_share_one_cache(tmp_path):
  context = multiprocessing.get_context('spawn')
  go, wrong = context.Barrier(2), context.Value('i', 0)
  runs = [
      context.Process(target=_race, args=(str(tmp_path), go, wrong))
      for _ in range(2)
  ]
  for run in runs:
    run.start()
  for run in runs:
    run.join(60)
    assert run.exitcode == 0
  assert wrong.value == 0
  assert len([p for p in tmp_path.rglob('*') if p.is_file()]) == 30


def test_a_kept_translation_is_the_translation(cache):
  data = household_pddl.game_data(
      household.generate(3, household.KINDS[0], MINI)
  )
  texts = data['pddl_domain'], data['pddl_problem']
  made = textworld_translation.translate(*texts)
  for _ in range(2):
    assert textworld_translation.translate(*texts, cache) == made
  assert counters.take() == {'games_misses': 1, 'games_hits': 1}


def test_what_a_cache_meets_is_in_the_metrics_of_the_pool(tmp_path):
  games = alfworld.HouseholdGames(layout=MINI)
  (tmp_path / 'full').write_text('')
  for folder, expected in (
      (tmp_path / 'kept', {'misses': 1.0}),
      (tmp_path / 'kept', {'hits': 1.0}),
      (tmp_path / 'full', {'errors': 2.0}),
  ):
    spec = alfworld.AlfworldEnv(games=games, cache=str(folder))
    with pool.EnvPool(spec, num_slots=2, num_workers=1) as envs:
      task = games.split('train')[0]
      answers = envs.reset({0: task, 1: task})
      assert answers[0] == answers[1] and not answers[0].done
      seen = {
          name.removeprefix('env/game_cache_'): value
          for name, value in envs.metrics.items()
          if 'game_cache' in name
      }
    assert seen == expected
