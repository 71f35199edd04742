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
  """Keys and values of every layer, and which entries may be attended to.

  Every leaf has rows on axis 0, so rows are picked, repeated or merged with
  `jax.tree.map`. Layers are apart because a decode loop updates and reads
  separate arrays in place, but copies slices of a stacked one.

  Attributes:
    k: L arrays [B, K, S, H'] where H' is the head dimension.
    v: L arrays [B, K, S, H'].
    valid_BS: bool, entries that hold a real token.
  """

  k: tuple[jax.Array, ...]
  v: tuple[jax.Array, ...]
  valid_BS: jax.Array


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
    """Parameters laid out for `extend` and `logits`, to decode faster with."""

  def init_cache(self, batch: int, length: int) -> KVCache:
    """An empty cache of `length` entries a row."""

  def extend(
      self,
      params: Params,
      cache: KVCache,
      tokens_BT: jax.Array,
      positions_BT: jax.Array,
      valid_BT: jax.Array,
      start: jax.Array | int,
  ) -> tuple[jax.Array, KVCache]:
    """Runs T more tokens, written to cache entries start..start+T-1.

    Used for prefill (T = prompt bucket, left-padded with valid False) and
    decode (T = 1). Returns (hidden [B, T, D], cache).
    """

  def logical_axes(self) -> Any:
    """The parameter tree with a tuple of logical axes at each leaf."""

  def axis_sizes(self) -> Mapping[str, int]:
    """Sizes of the logical axes that a mesh has to divide."""
