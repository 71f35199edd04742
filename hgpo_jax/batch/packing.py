"""Several steps in one row: which, and where in it they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hgpo_jax import types
from hgpo_jax.batch import pack

Rows = Sequence[Sequence[int]]  # The items of each row, in their order.


def first_fit(sizes_N2: np.ndarray, room: tuple[int, int]) -> list[list[int]]:
  """Packs by first-fit-decreasing (Johnson 1973), with two sizes an item.

  Items, longest first, go into the first row that has room for both sizes.
  Where the second is not scarce, that takes at most 11/9 of the fewest rows
  and one more.

  Args:
    sizes_N2: tokens, and response tokens, of each item; each fits `room`.
    room: tokens, and response tokens, that a row holds.
  """
  left_N2 = np.tile(np.asarray(room), (len(sizes_N2), 1))
  rows: list[list[int]] = []
  for item in np.argsort(-sizes_N2[:, 0], kind='stable').tolist():
    fits = (left_N2[: len(rows) + 1] >= sizes_N2[item]).all(axis=1)
    row = int(np.argmax(fits))
    if row == len(rows):
      rows.append([])
    rows[row].append(item)
    left_N2[row] -= sizes_N2[item]
  return rows


def fewest_tokens(
    sizes_N2: np.ndarray,
    lengths: Sequence[int],
    responses: Sequence[int],
    rows: int,
) -> list[list[list[int]]]:
  """Passes of at most `rows` packed rows each, longest rows first.

  Tried for each row length that holds the longest item; the passes with the
  fewest tokens win, padding included, of equals the one of shorter rows.

  Raises:
    ValueError: an item is longer than the last of `lengths` or `responses`.
  """
  longest = sizes_N2.max(axis=0)
  pack.bucket('response_buckets', responses, longest[1])
  shortest = pack.bucket('length_buckets', lengths, longest[0])
  best, fewest = [], None
  for length in lengths[lengths.index(shortest) :]:
    packed = first_fit(sizes_N2, (length, responses[-1]))
    used_B = np.array([sizes_N2[items, 0].sum() for items in packed])
    order_B = np.argsort(-used_B, kind='stable')
    starts = range(0, len(packed), rows)
    tokens = rows * sum(
        pack.bucket('length_buckets', lengths, used_B[order_B[start]])
        for start in starts
    )
    if fewest is None or tokens < fewest:
      fewest = tokens
      best = [[packed[i] for i in order_B[s : s + rows]] for s in starts]
  return best


def sizes(batch: types.RolloutBatch) -> np.ndarray:
  """[B, 2]: tokens, and response tokens, of each row."""
  return np.stack(
      [
          np.count_nonzero(batch.segment_ids_BT, axis=1),
          np.count_nonzero(batch.action_mask_BR, axis=1),
      ],
      axis=1,
  )


class Layout(NamedTuple):
  """Where the rows of a batch, a step each, lie in packed rows.

  Attributes:
    tokens: of whole steps.
    response: of their responses.
    shape: (B, T, R) of the packed batch.
    real: packed rows that hold something; those after them have weight 0.
  """

  tokens: _Moves
  response: _Moves
  shape: tuple[int, int, int]
  real: int

  @classmethod
  def make(
      cls, batch: types.RolloutBatch, rows: Rows, shape: tuple[int, int, int]
  ) -> Layout:
    """`rows` name the rows of `batch`, made as `pack.pad_steps` makes them."""
    sizes_B2 = sizes(batch)
    count, length, response = shape
    return cls(
        _Moves.make(sizes_B2[:, 0], rows, (count, length)),
        _Moves.make(sizes_B2[:, 1], rows, (count, response)),
        shape,
        len(rows),
    )

  def rollout(self, batch: types.RolloutBatch) -> types.RolloutBatch:
    """The packed rows.

    Segments are numbered from 1 in each row, positions start at 0 in each
    segment, and `step_BR` still names the steps that `batch` was made from.
    """
    tokens, response = self.tokens, self.response
    packed = types.RolloutBatch(
        tokens_BT=tokens(batch.tokens_BT),
        positions_BT=tokens(batch.positions_BT),
        segment_ids_BT=tokens(batch.segment_ids_BT * tokens.place_B[:, None]),
        target_BR=response(batch.target_BR + tokens.first_B[:, None]),
        action_mask_BR=response(batch.action_mask_BR),
        step_BR=response(batch.step_BR),
        sampler_logprobs_BR=response(batch.sampler_logprobs_BR),
        row_weight_B=(np.arange(self.shape[0]) < self.real).astype(np.float32),
    )
    return pack.read_only(packed)

  def policy(self, batch: types.PolicyBatch) -> types.PolicyBatch:
    """The packed rows with what the loss needs besides."""
    move = lambda x: None if x is None else self.response(x)
    return types.PolicyBatch(
        self.rollout(batch.rollout),
        move(batch.advantage_BR),
        move(batch.old_logprobs_BR),
        move(batch.ref_logprobs_BR),
    )


class _Moves(NamedTuple):
  """From the heads of old rows to places side by side in new rows.

  Attributes:
    source: (old row, column) of each entry.
    target: (new row, column) of each entry.
    first_B: column of its new row that an old row starts at.
    place_B: 1-based place of an old row among those of its new row.
    shape: of the new array.
  """

  source: tuple[np.ndarray, np.ndarray]
  target: tuple[np.ndarray, np.ndarray]
  first_B: np.ndarray
  place_B: np.ndarray
  shape: tuple[int, int]

  @classmethod
  def make(
      cls, size_B: np.ndarray, rows: Rows, shape: tuple[int, int]
  ) -> _Moves:
    """For the first `size_B` entries of each old row that `rows` names."""
    first_B, place_B, new_B = np.zeros((3, len(size_B)), np.int32)
    for row, items in enumerate(rows):
      items = np.asarray(items)
      new_B[items] = row
      place_B[items] = np.arange(1, len(items) + 1)
      first_B[items] = np.cumsum(size_B[items]) - size_B[items]
    used = np.concatenate([np.asarray(items) for items in rows])
    old = np.repeat(used, size_B[used])
    column = np.concatenate([np.arange(size_B[item]) for item in used])
    target = (new_B[old], first_B[old] + column)
    return cls((old, column), target, first_B, place_B, shape)

  def __call__(self, x: np.ndarray) -> np.ndarray:
    """The entries of `x` at their new places, zeros elsewhere; read-only."""
    x = np.asarray(x)
    out = np.zeros(self.shape, x.dtype)
    out[self.target] = x[self.source]
    out.flags.writeable = False
    return out
