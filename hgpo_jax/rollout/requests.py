"""What the engine is asked for, what it answers, and the rows in between."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
import dataclasses
import hashlib
from typing import Protocol

import numpy as np

from hgpo_jax.rollout import draw as draw_lib
from hgpo_jax.rollout import programs as programs_lib


class AdmissibleError(ValueError):
  """There are more, or longer, admissible responses than there is room for."""


@dataclasses.dataclass(frozen=True)
class Request:
  """A prompt, and how its response is sampled.

  Attributes:
    prompt: int32 ids, at least one.
    key: integers that name the response; with the prompt and the rules they
      are all that its tokens depend on.
    temperature: 0 is greedy.
    max_new_tokens: length limit of the response.
    top_k: see `draw.Rules`.
    top_p: see `draw.Rules`.
    min_p: see `draw.Rules`.
    session: whose prompt this is; the next one of the same session finds what
      this one left in the cache, until `Engine.release`.
    admissible: id sequences, each with its stop id at the end, of which the
      response will be one; None for any response.
  """

  prompt: np.ndarray
  key: Sequence[int]
  temperature: float
  max_new_tokens: int
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  session: Hashable | None = None
  admissible: Sequence[Sequence[int]] | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
  """One response.

  Attributes:
    ids: int32 [response length], the stop token included; read-only.
    logprobs: float32 [response length], log-probability of each id in the
      distribution that it was sampled from, or of the model where temperature
      was 0; read-only.
    finish_reason: `types.STOP` or `types.LENGTH`.
    model_logprobs: float32 [response length], the same at temperature 1 among
      all tokens; read-only.
  """

  ids: np.ndarray
  logprobs: np.ndarray
  finish_reason: str
  model_logprobs: np.ndarray


def empty_rows(
    count: int, admissible: tuple[int, int] = (0, 0)
) -> programs_lib.Rows:
  """Rows none of which is live, on the host."""
  ints = lambda: np.zeros(count, np.int32)
  bound = {}
  if admissible[0]:
    bound = {
        'admissible_BCL': np.full((count, *admissible), -1, np.int32),
        'open_BC': np.zeros((count, admissible[0]), bool),
        'bound_B': np.zeros(count, bool),
    }
  return programs_lib.Rows(
      token_B=ints(),
      length_B=ints(),
      drawn_B=ints(),
      limit_B=ints(),
      live_B=np.zeros(count, bool),
      key_B2=np.zeros((count, 2), np.uint32),
      rules=draw_lib.Rules(
          temperature_B=np.ones(count, np.float32),
          top_k_B=ints(),
          top_p_B=np.ones(count, np.float32),
          min_p_B=np.zeros(count, np.float32),
      ),
      **bound,
  )


def fill(rows: programs_lib.Rows, slot: int, request: Request) -> None:
  """Puts a request, the prompt of which is in the cache, into its row."""
  rows.token_B[slot] = request.prompt[-1]
  rows.length_B[slot] = len(request.prompt) - 1
  rows.drawn_B[slot] = 0
  rows.limit_B[slot] = request.max_new_tokens
  rows.live_B[slot] = True
  rows.key_B2[slot] = _key(request.key)
  for values_B, value in zip(
      rows.rules,
      (request.temperature, request.top_k, request.top_p, request.min_p),
  ):
    values_B[slot] = value
  if rows.admissible_BCL is not None:
    _bind(rows, slot, request.admissible or ())


def needed(request: Request) -> int:
  """Entries that a request fills: its last token is never fed back."""
  return len(request.prompt) + request.max_new_tokens - 1


def _key(numbers: Sequence[int]) -> np.ndarray:
  """Two uint32 that integers below 2**32 stand for."""
  data = np.asarray(numbers, '<u4').tobytes()
  return np.frombuffer(hashlib.blake2b(data, digest_size=8).digest(), '<u4')


def _bind(
    rows: programs_lib.Rows, slot: int, sequences: Sequence[Sequence[int]]
) -> None:
  """Lets the response of a row be one of some sequences, if there are any."""
  rows.admissible_BCL[slot] = -1
  for i, sequence in enumerate(sequences):
    rows.admissible_BCL[slot, i, : len(sequence)] = sequence
  rows.open_BC[slot] = np.arange(rows.open_BC.shape[1]) < len(sequences)
  rows.bound_B[slot] = bool(sequences)


class Limits(Protocol):
  """The part of `sampler.Sampler` that bounds a request."""

  max_new_tokens: int
  prompt_buckets: Sequence[int]
  admissible: tuple[int, int]


def check(
    request: Request, limits: Limits, stop_ids: Sequence[int], vocab: int
) -> None:
  """Refuses what does not fit into the cache, or makes no sense.

  Raises:
    ValueError: naming the knob.
  """
  length, new = len(request.prompt), request.max_new_tokens
  longest = limits.prompt_buckets[-1]
  if length < 1:
    raise ValueError('the prompt is empty; expected at least one token')
  if length > longest:
    raise ValueError(
        f'a prompt has {length} tokens, more than the last of '
        f'Sampler.prompt_buckets={limits.prompt_buckets}; add a larger '
        'bucket or lower Collector.max_prompt_tokens'
    )
  room = longest + limits.max_new_tokens
  if new < 1 or length + new > room:
    raise ValueError(
        f'a prompt of {length} tokens and a response of max_new_tokens={new}'
        f' make {length + new}, and the cache has room for {room}: the last of'
        f' Sampler.prompt_buckets ({longest}) and Sampler.max_new_tokens'
        f' ({limits.max_new_tokens}); raise one of them'
    )
  keys = np.asarray(request.key)
  if keys.size and (keys.min() < 0 or keys.max() >= 2**32):
    raise ValueError(
        f'row_keys lie in {keys.min()}..{keys.max()}; expected 0..2**32-1; '
        'check the seed'
    )
  temperature = request.temperature
  if not (np.isfinite(temperature) and temperature >= 0):
    raise ValueError(
        f'temperature is {temperature}; expected 0 (greedy) or more'
    )
  check_filters(request, '')
  _check_admissible(request, limits, stop_ids, vocab)


def check_filters(rules: Request | Limits, owner: str) -> None:
  """Refuses filters that would leave no token, or mean nothing."""
  top_k, top_p, min_p = rules.top_k, rules.top_p, rules.min_p
  if not 0 <= top_k < 2**31 or not 0 < top_p <= 1 or not 0 <= min_p <= 1:
    raise ValueError(
        f'{owner}top_k, top_p and min_p are {top_k}, {top_p} and {min_p};'
        ' expected 0 <= top_k < 2**31, 0 < top_p <= 1 and 0 <= min_p <= 1'
    )


def _check_admissible(
    request: Request, limits: Limits, stop_ids: Sequence[int], vocab: int
) -> None:
  if request.admissible is None:
    return
  count, longest = limits.admissible
  sizes = [len(sequence) for sequence in request.admissible]
  most = min(longest, request.max_new_tokens)
  if not 0 < len(sizes) <= count or max(sizes) > most:
    raise AdmissibleError(
        f'{len(sizes)} admissible sequences of up to {max(sizes, default=0)}'
        f' tokens; expected 1 to {count} of up to {most}: raise'
        f' Sampler.admissible={limits.admissible} or Sampler.max_new_tokens'
    )
  for sequence in request.admissible:
    ends = np.isin(np.asarray(sequence), stop_ids)
    inside = all(0 <= i < vocab for i in sequence)
    if not (len(ends) and ends[-1] and not ends[:-1].any() and inside):
      raise ValueError(
          f'the admissible sequence {list(sequence)} must consist of ids below'
          f' {vocab} and end with its only stop id, one of {list(stop_ids)}'
      )
