"""Qwen2 / Qwen2.5 decoder as pure functions over a parameter pytree.

Parameters are nested dicts with layers stacked on axis 0; kernels are
[in, out] (the transpose of the Hugging Face layout). The arithmetic follows
transformers' `Qwen2ForCausalLM` and equals it to 1e-5 in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from hgpo_jax import sharding
from hgpo_jax.models import attention
from hgpo_jax.models import base
from hgpo_jax.models import blockwise
from hgpo_jax.models import layers
from hgpo_jax.models import lora
from hgpo_jax.models import qwen2_cached
from hgpo_jax.models import qwen2_params

_ATTENDED = jax.checkpoint_policies.save_only_these_names(blockwise.RESIDUALS)
# Attends from queries to keys and values: (q_BTHh, k_BTKh, v_BTKh) -> BTHh.
_Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Qwen2:
  """The language model of a config; implements `base.LanguageModel`.

  Attributes:
    config: shapes.
    remat: recompute each layer in the backward pass of `hidden` rather than
      keep its activations.
    compute_dtype: dtype of activations and of the kernels where they are
      used; norms, softmax and logits stay in float32.
    attention: kernel of `hidden`, one of `attention.KERNELS`.
    keep_attention: with `remat`, keep what attention gave rather than attend
      again: an array [B, T, H h] a layer.
    mlp_parts: with `remat`, parts of rows whose MLP is computed one after the
      other, so that a layer never holds all of [B, T, F] at once.
    int8_rollout: `decode_params` keeps the kernels of layers in int8.
  """

  config: base.ModelConfig
  remat: bool = True
  compute_dtype: Any = jnp.float32
  attention: str = 'auto'
  keep_attention: bool = True
  mlp_parts: int = 1
  int8_rollout: bool = False

  def init(self, key: jax.Array) -> base.Params:
    """Float32 parameters: normal(0.02) kernels, unit norms, zero biases."""
    return qwen2_params.init(self.config, key)

  def logical_axes(self) -> sharding.LogicalAxes:
    """The parameter tree with a tuple of logical axes at each leaf."""
    specs = qwen2_params.specs(self.config)
    return jax.tree.map(lambda spec: spec.axes, specs)

  def axis_sizes(self) -> Mapping[str, int]:
    """Sizes that a mesh has to divide, for `sharding.check_divides`."""
    return {
        'heads': self.config.num_heads,
        'kv_heads': self.config.num_kv_heads,
        'mlp': self.config.intermediate_size,
        'vocab': self.config.vocab_size,
        'embed': self.config.hidden_size,
    }

  def hidden(
      self,
      params: base.Params,
      tokens_BT: jax.Array,
      positions_BT: jax.Array,
      segment_ids_BT: jax.Array,
  ) -> jax.Array:
    """Final normed hidden states [B, T, D]; causal inside each segment.

    Segment 0 is padding: no other segment attends to it, its output is finite.
    """
    rotary = layers.rotary_angles(self.config, positions_BT)

    def attend(q, k, v):
      return attention.attention(q, k, v, segment_ids_BT, self.attention)

    def body(x_BTD, layer):
      return self._block(layer, x_BTD, rotary, attend), None

    if self.remat:
      body = jax.checkpoint(body, policy=self._kept)
    x_BTD = self._embed(params, tokens_BT)
    x_BTD, _ = jax.lax.scan(body, x_BTD, params['layers'])
    return self._final_norm(params, x_BTD)

  def logits(self, params: base.Params, hidden: jax.Array) -> jax.Array:
    """Float32 logits [..., V] of hidden states [..., D]."""
    if self.config.tie_word_embeddings:
      kernel_DV = self.embeddings(params).T
    else:
      kernel_DV = params['head']['kernel']
    logits = jnp.matmul(
        hidden.astype(self.compute_dtype),
        kernel_DV.astype(self.compute_dtype),
        precision=self._precision,
        preferred_element_type=jnp.float32,
    )
    between = (None,) * (hidden.ndim - 2)
    return sharding.constrain(logits, 'batch', *between, 'vocab')

  def init_cache(self, rows: int, entries: int) -> base.KVCache:
    """A cache of zeros with `entries` entries in each row."""
    return qwen2_cached.init_cache(
        self.config, rows, entries, self.compute_dtype
    )

  def embeddings(self, params: base.Params) -> jax.Array:
    return params['embed']['embedding']

  def decode_params(self, params: base.Params) -> base.Params:
    """Parameters laid out for `extend`, in the compute dtype.

    Attached adapters are merged into the kernels. `extend` and `logits` take
    either layout, but lay out the other one anew in every call; `hidden` needs
    the stacked one.
    """
    return qwen2_cached.decode_params(
        params, self.config, self.compute_dtype, self.int8_rollout
    )

  def extend(
      self,
      params: base.Params,
      cache: base.KVCache,
      tokens_NC: jax.Array,
      start_N: jax.Array,
      row_N: jax.Array | None = None,
  ) -> tuple[jax.Array, base.KVCache]:
    """See `base.LanguageModel.extend`."""
    return qwen2_cached.extend(
        self.decode_params(params),
        self.config,
        self.compute_dtype,
        cache,
        tokens_NC,
        start_N,
        row_N,
    )

  @property
  def _kept(self) -> Callable[..., bool] | None:
    return _ATTENDED if self.keep_attention else None

  @property
  def _precision(self) -> jax.lax.Precision | None:
    # Accelerators multiply float32 in fewer bits unless told otherwise.
    exact = jnp.dtype(self.compute_dtype) == jnp.float32
    return jax.lax.Precision.HIGHEST if exact else None

  def _embed(self, params: base.Params, tokens_BT: jax.Array) -> jax.Array:
    x_BTD = self.embeddings(params)[tokens_BT]
    return _constrain_residual(x_BTD.astype(self.compute_dtype))

  def _final_norm(self, params: base.Params, x_BTD: jax.Array) -> jax.Array:
    scale = params['final_norm']['scale']
    return layers.rms_norm(x_BTD, scale, self.config.rms_norm_eps)

  def _dense(self, params: Mapping[str, jax.Array], x: jax.Array) -> jax.Array:
    y = layers.project(x, params['kernel'].astype(x.dtype), self._precision)
    y = lora.add(params, x, y, self._precision)
    return y + params['bias'].astype(x.dtype) if 'bias' in params else y

  def _block(
      self,
      layer: base.Params,
      x_BTD: jax.Array,
      rotary: tuple[jax.Array, jax.Array],
      attend: _Attend,
  ) -> jax.Array:
    """One decoder layer: x + attention(norm(x)), then x + mlp(norm(x))."""
    config, batch_time = self.config, x_BTD.shape[:2]
    norm_BTD = layers.rms_norm(
        x_BTD, layer['attention_norm']['scale'], config.rms_norm_eps
    )
    q, k, v = (
        self._dense(layer['attention'][name], norm_BTD).reshape(
            *batch_time, -1, config.head_dim
        )
        for name in 'qkv'
    )
    q, k = layers.rotate(q, rotary), layers.rotate(k, rotary)
    out = attend(q, k, v).reshape(*batch_time, -1)
    x_BTD = x_BTD + self._dense(layer['attention']['o'], out)
    parts = self.mlp_parts if self.remat else 1
    x_BTD = layers.in_parts(lambda x: self._mlp(layer, x), x_BTD, parts)
    return _constrain_residual(x_BTD)

  def _mlp(self, layer: base.Params, x_BTD: jax.Array) -> jax.Array:
    norm_BTD = layers.rms_norm(
        x_BTD, layer['mlp_norm']['scale'], self.config.rms_norm_eps
    )
    gate_BTF = jax.nn.silu(self._dense(layer['mlp']['gate'], norm_BTD))
    up_BTF = self._dense(layer['mlp']['up'], norm_BTD)
    return x_BTD + self._dense(layer['mlp']['down'], gate_BTF * up_BTF)


def _constrain_residual(x_BTD: jax.Array) -> jax.Array:
  return sharding.constrain(x_BTD, 'batch', 'sequence', 'activation')
