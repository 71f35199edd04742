"""Several steps in a row: what is filled, and what lies where."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hgpo_jax.batch import minibatch
from hgpo_jax.batch import pack
from hgpo_jax.batch import packing
from tests.learner import common

SPEC = dataclasses.replace(
    common.SPEC, packing='pack', response_buckets=(8, 16, 24)
)


def _sizes(count, seed=0):
  rng = np.random.default_rng(seed)
  response_N = rng.integers(1, 9, count)
  return np.stack([response_N + rng.integers(1, 17, count), response_N], 1)


@pytest.mark.parametrize('room', [(24, 8), (32, 16), (64, 1000)])
def test_first_fit_keeps_every_item_and_fits(room):
  sizes_N2 = _sizes(60)
  rows = packing.first_fit(sizes_N2, room)
  assert sorted(i for items in rows for i in items) == [*range(60)]
  used_B2 = np.array([sizes_N2[items].sum(0) for items in rows])
  assert (used_B2 <= room).all()
  # No row could have taken what came to a later one.
  for later, items in enumerate(rows):
    for item in items:
      for row in range(later):
        before = [i for i in rows[row] if _before(sizes_N2, i, item)]
        used = sizes_N2[before].sum(0) + sizes_N2[item]
        assert (used > room).any()


def _before(sizes_N2, i, j):
  """Whether first-fit-decreasing places i before j."""
  return (-sizes_N2[i, 0], i) < (-sizes_N2[j, 0], j)


def test_first_fit_by_hand():
  sizes_N2 = np.array([[3, 1], [7, 1], [2, 1], [5, 1], [2, 1]])
  assert packing.first_fit(sizes_N2, (10, 9)) == [[1, 0], [3, 2, 4]]
  assert packing.first_fit(sizes_N2, (10, 2)) == [[1, 0], [3, 2], [4]]


def test_the_row_length_with_the_fewest_tokens_is_taken():
  six = np.tile([[6, 1]], (4, 1))
  # Rows of 12 hold two each without a gap; rows of 16 would waste 4.
  passes = packing.fewest_tokens(six, (8, 12, 16), (9,), 2)
  assert passes == [[[0, 1], [2, 3]]]
  # One row a pass: equal in tokens, so the shorter rows.
  passes = packing.fewest_tokens(six, (6, 12), (9,), 1)
  assert passes == [[[0]], [[1]], [[2]], [[3]]]


def test_segments_lie_side_by_side():
  steps = [common.step(0, 2, 2), common.step(1, 3, 1), common.step(2, 1, 1)]
  batch = pack.pad_steps(steps, length_buckets=(8,), response_buckets=(4,))
  layout = packing.Layout.make(batch, [[1, 0], [2]], (3, 10, 5))
  packed = layout.rollout(batch)
  row = lambda name, i=0: getattr(packed, name)[i].tolist()
  ids = [
      step.prompt_ids.tolist() + step.response_ids.tolist() for step in steps
  ]
  assert row('tokens_BT') == ids[1] + ids[0] + [0, 0]
  assert row('segment_ids_BT') == [1, 1, 1, 1, 2, 2, 2, 2, 0, 0]
  assert row('positions_BT') == [0, 1, 2, 3, 0, 1, 2, 3, 0, 0]
  assert row('target_BR') == [3, 6, 7, 0, 0]
  assert row('action_mask_BR') == [True, True, True, False, False]
  assert row('step_BR') == [1, 0, 0, 0, 0]
  assert row('sampler_logprobs_BR')[:3] == [
      *steps[1].sampler_logprobs,
      *steps[0].sampler_logprobs,
  ]
  assert row('target_BR', 1) == [1, 0, 0, 0, 0]
  assert row('step_BR', 1) == [2, 0, 0, 0, 0]
  assert packed.row_weight_B.tolist() == [1, 1, 0]
  for field in dataclasses.fields(packed):
    was, now = getattr(batch, field.name), getattr(packed, field.name)
    assert was.dtype == now.dtype and not now.flags.writeable
  assert not packed.segment_ids_BT[2].any()


def _steps(part):
  """The steps of a minibatch, each with its tokens and its response."""
  found = {}
  for micro in part:
    rollout = micro.rollout
    for row in range(len(rollout.row_weight_B)):
      segment_T = rollout.segment_ids_BT[row]
      target_R = rollout.target_BR[row][rollout.action_mask_BR[row]]
      for segment in range(1, segment_T.max() + 1):
        inside_R = segment_T[target_R] == segment
        (step,) = set(rollout.step_BR[row, : len(target_R)][inside_R].tolist())
        assert step not in found
        found[step] = (
            rollout.tokens_BT[row][segment_T == segment].tolist(),
            rollout.tokens_BT[row][target_R[inside_R]].tolist(),
            micro.advantage_BR[row, : len(target_R)][inside_R].tolist(),
        )
  return found


def test_minibatches_have_the_same_steps_packed_or_not():
  batch = common.policy_batch(32)
  key = dict(seed=3, iteration=1, epoch=0, rows=2)
  plain = dataclasses.replace(SPEC, packing='none')
  parts = list(minibatch.split(batch, SPEC, **key))
  other = list(minibatch.split(batch, plain, **key))
  assert [_steps(part) for part in parts] == [_steps(part) for part in other]
  assert [len(_steps(part)) for part in parts] == [8] * 4
  count = lambda parts: sum(m.rollout.tokens_BT.size for p in parts for m in p)
  assert count(parts) < count(other)
  for micro in sum(parts, []):
    assert len(micro.rollout.row_weight_B) == 2
    assert micro.rollout.tokens_BT.shape[1] in SPEC.length_buckets


def test_packed_minibatches_need_no_multiple_of_the_rows():
  odd = dataclasses.replace(SPEC, minibatch_steps=7, micro_batch_steps=4)
  odd.check(data_parallel=2, max_prompt_tokens=24, max_new_tokens=8)
  plain = dataclasses.replace(odd, packing='none')
  with pytest.raises(ValueError, match='7 is not a multiple of the 8 rows'):
    plain.check(data_parallel=2, max_prompt_tokens=24, max_new_tokens=8)
  wrong = dataclasses.replace(SPEC, packing='tight')
  with pytest.raises(ValueError, match="Minibatches.packing='tight'; expected"):
    wrong.check(data_parallel=1, max_prompt_tokens=24, max_new_tokens=8)
