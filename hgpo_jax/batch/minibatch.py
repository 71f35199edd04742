"""The rows of an iteration cut into minibatches of few, fixed shapes."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses

import numpy as np

from hgpo_jax import config
from hgpo_jax import types
from hgpo_jax.batch import pack
from hgpo_jax.batch import packing as packing_lib

_CHOICES = {'packing': ('none', 'pack'), 'no_signal': ('keep', 'drop')}


@config.configurable
@dataclasses.dataclass(frozen=True)
class Minibatches:
  """How the steps of one iteration become optimizer updates.

  Attributes:
    minibatch_steps: most steps of one optimizer update.
    micro_batch_steps: rows of one forward and backward pass, for each of the
      data-parallel shares (mesh axes data x fsdp); bounds the memory. A row is
      a step, or several with `packing`.
    epochs: passes over the steps of an iteration.
    shuffle: whether each epoch takes the steps in a new order.
    length_buckets: lengths T that rows are padded to; each is one compilation.
    response_buckets: the same for the number R of response tokens.
    packing: 'none': a row holds one step. 'pack': rows are filled with whole
      steps by first-fit-decreasing, up to one of `length_buckets` tokens and
      the last of `response_buckets` response tokens. It changes neither loss
      nor gradient, only the padding that is computed.
    logits_tokens: response tokens whose logits, [tokens, vocabulary], are held
      at once, for each of the data-parallel shares; bounds the memory.
    no_signal: what becomes of steps whose advantage is exactly 0, such as
      those of groups with equal outcomes. 'keep': entropy and KL still act on
      them, as in the canonical objective. 'drop': they are left out before
      anything is computed, as if never sampled.
  """

  minibatch_steps: int = 256
  micro_batch_steps: int = 32
  epochs: int = 1
  shuffle: bool = True
  length_buckets: tuple[int, ...] = (1024, 1536, 2048, 2560)
  response_buckets: tuple[int, ...] = (512,)
  packing: str = 'none'
  logits_tokens: int = 1024
  no_signal: str = 'keep'

  def check(
      self, data_parallel: int, max_prompt_tokens: int, max_new_tokens: int
  ) -> None:
    """Raises ValueError that names the knob if the numbers do not fit."""
    for knob in (
        'minibatch_steps',
        'micro_batch_steps',
        'epochs',
        'logits_tokens',
    ):
      if getattr(self, knob) < 1:
        raise ValueError(
            f'Minibatches.{knob}={getattr(self, knob)}; expected at least 1.'
        )
    for knob, choices in _CHOICES.items():
      if getattr(self, knob) not in choices:
        raise ValueError(
            f'Minibatches.{knob}={getattr(self, knob)!r}; expected one of'
            f' {choices}.'
        )
    rows = self.micro_batch_rows(data_parallel)
    if self.packing == 'none' and self.minibatch_steps % rows:
      raise ValueError(
          f'Minibatches.minibatch_steps={self.minibatch_steps} is not a '
          f'multiple of the {rows} rows of one pass (micro_batch_steps='
          f'{self.micro_batch_steps} x {data_parallel} data-parallel shares '
          'of the mesh); change minibatch_steps, micro_batch_steps or '
          'Mesh.data and Mesh.fsdp.'
      )
    longest = max_prompt_tokens + max_new_tokens
    pack.check_buckets(
        'Minibatches.length_buckets', self.length_buckets, longest
    )
    pack.check_buckets(
        'Minibatches.response_buckets', self.response_buckets, max_new_tokens
    )

  def micro_batch_rows(self, data_parallel: int) -> int:
    """Rows of one forward and backward pass over the whole mesh."""
    return self.micro_batch_steps * data_parallel

  def trained(self, advantage_N: np.ndarray) -> np.ndarray:
    """Indices of the steps that are trained on."""
    if self.no_signal == 'keep':
      return np.arange(len(advantage_N))
    return np.flatnonzero(advantage_N)

  def count(self, steps: int) -> int:
    """Number of minibatches that `steps` make in one epoch."""
    return -(-steps // self.minibatch_steps)


def policy_batch(
    rollout: types.RolloutBatch,
    advantage_N: np.ndarray,
    old_logprobs_BR: np.ndarray,
    ref_logprobs_BR: np.ndarray | None = None,
) -> types.PolicyBatch:
  """Spreads one advantage a step over the tokens of the step; 0 elsewhere."""
  advantage_BR = np.where(
      rollout.action_mask_BR, np.asarray(advantage_N)[rollout.step_BR], 0.0
  ).astype(np.float32)
  advantage_BR.flags.writeable = False
  return types.PolicyBatch(
      rollout, advantage_BR, old_logprobs_BR, ref_logprobs_BR
  )


def split(
    batch: types.PolicyBatch,
    spec: Minibatches,
    *,
    seed: int,
    iteration: int,
    epoch: int,
    rows: int,
) -> Iterator[list[types.PolicyBatch]]:
  """Yields the minibatches of one epoch, each as its micro-batches.

  `batch` has one step a row, and every real one is in exactly one minibatch.
  They are dealt out evenly, so that no update rests on a short rest, in an
  order that is a pure function of (seed, iteration, epoch): packed or not, a
  minibatch has the same steps. A micro-batch has `rows` rows of similar length.
  """
  rows_N = np.flatnonzero(batch.rollout.row_weight_B > 0)
  if spec.shuffle:
    key = np.random.SeedSequence([seed, iteration, epoch])
    rows_N = np.random.default_rng(key).permutation(rows_N)
  for part in np.array_split(rows_N, spec.count(len(rows_N))):
    yield [
        layout.policy(batch)
        if layout is not None
        else take(batch, some, rows, spec)
        for some, layout in _passes(batch.rollout, part, rows, spec)
    ]


def by_length(
    batch: types.RolloutBatch, spec: Minibatches, rows: int
) -> Iterator[tuple[np.ndarray, types.RolloutBatch]]:
  """Yields (row indices, those rows): `rows` rows of similar length at a time.

  For passes over all rows whose order does not matter, such as scoring. With
  packing there are more indices than rows, in the order of their segments.
  """
  real_N = np.flatnonzero(batch.row_weight_B > 0)
  for part, layout in _passes(batch, real_N, rows, spec):
    if layout is None:
      yield part, _take_rollout(batch, part, rows, spec)
    else:
      yield part, layout.rollout(batch)


def _passes(
    batch: types.RolloutBatch, rows_N: np.ndarray, rows: int, spec: Minibatches
) -> Iterator[tuple[np.ndarray, packing_lib.Layout | None]]:
  """Cuts steps, a row of `batch` each, into passes of `rows` rows.

  The longest come first: so short rows are not padded to the longest, and too
  little memory shows in the first pass.

  Yields:
    The rows of `batch` in a pass, and how they are packed; None if not.
  """
  sizes_N2 = packing_lib.sizes(batch)[rows_N]
  if spec.packing == 'none':
    order_N = rows_N[np.argsort(-sizes_N2[:, 0], kind='stable')]
    for start in range(0, len(order_N), rows):
      yield order_N[start : start + rows], None
    return
  lengths, responses = spec.length_buckets, spec.response_buckets
  for some in packing_lib.fewest_tokens(sizes_N2, lengths, responses, rows):
    used = np.array([sizes_N2[items].sum(axis=0) for items in some]).max(axis=0)
    shape = (
        rows,
        pack.bucket('length_buckets', lengths, used[0]),
        pack.bucket('response_buckets', responses, used[1]),
    )
    packed = [rows_N[items] for items in some]
    layout = packing_lib.Layout.make(batch, packed, shape)
    yield np.concatenate(packed), layout


def take(
    batch: types.PolicyBatch, rows: np.ndarray, size: int, spec: Minibatches
) -> types.PolicyBatch:
  """The given rows, then rows of weight 0 up to `size`.

  T and R are the first buckets that hold the longest of them.
  """
  rollout = _take_rollout(batch.rollout, rows, size, spec)
  response = rollout.target_BR.shape[1]
  cut = lambda x: None if x is None else _rows(x, rows, size, response)
  return types.PolicyBatch(
      rollout,
      cut(batch.advantage_BR),
      cut(batch.old_logprobs_BR),
      cut(batch.ref_logprobs_BR),
  )


def _take_rollout(
    batch: types.RolloutBatch, rows: np.ndarray, size: int, spec: Minibatches
) -> types.RolloutBatch:
  length = _width(batch.segment_ids_BT[rows] > 0)
  response = _width(batch.action_mask_BR[rows])
  length = pack.bucket('length_buckets', spec.length_buckets, length)
  response = pack.bucket('response_buckets', spec.response_buckets, response)
  widths = {'BT': length, 'BR': response, 'B': None}
  parts = {}
  for field in dataclasses.fields(batch):
    width = widths[field.name.rsplit('_', 1)[1]]
    parts[field.name] = _rows(getattr(batch, field.name), rows, size, width)
  return types.RolloutBatch(**parts)


def _width(used: np.ndarray) -> int:
  """Columns up to the last one that any row uses."""
  columns = np.flatnonzero(used.any(axis=0))
  return int(columns[-1]) + 1 if len(columns) else 0


def _rows(
    x: np.ndarray, rows: np.ndarray, size: int, width: int | None
) -> np.ndarray:
  """`x[rows]`, cut or filled with zeros to `size` rows and `width` columns."""
  x = np.asarray(x)[rows]
  shape = (size,) if width is None else (size, width)
  out = np.zeros(shape, x.dtype)
  if width is None:
    out[: len(rows)] = x
  else:
    columns = min(width, x.shape[1])
    out[: len(rows), :columns] = x[:, :columns]
  out.flags.writeable = False
  return out
