"""The pool under environments that raise, hang, die and answer nonsense."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time

import pytest

from hgpo_jax import types
from hgpo_jax.envs import ledger
from hgpo_jax.envs import pool
from hgpo_jax.envs import worker
from hgpo_jax.envs import worker_process
from tests.envs import toy

TIMEOUT_S = 1.0

# Fault -> kind of the failure, words of its message, workers replaced.
FAULTS = {
    'raise_in_reset': ('env_error', 'ValueError: the box bites (toy.py:', 0),
    'raise_in_step': ('env_error', 'ValueError: the box bites (toy.py:', 0),
    'sys_exit_in_step': ('env_error', 'SystemExit: the toy leaves', 0),
    'nan_in_step': ('env_error', 'reward is nan, expected a finite', 0),
    'nan_in_reset': ('env_error', 'reward is nan, expected a finite', 0),
    'wrong_type_in_step': ('env_error', 'tuple, expected StepResult', 0),
    'hang_in_reset': ('timeout', f'within reset_timeout_s={TIMEOUT_S:g}', 1),
    'hang_in_step': ('timeout', f'within step_timeout_s={TIMEOUT_S:g}', 1),
    'exit_in_step': ('env_error', 'exit code 3, 2 times', 2),
}
SPEC = toy.ToySpec(
    kinds=('put',), faults=tuple(enumerate(FAULTS, start=4)), fault_step=2
)
TASKS = [SPEC.split('train')[index] for index in range(16)]


def make_pool(spec: toy.ToySpec = SPEC, slots: int = 4) -> pool.EnvPool:
  return pool.EnvPool(spec, slots, 2, TIMEOUT_S, TIMEOUT_S, 30.0)


def play(task: types.Task, spec: toy.ToySpec = SPEC) -> list[types.StepResult]:
  """What an environment in this process answers to the task's solution."""
  env = spec.make()
  actions = toy.solution(spec, task)
  return [env.reset(task), *(env.step(action) for action in actions)]


@pytest.fixture(name='envs', scope='module')
def shared_pool():
  with make_pool() as envs:
    yield envs


def change(envs: pool.EnvPool, before: types.Metrics, name: str) -> float:
  return envs.metrics[f'pool/{name}'] - before[f'pool/{name}']


def test_plays_what_one_env_plays(envs):
  order = (2, 0, 3, 1)
  expected = {slot: play(TASKS[slot]) for slot in order}
  answers = envs.reset({slot: TASKS[slot] for slot in order})
  assert list(answers) == list(order)
  for step in range(4):
    assert answers == {slot: expected[slot][step] for slot in order}
    answers = envs.step(
        {slot: toy.solution(SPEC, TASKS[slot])[step] for slot in order}
    )
  assert all(answers[slot].success is True for slot in order)


@pytest.mark.parametrize('fault', FAULTS)
def test_only_the_slot_that_misbehaves_fails(envs, fault):
  kind, words, restarts = FAULTS[fault]
  task = TASKS[4 + list(FAULTS).index(fault)]
  before = envs.metrics
  # Slots 1 and 3 share a worker: 1 is served first, 3 waits behind it.
  tasks = {0: TASKS[0], 1: task, 2: TASKS[2], 3: TASKS[3]}
  failure, step = envs.reset(tasks)[1], 0
  while isinstance(failure, types.StepResult):
    answers = envs.step(
        {slot: toy.solution(SPEC, tasks[slot])[step] for slot in tasks}
    )
    failure, step = answers[1], step + 1
  assert isinstance(failure, pool.EnvFailure) and failure.kind == kind
  assert words in failure.message
  where = f'step {step}' if step else 'reset'
  assert f'{where} of task {task.task_id!r}' in failure.message
  of_env = f'of task {task.task_id!r} of ToySpec]'
  # What is raised in the env names it; a worker that hangs or dies cannot.
  assert (of_env in failure.message) == (not restarts)
  with pytest.raises(ValueError, match='slot 1 has no episode: reset it'):
    envs.step({1: 'look'})
  # The others go on as if nothing had happened, and so does a new episode.
  assert envs.reset({1: TASKS[1]})[1] == play(TASKS[1])[0]
  others = (0, 2, 3)
  for later in range(step, 4):
    answers = envs.step(
        {slot: toy.solution(SPEC, tasks[slot])[later] for slot in others}
    )
    assert answers == {s: play(tasks[s])[later + 1] for s in others}
  assert change(envs, before, 'restarts') == restarts
  assert change(envs, before, 'env_errors') == (kind == 'env_error')
  assert change(envs, before, 'timeouts') == (kind == 'timeout')


@pytest.mark.parametrize('when', ['idle', 'busy'])
def test_killed_worker_loses_nothing(tmp_path, when):
  spec = toy.ToySpec(
      kinds=('put',),
      faults=((1, 'die_once_in_step'),) if when == 'busy' else (),
      fault_step=3,
      marker=str(tmp_path / 'died'),
  )
  tasks = {slot: spec.split('train')[slot] for slot in range(4)}
  with make_pool(spec) as envs:
    envs.reset(tasks)
    for step in range(4):
      if when == 'idle' and step == 2:
        os.kill(envs.worker_pids[1], signal.SIGKILL)
      answers = envs.step(
          {s: toy.solution(spec, task)[step] for s, task in tasks.items()}
      )
    assert all(answer.success for answer in answers.values())
    assert envs.metrics['pool/restarts'] == 1
    assert envs.metrics['pool/replays'] == 2  # Slots 1 and 3.
    assert envs.metrics['pool/env_errors'] == 0


def test_stopped_worker_times_out(envs):
  envs.reset({slot: TASKS[slot] for slot in range(4)})
  os.kill(envs.worker_pids[0], signal.SIGSTOP)
  first = {slot: toy.solution(SPEC, TASKS[slot])[0] for slot in range(4)}
  answers = envs.step(first)
  assert answers[0].kind == 'timeout'
  for slot in (1, 2, 3):
    assert answers[slot] == play(TASKS[slot])[1]


def test_replay_that_differs_ends_the_episode():
  spec = toy.ToySpec(kinds=('put',), faults=((0, 'random_in_step'),))
  task = spec.split('train')[0]
  with make_pool(spec, slots=1) as envs:
    envs.reset({0: task})
    envs.step({0: 'look'})
    os.kill(envs.worker_pids[0], signal.SIGKILL)
    failure = envs.step({0: 'look'})[0]
    assert failure.kind == 'env_error'
    assert 'after a replay of 1 actions' in failure.message
    assert 'it is not deterministic' in failure.message
    assert f'task {task.task_id!r}' in failure.message
    assert isinstance(envs.reset({0: task})[0], types.StepResult)


def test_slow_slots_each_have_their_own_deadline():
  # Six resets of 0.3 s one after the other take longer than one deadline.
  spec = toy.ToySpec(faults=tuple((n, 'slow_in_reset') for n in range(6)))
  with pool.EnvPool(spec, 6, 1, TIMEOUT_S, TIMEOUT_S, 30.0) as envs:
    tasks = {slot: spec.split('train')[slot] for slot in range(6)}
    answers = envs.reset(tasks)
  assert all(isinstance(a, types.StepResult) for a in answers.values())


@pytest.mark.parametrize(
    'spec,words',
    [
        (
            toy.ToySpec(make_error='no module named box'),
            r'worker [01] could not make 2 envs of ToySpec: RuntimeError: the'
            r' toy box is empty \(toy.py:\d+\) <- caused by ImportError: no'
            ' module named box',
        ),
        (
            toy.ToySpec(make_seconds=60.0),
            'could not make 2 envs of ToySpec: no answer within'
            ' start_timeout_s=1.5',
        ),
        (
            toy.ToySpec(marker=lambda: ''),
            'ToySpec cannot be sent to a worker: .*picklable frozen dataclass',
        ),
    ],
    ids=['raises', 'hangs', 'unpicklable'],
)
def test_environment_that_cannot_start(spec, words):
  with pytest.raises(pool.EnvStartError, match=words):
    limit = 1.5 if spec.make_seconds else 30.0
    pool.EnvPool(spec, 4, 2, start_timeout_s=limit)
  assert not multiprocessing.active_children()[2:]  # The shared pool's two.


def test_replacement_that_cannot_start_fails_its_slots_only(tmp_path):
  marker = tmp_path / 'broken'
  spec = toy.ToySpec(make_error='disk gone', marker=str(marker))
  tasks = {slot: spec.split('train')[0] for slot in range(4)}
  with make_pool(spec) as envs:
    envs.reset(tasks)
    marker.touch()
    os.kill(envs.worker_pids[1], signal.SIGKILL)
    answers = envs.step(dict.fromkeys(range(4), 'look'))
    for slot in (1, 3):
      assert 'a new worker could not make ToySpec' in answers[slot].message
      assert 'ImportError: disk gone' in answers[slot].message
    assert answers[0] == answers[2] and answers[0].observation == toy.NOTHING
    marker.unlink()
    assert envs.reset(tasks)[1] == play(tasks[1], spec)[0]


@pytest.mark.parametrize(
    'call,error,words',
    [
        (lambda e: e.step({7: 'look'}), ValueError, r'slot 7 is not in 0..3'),
        (lambda e: e.reset({-1: TASKS[0]}), ValueError, 'slot -1 is not in'),
        (lambda e: e.reset({0: 3}), TypeError, 'got 3, expected a Task'),
        (lambda e: e.step({0: None}), TypeError, 'got None, expected a comm'),
        (lambda e: e.step({0: 'look'}), ValueError, 'is over: reset it first'),
    ],
)
def test_mistakes_of_the_caller(envs, call, error, words):
  envs.reset({0: TASKS[0]})
  for action in toy.solution(SPEC, TASKS[0]):
    envs.step({0: action})
  with pytest.raises(error, match=words):
    call(envs)


def test_sizes_and_closing():
  with pytest.raises(ValueError, match='EnvPool.num_slots is 0, expected more'):
    pool.EnvPool(SPEC, 0, 1)
  children = len(multiprocessing.active_children())
  for _ in range(3):
    envs = make_pool(slots=1)
    assert len(envs.worker_pids) == 1  # Never more workers than slots.
    envs.close()
    envs.close()
  assert len(multiprocessing.active_children()) == children
  with pytest.raises(RuntimeError, match='the EnvPool is closed'):
    envs.reset({0: TASKS[0]})


def test_memory_of_a_worker_is_measured():
  spec = toy.ToySpec(faults=((0, 'leak_in_reset'),))
  with make_pool(spec, slots=2) as envs:
    before = envs.metrics
    for _ in range(40):
      envs.reset({0: spec.split('train')[0]})
    after = envs.metrics
  assert 5.0 < before['memory/worker_mb_0'] < 500.0
  assert (
      30.0 < after['memory/worker_mb_0'] - before['memory/worker_mb_0'] < 60.0
  )
  assert after['memory/worker_mb_1'] - before['memory/worker_mb_1'] < 10.0


def test_replies_are_known_by_their_id():
  """Reversed replies find their slots; stale and misplaced ones are refused."""
  process = worker_process.WorkerProcess(0, (0, 1))
  process.conn, far = multiprocessing.Pipe()
  books = ledger.Ledger(2)
  books.open({s: ledger.Job(task=TASKS[s]) for s in (0, 1)})
  requests = books.requests((0, 1))
  process.send(requests, requests)
  results = [play(TASKS[slot])[0] for slot in (0, 1)]
  for request in reversed(far.recv()):
    task_id, result = request.task.task_id, results[request.slot]
    far.send(worker.Reply(request.id, request.slot, task_id, result))
  for request, reply in process.receive():
    books.settle(request, reply)
  assert books.answers == {0: results[0], 1: results[1]}
  books.open({0: ledger.Job(action='look')})
  request = books.requests((0,))[0]
  for bad in (
      worker.Reply(requests[0].id, 0, TASKS[0].task_id, results[0]),
      worker.Reply(request.id, 1, TASKS[0].task_id, results[0]),
      'nonsense',
  ):
    process.send([request], [request])
    far.send(bad)
    with pytest.raises(ValueError, match='no pending request|got str'):
      list(process.receive())
  books.settle(request, worker.Reply(request.id, 0, 'other', results[0]))
  assert "is for task 'other', expected 'toy/" in books.answers[0].message


def test_replies_are_read_as_they_come():
  """Many at once, one in pieces, none, and none after the deadline."""
  process = worker_process.WorkerProcess(0, (0, 1, 2))
  process.conn, far = multiprocessing.Pipe()
  requests = [worker.Request(id, id - 1, TASKS[0]) for id in (1, 2, 3)]
  process.send(requests, requests)
  far.recv()
  assert not worker_process.wait([process], -1.0)
  texts = [pickle.dumps(worker.Reply(id, id - 1)) for id in (1, 2, 3)]
  data = b''.join(len(t).to_bytes(4, 'big') + t for t in texts)
  found = []
  for part in (data[:2], data[2:90], data[90:-1], data[-1:]):
    os.write(far.fileno(), part)
    assert worker_process.wait([process], 1.0) == [process]
    found.append([request.id for request, _ in process.receive()])
  assert found[0] == [] and found[-1] == [3]
  assert sum(found, []) == [1, 2, 3] and not process.pending
  far.close()
  with pytest.raises(EOFError):
    list(process.receive())


@pytest.mark.parametrize('what', ['garbage', 'noise'])
def test_garbage_from_a_worker_is_survived(tmp_path, what):
  spec = toy.ToySpec(
      kinds=('put',),
      faults=((1, f'{what}_in_step'),),
      fault_step=2,
      marker=str(tmp_path / 'sent'),
  )
  tasks = {slot: spec.split('train')[slot] for slot in range(4)}
  with make_pool(spec) as envs:
    answers = envs.reset(tasks)
    for step in range(4):
      assert answers == {s: play(t)[step] for s, t in tasks.items()}
      answers = envs.step(
          {s: toy.solution(spec, task)[step] for s, task in tasks.items()}
      )
    assert all(answer.success for answer in answers.values())
    assert envs.metrics['pool/restarts'] == 1
    assert envs.metrics['pool/env_errors'] == 0
  assert (tmp_path / 'sent').exists()


def test_workers_are_recycled_between_episodes():
  spec = toy.ToySpec(kinds=('put',), faults=((0, 'leak_in_reset'),))
  task = spec.split('train')[0]
  with pool.EnvPool(spec, 2, 1, recycle_episodes=6) as envs:
    first = envs.worker_pids
    envs.reset({1: task})
    envs.step({1: 'look'})
    for _ in range(5):
      envs.reset({0: task})
    envs.step({0: 'look'})
    assert envs.worker_pids == first
    # The episode of the other slot goes on in the fresh worker.
    assert envs.reset({0: task})[0] == play(task, spec)[0]
    assert envs.worker_pids != first
    answers = envs.step({0: 'look', 1: 'look'})
    assert {answer.observation for answer in answers.values()} == {
        answers[0].observation
    }
    seen = envs.metrics
    assert seen['pool/recycled'] == 1.0 and seen['pool/replays'] == 1.0
    assert seen['pool/restarts'] == seen['pool/env_errors'] == 0.0
  with pytest.raises(ValueError, match='recycle_episodes is -1, expected at'):
    pool.EnvPool(spec, 1, 1, recycle_episodes=-1)


def test_deadlines_of_months():
  """Longer than the kernel waits for at a time, or than it takes at all."""
  with pool.EnvPool(SPEC, 1, 1, 3e6, 1e30, 1e20) as envs:
    assert envs.reset({0: TASKS[0]})[0] == play(TASKS[0])[0]


def test_idle_workers_load_what_comes_next():
  faults = ((2, 'raise_in_prepare'),)
  spec = toy.ToySpec(kinds=('put',), faults=faults)
  tasks = [spec.split('train')[index] for index in range(4)]
  with make_pool(spec) as envs:
    envs.reset({0: tasks[0], 1: tasks[1]})
    envs.prefetch([*tasks, *tasks])
    # Loading goes on only while nothing else is asked for.
    for _ in range(100):
      time.sleep(0.02)
      answers = envs.reset({0: tasks[2], 1: tasks[3]})
      if envs.metrics.get('env/toy_prepared', 0) == 8:
        break
      envs.prefetch(tasks)
    assert envs.metrics['env/toy_prepared'] >= 8
    assert envs.metrics['env/prepare_errors'] >= 1
    assert answers == {s: play(tasks[s + 2], spec)[0] for s in (0, 1)}
    envs.prefetch([])
  envs.prefetch(tasks)  # Of a closed pool: nothing to do.


def test_a_slow_slot_keeps_nobody_waiting():
  """Acts are submitted and answers polled slot by slot."""
  spec = toy.ToySpec(
      kinds=('put',), faults=((1, 'hang_in_step'),), fault_step=1
  )
  tasks = [spec.split('train')[index] for index in range(3)]
  fast = toy.solution(spec, tasks[0])
  with make_pool(spec, slots=2) as envs:
    assert envs.poll() == {}
    envs.submit({0: tasks[0], 1: tasks[1]})
    answers = {}
    while len(answers) < 2:
      answers |= envs.poll(TIMEOUT_S)
    expected = play(tasks[0], spec)
    assert answers[0] == expected[0]
    envs.submit({1: 'look'})
    for step in range(4):
      envs.submit({0: fast[step]})
      # The other one has not answered, and will not.
      assert envs.poll(TIMEOUT_S) == {0: expected[step + 1]}
    with pytest.raises(ValueError, match='slot 1 is busy: poll for its answer'):
      envs.submit({1: 'look'})
    # A call waits for its own slots, whatever else is under way.
    assert list(envs.reset({0: tasks[2]})) == [0]
    (failure,) = envs.poll(3 * TIMEOUT_S).values()
    assert failure.kind == types.TIMEOUT


def test_a_worker_that_is_to_be_recycled_answers_first():
  with pool.EnvPool(SPEC, 2, 1, recycle_episodes=2) as envs:
    pids = envs.worker_pids
    answers = {}
    envs.submit({0: TASKS[0], 1: TASKS[1]})
    while len(answers) < 2:
      answers |= envs.poll(1.0)
    action = toy.solution(SPEC, TASKS[1])[0]
    envs.submit({1: action})
    envs.submit({0: TASKS[2]})
    answers = {}
    while len(answers) < 2:
      answers |= envs.poll(1.0)
    assert answers == {1: play(TASKS[1])[1], 0: play(TASKS[2])[0]}
    assert envs.metrics['pool/recycled'] == 1 and envs.worker_pids != pids
    # The episode that goes on was replayed in the new worker.
    action = toy.solution(SPEC, TASKS[1])[1]
    assert envs.step({1: action}) == {1: play(TASKS[1])[2]}
