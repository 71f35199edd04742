from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hgpo_jax import types
from hgpo_jax.batch import advantage_inputs
from hgpo_jax.batch import minibatch
from hgpo_jax.batch import pack

SPEC = minibatch.Minibatches(
    minibatch_steps=4,
    micro_batch_steps=2,
    length_buckets=(8, 16),
    response_buckets=(4,),
)


def _step(trajectory=0, step=0, prompt=3, response=2, **fields) -> types.Step:
  base = types.Step(
      group=trajectory // 2,
      trajectory=trajectory,
      step=step,
      # 0 is a token like any other: masks must not come from token ids.
      prompt_ids=np.zeros(prompt, np.int32),
      response_ids=np.zeros(response, np.int32),
      sampler_logprobs=np.full(response, -1.5, np.float32),
      finish_reason=types.STOP,
      action=f'go {step}',
      action_valid=True,
      action_admissible=True,
      observation='o',
      state_key=f's{step}',
      next_state_key=f's{step + 1}',
      reward=0.0,
  )
  return dataclasses.replace(base, **fields)


def _trajectory(
    index=0, length=2, reason=types.FAILED, rewards=None
) -> types.Trajectory:
  rewards = rewards or [0.0] * length
  steps = tuple(_step(index, i, reward=r) for i, r in enumerate(rewards))
  return types.Trajectory(
      types.Task('train', index, f'game-{index}', 0, 'pick'),
      index // 2,
      index,
      steps,
      reason == types.SOLVED,
      float(sum(rewards)),
      reason,
  )


def _pack(steps, **kwargs):
  return pack.pad_steps(
      steps, length_buckets=(8, 16), response_buckets=(4,), **kwargs
  )


def test_rows_hold_prompt_response_and_padding():
  batch = _pack([_step(prompt=3, response=2)])
  row = lambda name: getattr(batch, name)[0].tolist()
  assert row('segment_ids_BT') == [1, 1, 1, 1, 1, 0, 0, 0]
  assert row('positions_BT') == [0, 1, 2, 3, 4, 0, 0, 0]
  assert row('target_BR') == [3, 4, 0, 0]
  assert row('action_mask_BR') == [True, True, False, False]
  assert row('sampler_logprobs_BR') == [-1.5, -1.5, 0, 0]
  assert batch.row_weight_B.tolist() == [1]


def test_lengths_choose_the_bucket_and_arrays_are_read_only():
  assert _pack([_step(prompt=6, response=2)]).tokens_BT.shape == (1, 8)
  batch = _pack([_step(prompt=7, response=2), _step(prompt=1)])
  assert batch.tokens_BT.shape == (2, 16)
  with pytest.raises(ValueError, match='read-only'):
    batch.tokens_BT[0, 0] = 1


@pytest.mark.parametrize(
    'steps, text',
    [
        ([], 'no steps to pack'),
        ([_step(prompt=15)], '17 tokens do not fit.*end length_buckets with'),
        ([_step(response=5)], '5 tokens do not fit.*response_buckets'),
        ([_step(7, 4, prompt=0)], 'step 4 of trajectory 7 has 0 prompt and 2'),
        ([_step(7, 4, response=0)], 'step 4 of trajectory 7 has 3 prompt and'),
        (
            [_step(7, 4, sampler_logprobs=np.zeros(3, np.float32))],
            'step 4 of trajectory 7 has 3 sampler log-probs for 2',
        ),
        (
            [_step(7, 4, sampler_logprobs=np.array([0, np.nan], np.float32))],
            'step 4 of trajectory 7 has sampler log-probs that are not finite',
        ),
    ],
)
def test_steps_that_cannot_be_packed_are_refused(steps, text):
  with pytest.raises(ValueError, match=text):
    _pack(steps)


def test_columns_intern_texts_and_follow_the_steps():
  trajectories = [
      _trajectory(4, rewards=[0.0, 1.0], reason=types.SOLVED),
      _trajectory(5, length=3, reason=types.TIMEOUT),
      _trajectory(9, length=3, reason=types.MAX_STEPS),
  ]
  inputs, steps = advantage_inputs.build(trajectories)
  assert [(s.trajectory, s.step) for s in steps] == [
      *((4, 0), (4, 1), (9, 0), (9, 1), (9, 2))
  ]
  assert inputs.trajectory_N.tolist() == [0, 0, 1, 1, 1]
  assert inputs.group_N.tolist() == [0, 0, 1, 1, 1]
  assert inputs.step_N.tolist() == [0, 1, 0, 1, 2]
  assert inputs.outcome_N.tolist() == [1, 1, 0, 0, 0]
  assert inputs.success_N.tolist() == [True, True, False, False, False]
  assert inputs.action_N.tolist() == [0, 1, 0, 1, 2]
  assert inputs.response_tokens_N.tolist() == [2] * 5
  texts = np.array(inputs.state_texts)
  assert texts[inputs.state_N].tolist() == ['s0', 's1', 's0', 's1', 's2']
  assert texts[inputs.next_state_N].tolist() == ['s1', 's2', 's1', 's2', 's3']
  counts = advantage_inputs.counts(trajectories)
  assert counts['batch/aborted_trajectories'] == 1
  assert counts['batch/aborted_steps'] == 3
  assert counts['batch/steps'] == 5 and counts['batch/response_tokens'] == 10


@pytest.mark.parametrize('reward', [np.nan, np.inf])
def test_a_reward_that_is_not_finite_names_task_and_step(reward):
  with pytest.raises(ValueError, match="'game-3', trajectory 3, step 1: rewar"):
    advantage_inputs.build([_trajectory(3, rewards=[0.0, reward])])


def test_ids_that_lie_are_refused():
  with pytest.raises(ValueError, match='trajectory id 1 appears twice'):
    advantage_inputs.build([_trajectory(1), _trajectory(1)])
  moved = dataclasses.replace(_trajectory(1), trajectory=2)
  with pytest.raises(ValueError, match=r'\(0, 1, 0\), expected \(0, 2, 0\)'):
    advantage_inputs.build([moved])


def _batch(count: int) -> types.PolicyBatch:
  rng = np.random.default_rng(0)
  sizes = zip(rng.integers(1, 12, count), rng.integers(1, 5, count))
  steps = [
      _step(i, prompt=int(p), response=int(r)) for i, (p, r) in enumerate(sizes)
  ]
  rollout = _pack(steps)
  advantage_N = np.arange(1, count + 1, dtype=np.float32)
  return minibatch.policy_batch(
      rollout, advantage_N, np.zeros(rollout.target_BR.shape, np.float32)
  )


def _split(batch, spec=SPEC, **kwargs):
  key = dict(seed=1, iteration=2, epoch=0, rows=4)
  return list(minibatch.split(batch, spec, **{**key, **kwargs}))


def test_every_step_is_in_one_minibatch_with_its_own_advantage():
  batch = _batch(10)
  parts = _split(batch, rows=2)
  assert [len(part) for part in parts] == [2, 2, 2]
  seen, tokens = [], 0
  for micro in sum(parts, []):
    rollout = micro.rollout
    assert len(rollout.row_weight_B) == 2
    mask_BR = rollout.action_mask_BR
    np.testing.assert_array_equal(
        micro.advantage_BR, np.where(mask_BR, rollout.step_BR + 1, 0)
    )
    assert not mask_BR[rollout.row_weight_B == 0].any()
    seen += rollout.step_BR[rollout.row_weight_B > 0, 0].tolist()
    tokens += mask_BR.sum()
  assert sorted(seen) == [*range(10)]
  rows = [[int(m.rollout.row_weight_B.sum()) for m in part] for part in parts]
  assert rows == [[2, 2], [2, 1], [2, 1]]
  assert tokens == batch.rollout.action_mask_BR.sum()


def test_micro_batches_are_of_similar_length_and_no_longer_than_needed():
  (part,) = _split(
      _batch(12), dataclasses.replace(SPEC, minibatch_steps=12), rows=4
  )
  lengths = [(m.rollout.segment_ids_BT > 0).sum(1) for m in part]
  for longer, shorter in zip(lengths, lengths[1:]):
    assert longer.min() >= shorter.max()
  for length_B, micro in zip(lengths, part):
    width = micro.rollout.tokens_BT.shape[1]
    assert width == min(b for b in SPEC.length_buckets if b >= length_B.max())


def test_the_order_is_a_function_of_seed_iteration_and_epoch():
  batch = _batch(12)
  order = lambda **key: [
      sorted(
          row for micro in part for row in micro.rollout.step_BR[:, 0].tolist()
      )
      for part in _split(batch, **key)
  ]
  assert order() == order()
  others = [order(seed=5), order(iteration=5), order(epoch=5)]
  assert all(other != order() for other in others)
  plain = dataclasses.replace(SPEC, shuffle=False)
  assert order(spec=plain) == [[*range(i, i + 4)] for i in (0, 4, 8)]


@pytest.mark.parametrize(
    'no_signal, trained', [('keep', [0, 1, 2, 3]), ('drop', [1, 3])]
)
def test_steps_without_signal_are_kept_or_dropped(no_signal, trained):
  spec = dataclasses.replace(SPEC, no_signal=no_signal)
  advantage_N = np.array([0.0, 1e-9, 0.0, -2.0], np.float32)
  assert spec.trained(advantage_N).tolist() == trained


def test_parts_by_length_cover_the_real_rows_once():
  rollout = _batch(10).rollout
  parts = list(minibatch.by_length(rollout, SPEC, 4))
  rows = np.concatenate([rows for rows, _ in parts])
  assert sorted(rows.tolist()) == [*range(10)]
  widths = [part.tokens_BT.shape[1] for _, part in parts]
  assert widths == sorted(widths, reverse=True) and widths[-1] == 8
  for rows, part in parts:
    assert part.tokens_BT.shape[0] == 4
    np.testing.assert_array_equal(
        part.step_BR[: len(rows)], rollout.step_BR[rows][:, :4]
    )


@pytest.mark.parametrize(
    'fields, text',
    [
        ({}, None),
        (dict(no_signal='x'), "Minibatches.no_signal='x'; expected one of"),
        (dict(epochs=0), 'Minibatches.epochs=0; expected at least 1'),
        (dict(minibatch_steps=6), '6 is not a multiple of the 4 rows'),
        (dict(micro_batch_steps=4), '4 is not a multiple of the 8 rows'),
        (dict(length_buckets=(8, 15)), '15 tokens, but 16 are allowed; end'),
        (dict(length_buckets=(16, 8)), 'each greater than the one before'),
        (dict(response_buckets=(3,)), '3 tokens, but 4 are allowed'),
    ],
)
def test_numbers_that_do_not_fit_are_refused_at_start_up(fields, text):
  spec = dataclasses.replace(SPEC, **fields)
  check = lambda: spec.check(
      data_parallel=2, max_prompt_tokens=12, max_new_tokens=4
  )
  if text is None:
    check()
  else:
    with pytest.raises(ValueError, match=text):
      check()
