"""The compiled part of sampling: prefill, then a loop of single tokens."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.models import base


class Responses(NamedTuple):
  """Responses of a batch.

  Attributes:
    ids_BR: int32, 0 after the end of a response.
    logprobs_BR: float32, 0 after the end of a response.
    length_B: int32, length of each response; 0 for rows without a prompt.
    steps: how many tokens the longest response has.
  """

  ids_BR: jax.Array
  logprobs_BR: jax.Array
  length_B: jax.Array
  steps: jax.Array


def sample(
    model: base.LanguageModel,
    params: base.Params,
    tokens_BT: jax.Array,
    length_B: jax.Array,
    row_keys_BK: jax.Array,
    temperature_B: jax.Array,
    stop_ids: np.ndarray,
    limit: int,
) -> Responses:
  """Decodes until every row has ended.

  Token t of a row is drawn from softmax(logits / temperature) with the key
  that folds the row's numbers and then t into key(0), so it depends on
  nothing else in the batch.

  Args:
    model: the language model.
    params: its parameters.
    tokens_BT: int32 prompts, padded on the left.
    length_B: int32 lengths of the prompts; 0 for rows added as padding.
    row_keys_BK: uint32 numbers of each row's key.
    temperature_B: float32; 0 takes the likeliest token and reports its
      log-probability at temperature 1.
    stop_ids: ids that end a response; the id is part of it.
    limit: tokens of a response at most; static.
  """
  rows, length = tokens_BT.shape
  keys_B = jax.vmap(_fold_all)(row_keys_BK)

  def draw(hidden_BD, place):
    keys = jax.vmap(jax.random.fold_in, (0, None))(keys_B, place)
    return _draw(model.logits(params, hidden_BD), keys, temperature_B)

  def is_stop(token_B):
    return (token_B[:, None] == stop_ids).any(axis=1)

  def live(state):
    return (state.place < limit) & ~state.done_B.all()

  def step(state):
    last = state.place - 1
    hidden, cache = model.extend(
        params,
        state.cache,
        jax.lax.dynamic_slice_in_dim(state.ids_BR, last, 1, axis=1),
        (length_B + last)[:, None],
        ~state.done_B[:, None],
        length + last,
    )
    token_B, logprob_B = draw(hidden[:, 0], state.place)
    return state.append(token_B, logprob_B, is_stop(token_B), cache)

  position_BT = jnp.arange(length) - (length - length_B)[:, None]
  hidden, cache = model.extend(
      params,
      # The last token is never fed back, so it needs no entry.
      model.init_cache(rows, length + limit - 1),
      tokens_BT,
      jnp.maximum(position_BT, 0),
      position_BT >= 0,
      0,
  )
  state = _State.empty(cache, rows, limit, done_B=length_B == 0)
  token_B, logprob_B = draw(hidden[:, -1], 0)
  state = state.append(token_B, logprob_B, is_stop(token_B), cache)
  state = jax.lax.while_loop(live, step, state)
  return Responses(state.ids_BR, state.logprobs_BR, state.length_B, state.place)


class _State(NamedTuple):
  """What the decoding loop carries; `place` tokens of each row are drawn."""

  cache: base.KVCache
  ids_BR: jax.Array
  logprobs_BR: jax.Array
  length_B: jax.Array
  done_B: jax.Array
  place: jax.Array

  @classmethod
  def empty(
      cls, cache: base.KVCache, rows: int, limit: int, done_B: jax.Array
  ) -> _State:
    return cls(
        cache=cache,
        ids_BR=jnp.zeros((rows, limit), jnp.int32),
        logprobs_BR=jnp.zeros((rows, limit), jnp.float32),
        length_B=jnp.zeros(rows, jnp.int32),
        done_B=done_B,
        place=jnp.zeros((), jnp.int32),
    )

  def append(
      self,
      token_B: jax.Array,
      logprob_B: jax.Array,
      stop_B: jax.Array,
      cache: base.KVCache,
  ) -> _State:
    """The state after one more token; rows that are done stay as they are."""
    put = jax.lax.dynamic_update_slice_in_dim
    token_B = jnp.where(self.done_B, 0, token_B)
    logprob_B = jnp.where(self.done_B, 0.0, logprob_B)
    return _State(
        cache=cache,
        ids_BR=put(self.ids_BR, token_B[:, None], self.place, axis=1),
        logprobs_BR=put(
            self.logprobs_BR, logprob_B[:, None], self.place, axis=1
        ),
        length_B=self.length_B + ~self.done_B,
        done_B=self.done_B | stop_B,
        place=self.place + 1,
    )


def _fold_all(numbers_K: jax.Array) -> jax.Array:
  key = jax.random.key(0)
  for number in numbers_K:
    key = jax.random.fold_in(key, number)
  return key


def _draw(
    logits_BV: jax.Array, keys_B: jax.Array, temperature_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Tokens of softmax(logits / temperature), and their log-probabilities."""
  greedy_B = temperature_B == 0
  scale_B = jnp.where(greedy_B, 1.0, temperature_B)
  scaled_BV = logits_BV.astype(jnp.float32) / scale_B[:, None]
  drawn_B = jax.vmap(jax.random.categorical)(keys_B, scaled_BV)
  token_B = jnp.where(greedy_B, scaled_BV.argmax(axis=-1), drawn_B)
  chosen_B = jnp.take_along_axis(scaled_BV, token_B[:, None], axis=1)[:, 0]
  logprob_B = chosen_B - jax.nn.logsumexp(scaled_BV, axis=-1)
  return token_B.astype(jnp.int32), logprob_B
