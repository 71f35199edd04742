"""The compiled parts of the engine: few programs, all of fixed shapes."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.models import base
from hgpo_jax.rollout import draw as draw_lib

# Fields of `Rows` that a step of decoding changes.
_MOVED = ('token_B', 'length_B', 'drawn_B', 'live_B', 'open_BC')


class Rows(NamedTuple):
  """Where each row of the cache stands, and how it is sampled.

  Attributes:
    token_B: int32, the last token, which the cache does not hold yet.
    length_B: int32, tokens that the cache holds; the entry of `token_B`.
    drawn_B: int32, tokens of the response so far.
    limit_B: int32, tokens of the response at most.
    live_B: bool, whether the response goes on.
    key_B2: uint32, numbers of the row's random key.
    rules: how the row is sampled.
    admissible_BCL: int32, sequences of which the response is one, filled up
      with -1; None where no row is bound to any.
    open_BC: bool, those of them that begin as the response does.
    bound_B: bool, rows that are bound to their sequences.
  """

  token_B: jax.Array
  length_B: jax.Array
  drawn_B: jax.Array
  limit_B: jax.Array
  live_B: jax.Array
  key_B2: jax.Array
  rules: draw_lib.Rules
  admissible_BCL: jax.Array | None = None
  open_BC: jax.Array | None = None
  bound_B: jax.Array | None = None


class Chunk(NamedTuple):
  """What some steps of decoding drew; token i of a row is in column i.

  Attributes:
    ids_BK: int32.
    logprobs_BK: float32, see `draw.Drawn`.
    model_logprobs_BK: float32, see `draw.Drawn`.
    moved: the fields of `Rows` that decoding changes, as they are now.
    steps: how many steps were run.
  """

  ids_BK: jax.Array
  logprobs_BK: jax.Array
  model_logprobs_BK: jax.Array
  moved: dict[str, jax.Array]
  steps: jax.Array


def prefill(
    model: base.LanguageModel,
    params: base.Params,
    cache: base.KVCache,
    tokens_NC: jax.Array,
    start_N: jax.Array,
    row_N: jax.Array,
) -> base.KVCache:
  """The cache with N blocks of prompts in it."""
  return model.extend(params, cache, tokens_NC, start_N, row_N)[1]


def copy(
    cache: base.KVCache, source_R: jax.Array, target_R: jax.Array
) -> base.KVCache:
  """The cache with whole rows copied; all are read before one is written."""
  return jax.tree.map(lambda x: x.at[target_R].set(x[source_R]), cache)


def decode(
    model: base.LanguageModel,
    params: base.Params,
    cache: base.KVCache,
    rows: Rows,
    stop_ids: np.ndarray,
    steps: int,
) -> tuple[base.KVCache, Chunk]:
  """Up to `steps` tokens of the live rows; ends when none is live.

  Token t of a response is drawn with the number that the row's key, folded
  with t, gives: nothing else in the batch has a part in it. Rows that are not
  live compute too, and write past their end, where nobody reads.
  """
  count = rows.token_B.shape[0]
  floats_BK = jnp.zeros((count, steps), jnp.float32)
  chunk = Chunk(
      jnp.zeros((count, steps), jnp.int32),
      floats_BK,
      floats_BK,
      {name: x for name in _MOVED if (x := getattr(rows, name)) is not None},
      jnp.zeros((), jnp.int32),
  )

  def goes_on(state):
    return (state[1].steps < steps) & state[1].moved['live_B'].any()

  def step(state):
    cache, chunk = state
    now = rows._replace(**chunk.moved)
    hidden, cache = model.extend(
        params, cache, now.token_B[:, None], now.length_B
    )
    drawn = draw_lib.draw(
        model.logits(params, hidden[:, 0]),
        _uniform(now),
        now.rules,
        _allowed(now, model.config.vocab_size),
    )
    return cache, _append(chunk, now, drawn, stop_ids)

  return jax.lax.while_loop(goes_on, step, (cache, chunk))


def _uniform(rows: Rows) -> jax.Array:
  def one(key_2, place):
    key = jax.random.fold_in(jax.random.wrap_key_data(key_2), place)
    return jax.random.uniform(key)

  return jax.vmap(one)(rows.key_B2, rows.drawn_B)


def _next_BC(rows: Rows) -> jax.Array:
  """The next token of each admissible sequence; -1 past its end."""
  longest = rows.admissible_BCL.shape[2]
  place_B11 = jnp.minimum(rows.drawn_B, longest - 1)[:, None, None]
  return jnp.take_along_axis(rows.admissible_BCL, place_B11, 2)[:, :, 0]


def _allowed(rows: Rows, vocab: int) -> jax.Array | None:
  """Tokens that keep the response among its admissible sequences."""
  if rows.admissible_BCL is None:
    return None
  next_BC = _next_BC(rows)
  row_B1 = jnp.arange(len(next_BC))[:, None]
  column_BC = jnp.where(rows.open_BC & (next_BC >= 0), next_BC, vocab)
  allowed_BV = jnp.zeros((len(next_BC), vocab), bool)
  allowed_BV = allowed_BV.at[row_B1, column_BC].set(True, mode='drop')
  # A dead row may have no way to go on, and must be able to draw something.
  return allowed_BV | ~(rows.bound_B & rows.live_B)[:, None]


def _append(
    chunk: Chunk, rows: Rows, drawn: draw_lib.Drawn, stop_ids: np.ndarray
) -> Chunk:
  """The chunk after one more step; rows that are not live stay as they are."""
  column = chunk.steps
  put = lambda table, x_B: jax.lax.dynamic_update_slice_in_dim(
      table, jnp.where(rows.live_B, x_B, 0)[:, None], column, axis=1
  )
  token_B = jnp.where(rows.live_B, drawn.token_B, rows.token_B)
  drawn_B = rows.drawn_B + rows.live_B
  ended_B = (token_B[:, None] == stop_ids).any(axis=1)
  ended_B |= drawn_B >= rows.limit_B
  moved = {
      'token_B': token_B,
      'length_B': rows.length_B + rows.live_B,
      'drawn_B': drawn_B,
      'live_B': rows.live_B & ~ended_B,
  }
  if rows.open_BC is not None:
    follows_BC = _next_BC(rows) == token_B[:, None]
    moved['open_BC'] = rows.open_BC & (follows_BC | ~rows.live_B[:, None])
  return Chunk(
      ids_BK=put(chunk.ids_BK, drawn.token_B),
      logprobs_BK=put(chunk.logprobs_BK, drawn.logprob_B),
      model_logprobs_BK=put(chunk.model_logprobs_BK, drawn.model_logprob_B),
      moved=moved,
      steps=column + 1,
  )
