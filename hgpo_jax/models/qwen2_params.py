"""The parameter tree of Qwen2: shapes, logical axes and initial values.

Nested dicts with layers stacked on axis 0; kernels are [in, out], the
transpose of the Hugging Face layout.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from hgpo_jax.models import base


@dataclasses.dataclass(frozen=True)
class ParamSpec:
  """Shape, logical axes and initial values of one parameter."""

  shape: tuple[int, ...]
  axes: tuple[str, ...]
  init: str  # 'normal', 'ones' or 'zeros'.


def specs(config: base.ModelConfig) -> dict[str, Any]:
  """The parameter tree of a config, with a `ParamSpec` at each leaf."""
  layers, width = config.num_layers, config.hidden_size
  q_dim = config.num_heads * config.head_dim
  kv_dim = config.num_kv_heads * config.head_dim

  def dense(n_in, n_out, axis_in, axis_out, bias=False):
    spec = {
        'kernel': ParamSpec(
            (layers, n_in, n_out), ('layers', axis_in, axis_out), 'normal'
        )
    }
    if bias:
      spec['bias'] = ParamSpec((layers, n_out), ('layers', axis_out), 'zeros')
    return spec

  def norm():
    return {'scale': ParamSpec((layers, width), ('layers', 'norm'), 'ones')}

  tree = {
      'embed': {
          'embedding': ParamSpec(
              (config.vocab_size, width), ('vocab', 'embed'), 'normal'
          )
      },
      'layers': {
          'attention_norm': norm(),
          'attention': {
              'q': dense(width, q_dim, 'embed', 'heads', bias=True),
              'k': dense(width, kv_dim, 'embed', 'kv_heads', bias=True),
              'v': dense(width, kv_dim, 'embed', 'kv_heads', bias=True),
              'o': dense(q_dim, width, 'heads', 'embed'),
          },
          'mlp_norm': norm(),
          'mlp': {
              'gate': dense(width, config.intermediate_size, 'embed', 'mlp'),
              'up': dense(width, config.intermediate_size, 'embed', 'mlp'),
              'down': dense(config.intermediate_size, width, 'mlp', 'embed'),
          },
      },
      'final_norm': {'scale': ParamSpec((width,), ('norm',), 'ones')},
  }
  if not config.tie_word_embeddings:
    tree['head'] = {
        'kernel': ParamSpec(
            (width, config.vocab_size), ('embed', 'vocab'), 'normal'
        )
    }
  return tree


def init(config: base.ModelConfig, key: jax.Array) -> base.Params:
  """Float32 parameters: normal(0.02) kernels, unit norms, zero biases."""
  leaves, treedef = jax.tree.flatten(specs(config))
  keys = jax.random.split(key, len(leaves))
  return treedef.unflatten([_initial(s, k) for s, k in zip(leaves, keys)])


def _initial(spec: ParamSpec, key: jax.Array) -> jax.Array:
  if spec.init == 'normal':
    return 0.02 * jax.random.normal(key, spec.shape, jnp.float32)
  return jnp.full(spec.shape, float(spec.init == 'ones'), jnp.float32)
