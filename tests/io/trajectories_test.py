from __future__ import annotations

import dataclasses
import gzip
import json

import numpy as np
import pytest

from hgpo_jax import types
from hgpo_jax.io import trajectories as trajectories_lib


def _episode(index: int, rng: np.random.Generator) -> types.Trajectory:
  steps = tuple(
      types.Step(
          group=index // 2,
          trajectory=index,
          step=i,
          prompt_ids=rng.integers(0, 700, 9).astype(np.int32),
          response_ids=rng.integers(0, 700, 3 + i).astype(np.int32),
          sampler_logprobs=-rng.exponential(size=3 + i).astype(np.float32),
          finish_reason=types.STOP,
          action='öffne "Schrank" 1\n',
          action_valid=True,
          action_admissible=i == 0,
          observation='You see a shelf 1.',
          state_key=f's{i}',
          next_state_key=f's{i + 1}',
          reward=0.1 * i,
          dropped_history=i,
      )
      for i in range(3)
  )
  task = types.Task('train', index, f'game-{index}', 7, 'pick')
  return types.Trajectory(
      task, index // 2, index, steps, False, 0.25, types.TIMEOUT, 'too slow'
  )


def _assert_equal(a: types.Trajectory, b: types.Trajectory) -> None:
  assert dataclasses.replace(a, steps=()) == dataclasses.replace(b, steps=())
  for x, y in zip(a.steps, b.steps, strict=True):
    for field in dataclasses.fields(types.Step):
      left, right = getattr(x, field.name), getattr(y, field.name)
      np.testing.assert_array_equal(left, right)
      assert getattr(left, 'dtype', None) == getattr(right, 'dtype', None)


def test_round_trip_is_exact_and_bytes_are_reproducible(tmp_path):
  rng = np.random.default_rng(0)
  episodes = [_episode(i, rng) for i in range(4)]
  path = tmp_path / 'episodes' / trajectories_lib.file_name(12)
  trajectories_lib.save(path, episodes, decode=lambda ids: f'<{len(ids)}>')
  for a, b in zip(episodes, trajectories_lib.load(path), strict=True):
    _assert_equal(a, b)
  first = path.read_bytes()
  trajectories_lib.save(path, episodes, decode=lambda ids: f'<{len(ids)}>')
  assert path.read_bytes() == first
  with gzip.open(path, 'rt', encoding='utf-8') as lines:
    record = json.loads(next(lines))
  assert record['steps'][1]['response_text'] == '<4>'
  assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_loaded_arrays_are_read_only(tmp_path):
  path = tmp_path / 'e.jsonl.gz'
  trajectories_lib.save(path, [_episode(0, np.random.default_rng(0))])
  step = trajectories_lib.load(path)[0].steps[0]
  with pytest.raises(ValueError, match='read-only'):
    step.prompt_ids[0] = 1


def test_a_truncated_file_is_refused_by_name_and_episode(tmp_path):
  rng = np.random.default_rng(0)
  path = tmp_path / 'e.jsonl.gz'
  trajectories_lib.save(path, [_episode(i, rng) for i in range(4)])
  path.write_bytes(path.read_bytes()[:-40])
  with pytest.raises(ValueError, match=r'e\.jsonl\.gz: episode \d cannot be'):
    trajectories_lib.load(path)
  path.write_bytes(gzip.compress(b'{"task": {}}\n'))
  with pytest.raises(ValueError, match='episode 1 cannot be read'):
    trajectories_lib.load(path)


_TOP = ('task', 'group', 'success', 'score', 'end_reason', 'steps')


@pytest.mark.parametrize(
    ('name', 'value', 'text'),
    [
        ('reward', '10', "step 1: reward is '10', expected float"),
        ('reward', None, 'step 1: reward is None, expected float'),
        ('reward', True, 'step 1: reward is True, expected float'),
        ('state_key', 7, 'step 1: state_key is 7, expected str'),
        ('next_state_key', ['a'], 'next_state_key is .*, expected str'),
        ('observation', None, 'step 1: observation is None, expected str'),
        ('action_valid', 'false', 'action_valid is .*, expected bool'),
        ('step', 0.5, 'step 1: step is 0.5, expected int'),
        ('prompt_ids', [2**40], 'OverflowError'),
        ('prompt_ids', [[1], [2]], 'step 1: prompt_ids is no list of numbers'),
        ('later', 1, "step 1 has the unknown field 'later'; .* version"),
        ('success', 'false', "the episode: success is 'false', expected bool"),
        ('group', 'x', "the episode: group is 'x', expected int"),
        ('end_reason', 'burnt', "end_reason is 'burnt', expected one of"),
        ('steps', None, 'steps are not a list'),
        ('task', 'x', 'its task is a JSON str, no object'),
    ],
)
def test_a_field_of_another_type_is_refused_by_name(
    name, value, text, tmp_path
):
  path = tmp_path / 'e.jsonl.gz'
  trajectories_lib.save(path, [_episode(0, np.random.default_rng(0))])
  record = json.loads(gzip.decompress(path.read_bytes()))
  (record if name in _TOP else record['steps'][1])[name] = value
  path.write_bytes(gzip.compress(json.dumps(record).encode()))
  with pytest.raises(ValueError, match=f'episode 1 cannot be read .*{text}'):
    trajectories_lib.load(path)


def test_a_missing_field_and_endless_brackets_are_refused(tmp_path):
  path = tmp_path / 'e.jsonl.gz'
  trajectories_lib.save(path, [_episode(0, np.random.default_rng(0))])
  record = json.loads(gzip.decompress(path.read_bytes()))
  del record['steps'][2]['dropped_history']  # It has a default.
  path.write_bytes(gzip.compress(json.dumps(record).encode()))
  assert trajectories_lib.load(path)[0].steps[2].dropped_history == 0
  del record['steps'][2]['next_state_key']
  path.write_bytes(gzip.compress(json.dumps(record).encode()))
  with pytest.raises(ValueError, match="step 2 lacks the field 'next_state"):
    trajectories_lib.load(path)
  path.write_bytes(gzip.compress(b'[' * 100_000))
  with pytest.raises(ValueError, match='RecursionError'):
    trajectories_lib.load(path)


def test_any_text_is_read_back_as_it_was(tmp_path):
  path = tmp_path / 'e.jsonl.gz'
  text = 'a\ud800 \\\udfff \u2028\x00\n</script> \U0001f600'
  episode = _episode(0, np.random.default_rng(0))
  step = dataclasses.replace(episode.steps[0], observation=text, action=text)
  trajectories_lib.save(path, [dataclasses.replace(episode, steps=(step,))])
  found = trajectories_lib.load(path)[0].steps[0]
  assert (found.observation, found.action) == (text, text)


def test_a_failed_write_leaves_the_old_file(tmp_path):
  path = tmp_path / 'e.jsonl.gz'
  trajectories_lib.save(path, [_episode(0, np.random.default_rng(0))])
  before = path.read_bytes()

  def broken(ids):
    raise OSError('No space left on device')

  with pytest.raises(OSError, match='No space'):
    trajectories_lib.save(path, trajectories_lib.load(path), decode=broken)
  assert path.read_bytes() == before
  assert [p.name for p in tmp_path.iterdir()] == [path.name]
