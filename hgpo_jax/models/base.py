"""What a language model is to the sampler and the learner."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from typing import Any, Protocol

import jax

Params = Any  # A pytree of arrays: nested dicts, layers stacked on axis 0.


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Shape of a Qwen2-family decoder; field by field from `config.json`."""

  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rope_theta: float = 1_000_000.0
  rms_norm_eps: float = 1e-6
  tie_word_embeddings: bool = False
  max_position_embeddings: int = 32_768


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
  """Keys and values of every layer; entry i of a row belongs to its token i.

  A cache does not know how long its rows are: whoever holds it does, and what
  stands past the end of a row is overwritten before it is attended to. Layers
  are apart because a decode loop updates and reads separate arrays in place,
  but copies slices of a stacked one. Keys have entries last, so that both
  products of attention are plain matrix products, and stand in tiles of some
  entries, see `cache_rows`.

  Attributes:
    k: L arrays [S, K, T, h, E]: rows, key/value heads, tiles, head dimension,
      entries of a tile.
    v: L arrays [S, K, A, h], A = T * E entries.
  """

  k: tuple[jax.Array, ...]
  v: tuple[jax.Array, ...]


class LanguageModel(Protocol):
  """Pure functions over a parameter pytree."""

  config: ModelConfig

  def init(self, key: jax.Array) -> Params:
    """Random float32 parameters."""

  def hidden(
      self,
      params: Params,
      tokens_BT: jax.Array,
      positions_BT: jax.Array,
      segment_ids_BT: jax.Array,
  ) -> jax.Array:
    """Final normed hidden states [B, T, D]; causal inside each segment.

    Segment 0 is padding: nothing attends to it, its output is finite.
    """

  def logits(self, params: Params, hidden: jax.Array) -> jax.Array:
    """Float32 logits [..., V] of hidden states [..., D]."""

  def embeddings(self, params: Params) -> jax.Array:
    """The table of token embeddings, [V, D]."""

  def decode_params(self, params: Params) -> Params:
    """Parameters laid out for `extend` and `logits`; laid out ones stay."""

  def init_cache(self, rows: int, entries: int) -> KVCache:
    """A cache of zeros with `entries` entries in each row."""

  def extend(
      self,
      params: Params,
      cache: KVCache,
      tokens_NC: jax.Array,
      start_N: jax.Array,
      row_N: jax.Array | None = None,
  ) -> tuple[jax.Array, KVCache]:
    """Runs N blocks of C tokens, each at the end of what its row holds.

    Token c of block n goes to entry start_n + c of row row_n and attends to
    the entries up to its own, those of other blocks of its row included.
    Prefill runs blocks of prompts, several of them a row if need be; decoding
    runs one token of each row (C = 1).

    Where the mesh in force splits the rows of the cache into shares, the blocks
    of `row_N` are as many equal parts, and those of a part are for rows of one
    share: nothing of the cache goes from one share to another. What fills up a
    part starts past the last entry.

    Args:
      params: best from `decode_params`.
      cache: what the rows hold.
      tokens_NC: ids; what pads a block at its end disturbs nothing before it.
      start_N: entry of the first token of each block.
      row_N: row of each block; None for the first N rows in their order.

    Returns:
      (final normed hidden states [N, C, D], cache). A token past the last
      entry, or for a row of another share, is not written, and its hidden
      state is NaN.

    Raises:
      ValueError: the shares do not divide N.
    """

  def logical_axes(self) -> Any:
    """The parameter tree with a tuple of logical axes at each leaf."""

  def decode_axes(self) -> Any:
    """The same for the tree that `decode_params` makes."""

  def axis_sizes(self) -> Mapping[str, int]:
    """Sizes of the logical axes that a mesh has to divide."""
