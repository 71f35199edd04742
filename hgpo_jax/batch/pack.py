"""Steps of an iteration as padded rows of tokens, one step a row."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import numpy as np

from hgpo_jax import types


def check_buckets(knob: str, buckets: Sequence[int], longest: int) -> None:
  """Raises ValueError unless `buckets` rise and hold `longest` tokens."""
  rising = all(a < b for a, b in zip(buckets, buckets[1:]))
  if not buckets or buckets[0] < 1 or not rising:
    raise ValueError(
        f'{knob}={tuple(buckets)!r}: expected one or more positive lengths, '
        'each greater than the one before.'
    )
  if buckets[-1] < longest:
    raise ValueError(
        f'{knob}={tuple(buckets)!r}: the last bucket holds {buckets[-1]} '
        f'tokens, but {longest} are allowed; end {knob} with {longest}, or '
        'lower the limits on prompt and response tokens.'
    )


def bucket(knob: str, buckets: Sequence[int], length: int) -> int:
  """The first of `buckets` that holds `length` tokens, else ValueError."""
  for size in buckets:
    if length <= size:
      return size
  raise ValueError(
      f'{length} tokens do not fit the last bucket of {knob}='
      f'{tuple(buckets)!r}; end {knob} with at least {length}, or lower the '
      'limits on prompt and response tokens.'
  )


def pad_steps(
    steps: Sequence[types.Step],
    *,
    length_buckets: Sequence[int],
    response_buckets: Sequence[int],
) -> types.RolloutBatch:
  """One row a step: prompt, response, padding; masks come from lengths.

  T is the first of `length_buckets` that holds the longest prompt with its
  response, R the first of `response_buckets` that holds the longest response.
  Row i is `steps[i]`. Nothing is cut: a step that does not fit is refused.

  Raises:
    ValueError: no steps, an empty prompt or response, log-probs that are not
      one finite number a response token, or a step longer than the last
      bucket.
  """
  if not steps:
    raise ValueError(
        'no steps to pack: expected at least one step of a trajectory that '
        'was not aborted; look at the environment errors of this iteration.'
    )
  for step in steps:
    _check(step)
  lengths_N = [len(s.prompt_ids) + len(s.response_ids) for s in steps]
  length = bucket('length_buckets', length_buckets, max(lengths_N))
  response = bucket(
      'response_buckets',
      response_buckets,
      max(len(step.response_ids) for step in steps),
  )
  batch = _empty(len(steps), length, response)
  for row, step in enumerate(steps):
    _fill(batch, row, step)
  return read_only(batch)


def read_only(batch: types.RolloutBatch) -> types.RolloutBatch:
  """The same batch, its arrays protected against writing."""
  for field in dataclasses.fields(batch):
    getattr(batch, field.name).flags.writeable = False
  return batch


def _check(step: types.Step) -> None:
  name = f'step {step.step} of trajectory {step.trajectory}'
  if not len(step.prompt_ids) or not len(step.response_ids):
    raise ValueError(
        f'{name} has {len(step.prompt_ids)} prompt and '
        f'{len(step.response_ids)} response tokens; expected at least one of '
        'each: the first response token is predicted from the last prompt '
        'token, and a response ends with its stop token.'
    )
  if len(step.sampler_logprobs) != len(step.response_ids):
    raise ValueError(
        f'{name} has {len(step.sampler_logprobs)} sampler log-probs for '
        f'{len(step.response_ids)} response tokens; expected one each.'
    )
  if not np.all(np.isfinite(step.sampler_logprobs)):
    raise ValueError(
        f'{name} has sampler log-probs that are not finite: '
        f'{step.sampler_logprobs!r}; the policy weights or the sampling '
        'temperature are broken.'
    )


def _empty(rows: int, length: int, response: int) -> types.RolloutBatch:
  return types.RolloutBatch(
      tokens_BT=np.zeros((rows, length), np.int32),
      positions_BT=np.zeros((rows, length), np.int32),
      segment_ids_BT=np.zeros((rows, length), np.int32),
      target_BR=np.zeros((rows, response), np.int32),
      action_mask_BR=np.zeros((rows, response), bool),
      step_BR=np.zeros((rows, response), np.int32),
      sampler_logprobs_BR=np.zeros((rows, response), np.float32),
      row_weight_B=np.zeros((rows,), np.float32),
  )


def _fill(batch: types.RolloutBatch, row: int, step: types.Step) -> None:
  """Writes `step` into `row` of arrays that nobody else has seen yet."""
  prompt, response = len(step.prompt_ids), len(step.response_ids)
  end = prompt + response
  batch.tokens_BT[row, :prompt] = step.prompt_ids
  batch.tokens_BT[row, prompt:end] = step.response_ids
  batch.positions_BT[row, :end] = np.arange(end)
  batch.segment_ids_BT[row, :end] = 1
  batch.target_BR[row, :response] = np.arange(prompt, end)
  batch.action_mask_BR[row, :response] = True
  batch.step_BR[row, :response] = row
  batch.sampler_logprobs_BR[row, :response] = step.sampler_logprobs
  batch.row_weight_B[row] = 1.0
