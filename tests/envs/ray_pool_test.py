"""The pool on Ray: what holds for the pool, and nodes that are lost."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from hgpo_jax import types
from hgpo_jax.envs import pool
from hgpo_jax.envs import ray_node
from hgpo_jax.envs import ray_pool
from tests.envs import conformance
from tests.envs import pool_life_test
from tests.envs import pool_test
from tests.envs import toy

ray_lib = pytest.importorskip(
    'ray', reason="Ray is not installed: pip install 'hgpo-jax[ray]'"
)
TASKS = pool_test.TASKS
_ON_TWO_NODES = 'ray_pool.RayPool(spec, 2, 1, 2, 30.0, 30.0, 120.0)'


def make_pool(
    spec: toy.ToySpec = pool_test.SPEC, slots: int = 4
) -> ray_pool.RayPool:
  """Two actors with a worker each, where `pool_test` has two workers."""
  limit = pool_test.TIMEOUT_S
  return ray_pool.RayPool(spec, slots, 1, 2, limit, limit, 120.0)


@pytest.fixture(name='ray', scope='module')
def _ray():
  """A cluster on this machine."""
  ray_lib.init(
      num_cpus=8, include_dashboard=False, object_store_memory=80 * 2**20
  )
  yield ray_lib
  ray_lib.shutdown()


@pytest.fixture(name='envs', scope='module')
def _envs(ray):
  with make_pool() as envs:
    yield envs


@pytest.fixture(name='on_ray')
def _on_ray(ray, monkeypatch):
  """Tests of the pool make one of these instead."""
  monkeypatch.setattr(pool_test, 'make_pool', make_pool)
  monkeypatch.setattr(
      pool, 'EnvPool', lambda spec, num_slots, num_workers: make_pool(spec)
  )


class TestPool:
  """Tests of the pool, against this one."""

  @pytest.fixture(autouse=True)
  def _on_ray(self, on_ray):
    pass

  def test_plays_what_one_env_plays(self, envs):
    pool_test.test_plays_what_one_env_plays(envs)

  @pytest.mark.parametrize('fault', pool_test.FAULTS)
  def test_only_the_slot_that_misbehaves_fails(self, envs, fault):
    pool_test.test_only_the_slot_that_misbehaves_fails(envs, fault)

  @pytest.mark.parametrize('when', ['idle', 'busy'])
  def test_killed_worker_loses_nothing(self, tmp_path, when):
    pool_test.test_killed_worker_loses_nothing(tmp_path, when)

  def test_stopped_worker_times_out(self, envs):
    pool_test.test_stopped_worker_times_out(envs)

  def test_replay_that_differs_ends_the_episode(self):
    pool_test.test_replay_that_differs_ends_the_episode()

  def test_replacement_that_cannot_start(self, tmp_path):
    pool_test.test_replacement_that_cannot_start_fails_its_slots_only(tmp_path)

  @pytest.mark.parametrize('what', ['garbage', 'noise'])
  def test_garbage_from_a_worker_is_survived(self, tmp_path, what):
    pool_test.test_garbage_from_a_worker_is_survived(tmp_path, what)

  def test_mistakes_of_the_caller(self, envs):
    calls = pool_test.test_mistakes_of_the_caller.pytestmark[0].args[1]
    for call, error, words in calls:
      pool_test.test_mistakes_of_the_caller(envs, call, error, words)

  def test_memory_of_a_worker_is_measured(self):
    pool_test.test_memory_of_a_worker_is_measured()

  def test_idle_workers_load_what_comes_next(self):
    pool_test.test_idle_workers_load_what_comes_next()

  def test_an_environment_plays_the_same(self):
    spec = toy.ToySpec(kinds=('put',))
    conformance.check_worker(spec, toy.SPLITS)


def _actors(ray, envs: ray_pool.RayPool) -> list[int]:
  """Process ids of the actors."""
  return ray.get(
      [n.actor.__ray_call__.remote(lambda _: os.getpid()) for n in envs._nodes]
  )


@pytest.mark.parametrize('how', ['killed', 'hung'])
def test_a_lost_actor_fails_its_slots_and_is_replaced(ray, how, monkeypatch):
  spec = toy.ToySpec(
      kinds=('put',), faults=((1, 'slow_in_step'),), fault_step=2
  )
  tasks = {slot: spec.split('train')[slot] for slot in range(6)}
  actions = {slot: toy.solution(spec, task) for slot, task in tasks.items()}
  expected = {s: pool_test.play(task, spec) for s, task in tasks.items()}
  with ray_pool.RayPool(spec, 6, 2, 2, 30.0, 30.0, 120.0) as envs:
    assert [envs.worker_of(slot) for slot in range(6)] == [0, 2, 1, 3, 0, 2]
    before, pids = _actors(ray, envs), envs.worker_pids
    envs.reset(tasks)
    envs.step({slot: actions[slot][0] for slot in tasks})
    if how == 'killed':
      kill = threading.Timer(0.1, os.kill, (before[1], signal.SIGKILL))
      kill.start()
    else:
      os.kill(before[1], signal.SIGSTOP)
      monkeypatch.setattr(ray_node.Node, 'patience_s', lambda self: 4.0)
    answers = envs.step({slot: actions[slot][1] for slot in range(4)})
    words = {'killed': 'actor died', 'hung': 'it hangs, or cannot be'}[how]
    for slot in (0, 2):
      assert answers[slot] == expected[slot][2]
    assert answers[1].kind == types.ENV_ERROR
    assert 'the Ray actor of 3 envs is lost: ' in answers[1].message
    assert words in answers[1].message
    assert f'[step 2 of task {tasks[1].task_id!r}]' in answers[1].message
    # An actor answers for each slot as soon as it can.
    lost = answers[3] != expected[3][2]
    assert not lost or answers[3].kind == types.ENV_ERROR
    monkeypatch.undo()
    pool_life_test.assert_gone((before[1], *pids[2:]), 20.0)
    # Slot 5 was not asked; its episode has gone all the same.
    answers = envs.step({4: actions[4][1], 5: actions[5][1]})
    assert answers[4] == expected[4][2]
    assert 'the episode was lost with its Ray actor' in answers[5].message
    with pytest.raises(ValueError, match='slot 1 has no episode: reset it'):
      envs.step({1: 'look'})
    others = {slot: tasks[slot] for slot in (1, 3, 5)}
    assert envs.reset(others) == {s: expected[s][0] for s in others}
    after = _actors(ray, envs)
    assert after[0] == before[0] and after[1] != before[1]
    seen = envs.metrics
    assert (
        seen['pool/nodes_lost'] == 1.0 and seen['pool/env_errors'] == 2.0 + lost
    )
    assert seen['pool/restarts'] == 0.0


def test_counts_of_a_lost_actor_are_kept(ray):
  spec = toy.ToySpec(kinds=('put',))
  tasks = [spec.split('train')[index] for index in range(2)]
  with ray_pool.RayPool(spec, 1, 1, 1, 30.0, 30.0, 120.0) as envs:
    envs.reset({0: tasks[0]})
    os.kill(envs.worker_pids[0], signal.SIGKILL)
    envs.step({0: 'look'})
    assert envs.metrics['pool/restarts'] == 1.0
    os.kill(_actors(ray, envs)[0], signal.SIGKILL)
    assert isinstance(envs.step({0: 'look'})[0], pool.EnvFailure)
    assert envs.reset({0: tasks[1]})[0] == pool_test.play(tasks[1], spec)[0]
    assert envs.metrics['pool/restarts'] == 1.0
    assert envs.metrics['pool/nodes_lost'] == 1.0


@pytest.mark.parametrize(
    'spec, workers, seconds, words',
    [
        (
            toy.ToySpec(make_error='no module named box'),
            1,
            60.0,
            'Ray node 0: worker 0 could not make 1 envs of'
            ' ToySpec: RuntimeError: the toy box is empty .* no module named',
        ),
        (
            toy.ToySpec(),
            100,
            1.5,
            'Ray node 0: no actor with 100 CPUs and 100 envs within'
            ' start_timeout_s=1.5; the cluster has 8 CPUs',
        ),
    ],
    ids=['raises', 'no room'],
)
def test_environments_that_cannot_start(ray, spec, workers, seconds, words):
  with pytest.raises(pool.EnvStartError, match=words):
    ray_pool.RayPool(spec, workers, workers, 1, start_timeout_s=seconds)


def test_a_replacement_that_cannot_start(ray, tmp_path):
  marker = tmp_path / 'broken'
  spec = toy.ToySpec(make_error='disk gone', marker=str(marker))
  task = spec.split('train')[0]
  with ray_pool.RayPool(spec, 1, 1, 1, 30.0, 30.0, 120.0) as envs:
    marker.touch()
    os.kill(_actors(ray, envs)[0], signal.SIGKILL)
    assert 'died' in envs.reset({0: task})[0].message
    again = envs.reset({0: task})[0]
    assert again.kind == types.ENV_ERROR and 'cannot start: ' in again.message
    assert 'ImportError: disk gone' in again.message
    marker.unlink()
    answer = envs.reset({0: task})[0]  # Asked for before the disk was back.
    if isinstance(answer, pool.EnvFailure):
      answer = envs.reset({0: task})[0]
    assert answer == pool_test.play(task, spec)[0]


def test_ctrl_c_in_a_call_closes_the_pool(ray):
  spec = toy.ToySpec(faults=((0, 'hang_in_reset'),))
  envs = ray_pool.RayPool(spec, 2, 1, 2, 30.0, 30.0, 120.0)
  pids = (*envs.worker_pids, *_actors(ray, envs))
  main = threading.main_thread().ident
  threading.Timer(0.5, signal.pthread_kill, (main, signal.SIGINT)).start()
  with pytest.raises(KeyboardInterrupt):
    envs.reset({s: spec.split('train')[s] for s in (0, 1)})
  pool_life_test.assert_gone(pids, 20.0)
  with pytest.raises(RuntimeError, match='the RayPool is closed'):
    envs.reset({0: TASKS[0]})
  envs.close()
  envs.prefetch(TASKS)


@pytest.mark.parametrize('end', 'exit stopped SIGINT SIGTERM SIGKILL'.split())
def test_no_orphans(ray, tmp_path, end):
  """However the driver ends; a worker ends because its actor does."""
  pool_life_test.check_no_orphans(tmp_path, end, _ON_TWO_NODES, 60.0)
