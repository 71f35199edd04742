"""Collecting episodes of the toy game."""

import dataclasses
import random

import jax
import numpy as np
import pytest

from hgpo_jax import types
from hgpo_jax.envs import pool as pool_lib
from hgpo_jax.models import base
from hgpo_jax.models import qwen2
from hgpo_jax.rollout import collector as collector_lib
from hgpo_jax.rollout import episode as episode_lib
from hgpo_jax.rollout import metrics as metrics_lib
from hgpo_jax.rollout import prompt as prompt_lib
from hgpo_jax.rollout import sampler as sampler_lib
from tests.envs import toy

_STOP = 0


class _LocalPool:
  """An EnvPool without processes, which notes what it is asked."""

  def __init__(self, spec, num_slots, num_workers=2):
    self.num_slots = num_slots
    self.busiest = 0
    self.resets = []
    self._workers = num_workers
    self._answers = {}
    self._steps = set()
    self._envs = [spec.make() for _ in range(num_slots)]

  def worker_of(self, slot):
    return slot % self._workers

  def submit(self, acts):
    tasks = {s: a for s, a in acts.items() if isinstance(a, types.Task)}
    if tasks:
      self.resets.append(tasks)
    self._steps |= acts.keys() - tasks.keys()
    self.busiest = max(self.busiest, len(self._steps))
    for slot, act in acts.items():
      env = self._envs[slot]
      self._answers[slot] = self._ask(
          env.reset if slot in tasks else env.step, act
      )

  def poll(self, timeout_s=0.0):
    del timeout_s
    answers, self._answers, self._steps = self._answers, {}, set()
    return answers

  def _ask(self, act, argument):
    try:
      return act(argument)
    except ValueError as error:
      return pool_lib.EnvFailure(types.ENV_ERROR, str(error))


class _CharTokenizer:
  """One id a character, from 1."""

  stop_ids = (_STOP,)

  def chat(self, text):
    return [ord(c) - 9 for c in text]

  encode = chat

  def decode(self, ids):
    return ''.join(chr(i + 9) for i in ids if i != _STOP)


class _Scripted:
  """In place of a sampler and its engine: responses by what the key names."""

  spec = sampler_lib.Sampler(200, (2000,), (64,))

  def __init__(self, script):
    self._script = script
    self.prompts = []
    self.keys = []

  busy = property(lambda self: bool(self._asked))

  def open(self, params):
    self._asked = []
    return self

  def request(self, prompt, key, temperature, **unused_changes):
    self.prompts.append(prompt)
    self.keys.append(tuple(map(int, key)))
    return self.keys[-1]

  def submit(self, key):
    self._asked.append(key)
    return key

  def dispatch(self):
    pass

  def collect(self):
    asked, self._asked = self._asked, []
    return [(key, self._complete(key)) for key in asked]

  def release(self, session):
    pass

  def _complete(self, key):
    _, _, task, trajectory, step = key
    text = self._script(task, trajectory, step)
    cut = text.endswith('...')
    ids = _CharTokenizer().chat(text.removesuffix('...'))
    ids = np.asarray(ids if cut else [*ids, _STOP], np.int32)
    reason = types.LENGTH if cut else types.STOP
    logprobs = np.full(ids.size, -1.0)
    return sampler_lib.Completion(ids, logprobs, reason, logprobs)


def _say(action):
  return f'<think>so</think><action>{action}</action>'


def _collect(script, spec, slots, tasks, group_size=1, **changes):
  pool, sampler = _LocalPool(spec, slots), _Scripted(script)
  collector = collector_lib.Collector(
      **dict(
          history_length=2,
          max_prompt_tokens=2000,
          prompt=prompt_lib.AlfworldPrompt(),
      )
      | changes
  ).bind(pool, _CharTokenizer(), sampler)
  trajectories = collector.collect(None, tasks, group_size, 5, 7, 1.0)
  return trajectories, pool, sampler


def _tasks(spec, *indices):
  return [spec.split('train')[i] for i in indices]


def test_steps_record_exactly_what_happened():
  spec = toy.ToySpec()
  task = spec.split('train')[1]
  commands = ['dance', *toy.solution(spec, task)]
  script = lambda task, trajectory, step: _say(commands[step])
  (trajectory,), _, sampler = _collect(script, spec, 1, [task])
  assert trajectory.end_reason == types.SOLVED and trajectory.success
  assert trajectory.score == 1.0 and trajectory.outcome == toy.SOLVED_REWARD
  assert [s.action for s in trajectory.steps] == commands
  assert [s.step for s in trajectory.steps] == list(range(5))
  admissible = [s.action_admissible for s in trajectory.steps]
  assert admissible == [False, True, True, True, True]
  assert all(s.action_valid for s in trajectory.steps)
  for step, prompt in zip(trajectory.steps, sampler.prompts, strict=True):
    np.testing.assert_array_equal(step.prompt_ids, prompt)
    text = _CharTokenizer().decode(step.response_ids)
    assert text == _say(step.action) and step.response_ids[-1] == _STOP
  for before, after in zip(trajectory.steps, trajectory.steps[1:]):
    assert before.next_state_key == after.state_key
  assert trajectory.steps[1].observation == toy.NOTHING
  last = _CharTokenizer().decode(trajectory.steps[-1].prompt_ids)
  assert 'put the apple in box' in last and 'This is step 5.' in last
  assert f"Action 4: '{commands[3]}'" in last and 'Action 2' not in last


@pytest.mark.parametrize('slots', [12, 20])
def test_members_of_a_group_share_a_worker_and_workers_share_the_load(slots):
  spec = toy.ToySpec(max_steps=1)
  script = lambda *unused: _say('wait')
  _, pool, _ = _collect(script, spec, slots, _tasks(spec, 0, 1, 2, 3), 3)
  (tasks,) = pool.resets
  workers = {}
  for slot, task in tasks.items():
    workers.setdefault(task.index, []).append(pool.worker_of(slot))
  assert workers == {0: [0] * 3, 1: [0] * 3, 2: [1] * 3, 3: [1] * 3}


def test_one_episode_of_each_cause():
  spec = toy.ToySpec(
      max_steps=3,
      kinds=('open',),
      fatal=True,
      faults=((2, 'raise_in_step'), (3, 'raise_in_reset')),
      fault_step=2,
  )
  tasks = _tasks(spec, 0, 1, 2, 3, 4)
  right = {t.index: toy.solution(spec, t)[0] for t in tasks}
  wrong = next(f'open box {n}' for n in (1, 2) if f'open box {n}' != right[1])
  script = lambda task, trajectory, step: {
      0: _say(right[0]),
      1: _say(wrong),
      2: _say('wait'),
      4: 'hm...',
  }[task]
  trajectories, _, _ = _collect(script, spec, 2, tasks)
  assert [t.end_reason for t in trajectories] == [
      types.SOLVED,
      types.FAILED,
      types.ENV_ERROR,
      types.ENV_ERROR,
      types.MAX_STEPS,
  ]
  assert [len(t.steps) for t in trajectories] == [1, 1, 1, 0, 3]
  assert [t.aborted for t in trajectories] == [False, False, True, True, False]
  assert [t.error for t in trajectories][2:4] == ['the box bites'] * 2
  assert [t.success for t in trajectories] == [True] + [False] * 4
  metrics = metrics_lib.rollout_metrics(trajectories)
  assert metrics['rollout/end_solved'] == 0.2
  assert metrics['rollout/end_env_error'] == 0.4
  assert metrics['rollout/success_rate'] == 0.2
  assert metrics['rollout/success_rate_open'] == 0.2
  assert metrics['rollout/steps_per_trajectory'] == pytest.approx(6 / 5)
  assert metrics['rollout/frac_truncated'] == 0.5
  assert metrics['rollout/invalid_cut'] == 0.5
  assert metrics['rollout/invalid'] == 0.0
  assert metrics['rollout/inadmissible'] == pytest.approx(4 / 6)


def test_a_prompt_that_cannot_fit_ends_the_episode_as_context():
  spec = toy.ToySpec(kinds=('put',))
  script = lambda task, trajectory, step: _say(f'go to box {step % 3 + 1}')
  setup = dict(spec=spec, slots=1, tasks=_tasks(spec, 0), history_length=0)
  (free,), _, _ = _collect(script, **setup)
  sizes = [s.prompt_ids.size for s in free.steps]
  longest = int(np.argmax(sizes))
  assert longest > 0 and free.end_reason == types.MAX_STEPS
  (trajectory,), _, _ = _collect(
      script, **setup, max_prompt_tokens=sizes[longest] - 1
  )
  assert trajectory.end_reason == types.CONTEXT
  assert len(trajectory.steps) == longest
  assert not trajectory.success and not trajectory.aborted


def test_dropped_history_is_recorded():
  spec = toy.ToySpec(kinds=('put',))
  script = lambda task, trajectory, step: _say('look')
  (trajectory,), _, _ = _collect(
      script,
      spec,
      1,
      _tasks(spec, 0),
      max_prompt_tokens=620,
      history_length=6,
  )
  dropped = [s.dropped_history for s in trajectory.steps]
  assert dropped[0] == 0 and dropped[-1] > 0
  assert max(s.prompt_ids.size for s in trajectory.steps) <= 620
  metrics = metrics_lib.rollout_metrics([trajectory])
  assert metrics['rollout/dropped_history'] == pytest.approx(np.mean(dropped))


def test_a_response_cut_in_the_middle_of_an_episode_is_counted():
  spec = toy.ToySpec(max_steps=3)
  script = lambda task, trajectory, step: (
      _say('look') + ('...' if step == 1 else '')
  )
  (trajectory,), _, _ = _collect(script, spec, 1, _tasks(spec, 1))
  reasons = [s.finish_reason for s in trajectory.steps]
  assert reasons == [types.STOP, types.LENGTH, types.STOP]
  # The cut left a whole action: it is acted on and is valid.
  assert [s.action for s in trajectory.steps] == ['look'] * 3
  assert all(s.action_valid for s in trajectory.steps)
  metrics = metrics_lib.rollout_metrics([trajectory])
  assert metrics['rollout/frac_truncated'] == pytest.approx(1 / 3)


def test_slots_are_refilled_and_ids_are_explicit():
  spec = toy.ToySpec(kinds=('put',), max_steps=5)
  tasks = _tasks(spec, 3, 0, 3)
  script = lambda task, trajectory, step: (
      _say(toy.solution(spec, spec.split('train')[task])[step])
      if trajectory % 2
      else _say('look')
  )
  few, pool, sampler = _collect(script, spec, 2, tasks, group_size=3)
  many, wide_pool, _ = _collect(script, spec, 20, tasks, group_size=3)
  assert pool.busiest == 2 and wide_pool.busiest == 9
  assert [t.group for t in few] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
  assert [t.trajectory for t in few] == list(range(9))
  assert [t.task.index for t in few] == [3, 3, 3, 0, 0, 0, 3, 3, 3]
  assert [len(t.steps) for t in few] == [5, 4, 5, 4, 5, 4, 5, 4, 5]
  assert all(
      (s.group, s.trajectory) == (t.group, t.trajectory)
      for t in few
      for s in t.steps
  )
  assert [t.end_reason for t in few] == [t.end_reason for t in many]
  assert len(set(sampler.keys)) == len(sampler.keys)
  assert sampler.keys[0] == (5, 7, 3, 0, 0)


def test_openings_are_replayed_and_then_it_is_played_on():
  spec = toy.ToySpec(kinds=('put',), max_steps=6)
  tasks = _tasks(spec, 0, 1)
  script = lambda task, trajectory, step: _say(
      toy.solution(spec, spec.split('train')[task])[min(step, 3)]
      if trajectory % 2
      else 'look'
  )
  full, _, whole = _collect(script, spec, 4, tasks, group_size=2)
  openings = [full[1].steps[:2], full[3].steps[:4]]
  pool, sampler = _LocalPool(spec, 1), _Scripted(script)
  collector = collector_lib.Collector(
      2, 2000, prompt_lib.AlfworldPrompt()
  ).bind(pool, _CharTokenizer(), sampler)
  play = lambda openings: collector.collect(
      None, tasks, 2, 5, 7, 1.0, openings=openings
  )
  found = play(openings)
  # A solved opening is an episode of its own; nothing more is sampled.
  assert [len(t.steps) for t in found] == [6, 4, 4, 4]
  assert {key[3:] for key in sampler.keys} == {(0, s) for s in (2, 3, 4, 5)} | {
      (1, 2),
      (1, 3),
  }
  for trajectory, source in zip(found, (1, 1, 3, 3)):
    opening = openings[source // 2]
    for step, recorded in zip(trajectory.steps, opening):
      assert step.trajectory == trajectory.trajectory
      assert step.action == recorded.action
      np.testing.assert_array_equal(step.prompt_ids, recorded.prompt_ids)
  # The same history, so the same prompts and the same end.
  for step, recorded in zip(found[1].steps, full[1].steps, strict=True):
    np.testing.assert_array_equal(step.prompt_ids, recorded.prompt_ids)
    assert step.next_state_key == recorded.next_state_key
  assert found[1].success and found[2].end_reason == types.SOLVED
  assert whole.keys[0] == (5, 7, 0, 0, 0)


def test_a_replay_that_leads_elsewhere_is_refused():
  spec = toy.ToySpec(kinds=('put',), max_steps=6)
  script = lambda task, trajectory, step: _say('look')
  (trajectory,), _, _ = _collect(script, spec, 1, _tasks(spec, 0))
  wrong = dataclasses.replace(trajectory.steps[0], next_state_key='elsewhere')
  collector = collector_lib.Collector(
      2, 2000, prompt_lib.AlfworldPrompt()
  ).bind(_LocalPool(spec, 1), _CharTokenizer(), _Scripted(script))
  with pytest.raises(episode_lib.ReplayError, match="to 'elsewhere'; give the"):
    collector.collect(None, _tasks(spec, 0), 1, 5, 7, 1.0, openings=[[wrong]])


class _SlowPool(_LocalPool):
  """Answers in an order of its own, a part of them at a time."""

  def poll(self, timeout_s=0.0):
    answers = super().poll()
    slots = list(answers)
    self._random.shuffle(slots)
    # Whoever has nothing else to do gets one at least.
    most = self._random.randint(bool(timeout_s), len(slots)) if slots else 0
    for slot in slots[most:]:
      self._answers[slot] = answers[slot]
    return {slot: answers[slot] for slot in slots[:most]}

  def __init__(self, *args, seed, **kwargs):
    super().__init__(*args, **kwargs)
    self._random = random.Random(seed)


def test_an_error_leaves_no_answer_for_the_next_call():
  spec = toy.ToySpec(kinds=('put',), max_steps=6)
  script = lambda task, trajectory, step: _say('look')
  tasks = _tasks(spec, 0, 1, 2, 3)
  played, _, _ = _collect(script, spec, 4, tasks)
  wrong = dataclasses.replace(played[2].steps[0], next_state_key='elsewhere')
  pool = _SlowPool(spec, 4, seed=0)
  bound = collector_lib.Collector(2, 2000, prompt_lib.AlfworldPrompt()).bind(
      pool, _CharTokenizer(), _Scripted(script)
  )
  with pytest.raises(episode_lib.ReplayError):
    bound.collect(None, tasks, 1, 5, 7, 1.0, [[], [], [wrong], []])
  assert pool.poll(1.0) == {}
  again = bound.collect(None, tasks, 1, 5, 7, 1.0)
  for a, b in zip(again, played, strict=True):
    assert [s.next_state_key for s in a.steps] == [
        s.next_state_key for s in b.steps
    ]


def test_nothing_to_play():
  trajectories, _, _ = _collect(None, toy.ToySpec(), 2, [])
  assert trajectories == []
  metrics = metrics_lib.rollout_metrics(trajectories)
  assert metrics['rollout/success_rate'] == 0.0


def test_records_cannot_be_changed():
  spec = toy.ToySpec(max_steps=1)
  script = lambda task, trajectory, step: _say('look')
  (trajectory,), _, _ = _collect(script, spec, 1, _tasks(spec, 0))
  with pytest.raises(dataclasses.FrozenInstanceError):
    trajectory.steps[0].reward = 1.0
  with pytest.raises(ValueError, match='read-only'):
    trajectory.steps[0].prompt_ids[0] = 1


def test_episodes_do_not_depend_on_how_many_run_side_by_side():
  """With a real model and its sampler, in slots of real processes or none."""
  model = qwen2.Qwen2(
      base.ModelConfig(
          vocab_size=128,
          hidden_size=16,
          intermediate_size=16,
          num_layers=1,
          num_heads=2,
          num_kv_heads=1,
          head_dim=8,
          tie_word_embeddings=True,
          max_position_embeddings=512,
      )
  )
  params = model.init(jax.random.key(0))
  params['embed']['embedding'] *= 20
  spec = toy.ToySpec(kinds=('put',), max_steps=3)
  tasks = _tasks(spec, 0, 1, 2)
  sampler = sampler_lib.Sampler(6, (400,), (6,)).bind(model, (_STOP,))
  collector = collector_lib.Collector(2, 400, prompt_lib.CompactPrompt())

  def play(pool):
    bound = collector.bind(pool, _CharTokenizer(), sampler)
    return bound.collect(params, tasks, 2, 0, 0, 1.0)

  wide = play(_LocalPool(spec, 6))
  narrow = play(_LocalPool(spec, 2))
  with pool_lib.EnvPool(spec, num_slots=4, num_workers=1) as pool:
    pooled = play(pool)
  # Answers that come late, one by one and in any order.
  late = [play(_SlowPool(spec, 5, seed=seed)) for seed in (0, 1)]
  for other in (narrow, pooled, *late):
    for a, b in zip(wide, other, strict=True):
      assert [s.action for s in a.steps] == [s.action for s in b.steps]
      for s, t in zip(a.steps, b.steps, strict=True):
        np.testing.assert_array_equal(s.prompt_ids, t.prompt_ids)
        np.testing.assert_array_equal(s.response_ids, t.response_ids)
        np.testing.assert_array_equal(s.sampler_logprobs, t.sampler_logprobs)
  # The cache, two sizes of prefill, copying, decoding.
  assert sampler.compilations == 5
  # Members of a group differ, although task and prompt are the same.
  assert [s.action for s in wide[0].steps] != [s.action for s in wide[1].steps]


def test_responses_can_be_bound_to_the_admissible_actions():
  model = qwen2.Qwen2(
      base.ModelConfig(
          vocab_size=128,
          hidden_size=16,
          intermediate_size=16,
          num_layers=1,
          num_heads=2,
          num_kv_heads=1,
          head_dim=8,
          tie_word_embeddings=True,
          max_position_embeddings=512,
      )
  )
  spec = toy.ToySpec(kinds=('put',), max_steps=3)
  sampler = sampler_lib.Sampler(
      60, (400,), (4,), (128,), admissible=(12, 60)
  ).bind(model, (_STOP,))
  prompt = prompt_lib.CompactPrompt()
  answer = '<think></think><action>{}</action>'
  collector = collector_lib.Collector(2, 400, prompt, answer=answer)
  played = collector.bind(_LocalPool(spec, 4), _CharTokenizer(), sampler)
  found = played.collect(
      model.init(jax.random.key(0)), _tasks(spec, 0, 1), 4, 0, 0, 1.0
  )
  steps = [step for trajectory in found for step in trajectory.steps]
  assert len(steps) == 24
  assert all(s.action_valid and s.action_admissible for s in steps)
  assert {s.finish_reason for s in steps} == {types.STOP}
  assert len({s.action for s in steps}) > 3


@pytest.mark.parametrize(
    'change, message',
    [
        (dict(history_length=-1), 'history_length is -1 .* at least 0 and 1'),
        (dict(max_prompt_tokens=0), 'max_prompt_tokens 0; expected at least'),
        (dict(parser='json'), r"parser is 'json'; expected one of \['appwor"),
        (dict(answer='no place'), "answer is 'no place'; expected {} in it"),
        (dict(max_prompt_tokens=2001), 'buckets, 2000; set it to 2000 or add'),
    ],
)
def test_bad_settings_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    _collect(None, toy.ToySpec(), 1, [], **change)


def test_a_later_round_goes_on_with_the_ids():
  spec = toy.ToySpec()
  pool, sampler = _LocalPool(spec, 4), _Scripted(lambda *unused: _say('wait'))
  collector = collector_lib.Collector(
      history_length=2,
      max_prompt_tokens=2000,
      prompt=prompt_lib.AlfworldPrompt(),
  ).bind(pool, _CharTokenizer(), sampler)
  first, later = (
      collector.collect(
          None, _tasks(spec, *tasks), 2, 5, 7, 1.0, first_group=group
      )
      for tasks, group in (((0, 1), 0), ((2, 3), 2))
  )
  found = [*first, *later]
  assert [t.group for t in found] == [0, 0, 1, 1, 2, 2, 3, 3]
  assert [t.trajectory for t in found] == list(range(8))
  assert all(s.trajectory == t.trajectory for t in found for s in t.steps)
