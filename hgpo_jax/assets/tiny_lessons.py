"""What the tiny policy is taught with: demonstrations, and drill in copying."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses

import numpy as np

from hgpo_jax.assets import demonstrations
from hgpo_jax.assets import tiny_tokenizer
from hgpo_jax.batch import pack
from hgpo_jax.rollout import tokenizer as tokenizer_lib

_BUCKETS = (128, 160, 224)
_DRILL_LENGTH = 96


@dataclasses.dataclass(frozen=True)
class Tokens:
  """Tokenized examples of one length bucket.

  Attributes:
    ids_BT: int32, prompt then response, 0 after the end.
    ends_B2: int32, where the prompt and where the response ends.
  """

  ids_BT: np.ndarray
  ends_B2: np.ndarray


def tokenize(
    examples: Sequence[demonstrations.Example],
    tokenizer: tokenizer_lib.ChatTokenizer,
) -> list[Tokens]:
  """Examples sorted into length buckets.

  Raises:
    ValueError: an example is longer than the last bucket.
  """
  members: dict[int, list[tuple[list[int], int]]] = {t: [] for t in _BUCKETS}
  for example in examples:
    prompt = tokenizer.chat(example.prompt)
    ids = prompt + tokenizer.encode(example.response + tokenizer_lib.IM_END)
    length = pack.bucket('tiny_lessons._BUCKETS', _BUCKETS, len(ids))
    members[length].append((ids, len(prompt)))
  result = []
  for length, rows in members.items():
    ids_BT = np.zeros((len(rows), length), np.int32)
    for i, (ids, _) in enumerate(rows):
      ids_BT[i, : len(ids)] = ids
    ends = [(prompt, len(ids)) for ids, prompt in rows]
    result.append(Tokens(ids_BT, np.asarray(ends, np.int32).reshape(-1, 2)))
  return result


def batches(
    buckets: Sequence[Tokens], rows: int, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Endless batches, each from one bucket, every pass in a new order."""
  rng = np.random.default_rng(seed)
  while True:
    order = []
    for bucket in buckets:
      chosen = rng.permutation(len(bucket.ids_BT))
      for first in range(0, len(chosen) - rows + 1, rows):
        order.append((bucket, chosen[first : first + rows]))
    if not order:
      raise ValueError(f'no bucket holds the {rows} examples of one update')
    for i in rng.permutation(len(order)):
      bucket, rows_B = order[i]
      yield bucket.ids_BT[rows_B], bucket.ends_B2[rows_B]


def drill(
    rows: int, vocab_size: int, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Endless batches of random tokens, repeated; the repeats are the response.

  Nothing but copying what followed the last time can predict them.
  """
  rng = np.random.default_rng(seed)
  while True:
    ids_BT = np.zeros((rows, _DRILL_LENGTH), np.int32)
    ends_B2 = np.full((rows, 2), _DRILL_LENGTH, np.int32)
    for row in range(rows):
      period = int(rng.integers(8, _DRILL_LENGTH // 2 + 1))
      words = rng.integers(len(tiny_tokenizer.SPECIAL), vocab_size, period)
      ids_BT[row] = np.resize(words, _DRILL_LENGTH)
      ends_B2[row, 0] = period + 1
    yield ids_BT, ends_B2
