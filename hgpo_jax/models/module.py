"""The Qwen2 model as a flax NNX module: to construct, load and inspect.

Training and sampling run on `params()`, a plain pytree; the module is the
face towards people and towards tools that expect NNX.
"""

from __future__ import annotations

import os
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from hgpo_jax.models import base
from hgpo_jax.models import hf
from hgpo_jax.models import qwen2


class _Group(nnx.Module):
  """One level of the parameter tree; leaves are `nnx.Param`."""

  def __init__(self, params: base.Params):
    for name, value in params.items():
      leaf = not isinstance(value, dict)
      setattr(self, name, nnx.Param(value) if leaf else _Group(value))


class Qwen2Module(_Group):
  """A Qwen2 model that owns its parameters.

  `module.layers.mlp.gate.kernel[...]` is the stacked [L, D, F] parameter;
  `nnx.split(module)`, `nnx.display(module)` and `nnx.state(module)` work.
  """

  def __init__(
      self,
      model: qwen2.Qwen2,
      params: base.Params | None = None,
      *,
      rngs: nnx.Rngs | None = None,
  ):
    """Takes `params`, or draws them from `rngs`; exactly one is given."""
    if (params is None) == (rngs is None):
      raise ValueError(
          'Qwen2Module takes either params or rngs; give exactly one.'
      )
    super().__init__(model.init(rngs.params()) if params is None else params)
    self.model = model

  @classmethod
  def from_pretrained(
      cls,
      folder: str | os.PathLike[str],
      compute_dtype: Any = jnp.float32,
  ) -> Qwen2Module:
    """The model in a Hugging Face folder, with float32 parameters."""
    config = hf.read_config(folder)
    params = jax.tree.map(jnp.asarray, hf.load_params(folder, config))
    return cls(qwen2.Qwen2(config, compute_dtype=compute_dtype), params)

  def params(self) -> base.Params:
    """The parameters as nested dicts of arrays, for the pure functions."""
    return nnx.to_pure_dict(nnx.state(self, nnx.Param))

  def __call__(
      self, tokens_BT: jax.Array, valid_BT: jax.Array | None = None
  ) -> jax.Array:
    """Float32 logits [B, T, V]; rows may be padded on either side."""
    if valid_BT is None:
      valid_BT = jnp.ones(tokens_BT.shape, bool)
    position_BT = jnp.maximum(jnp.cumsum(valid_BT, axis=1) - 1, 0)
    params = self.params()
    hidden_BTD = self.model.hidden(
        params, tokens_BT, position_BT, valid_BT.astype(jnp.int32)
    )
    return self.model.logits(params, hidden_BTD)
