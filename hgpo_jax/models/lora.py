"""Low-rank adapters (Hu et al. 2021): W + alpha / rank * A B, with W frozen.

An adapter is a tree of its own: what is trained, and what a checkpoint holds.
Attached to the base weights it stands beside each kernel, so that the base is
held once, whether the adapter is on or off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from hgpo_jax import config
from hgpo_jax import sharding
from hgpo_jax.models import base

PROJECTIONS = ('q', 'k', 'v', 'o', 'gate', 'up', 'down')
_A, _B = 'lora_a', 'lora_b'


@config.configurable
@dataclasses.dataclass(frozen=True)
class LoRA:
  """Which kernels get an adapter, and how large it is.

  Attributes:
    rank: columns of A and rows of B.
    alpha: the product counts alpha / rank times.
    projections: kernels of each layer that get one, of `PROJECTIONS`.
    base_dtype: of the frozen weights; 'bfloat16' loses nothing if that is how
      they were published. The adapter stays in float32.
  """

  rank: int = 16
  alpha: float = 32.0
  projections: tuple[str, ...] = PROJECTIONS
  base_dtype: str = 'float32'

  def __post_init__(self):
    if self.rank < 1 or not 0.0 < self.alpha < math.inf:
      raise ValueError(
          'LoRA needs rank >= 1 and a finite alpha > 0, got'
          f' {self.rank} and {self.alpha}'
      )
    chosen = set(self.projections)
    if not chosen or chosen - set(PROJECTIONS):
      raise ValueError(
          f'LoRA.projections is {self.projections!r}; expected one or more of'
          f' {PROJECTIONS}'
      )
    if self.base_dtype not in ('float32', 'bfloat16'):
      raise ValueError(
          f"LoRA.base_dtype is {self.base_dtype!r}; expected 'float32' or"
          " 'bfloat16'"
      )

  def init(self, params: base.Params, key: jax.Array) -> base.Params:
    """A fresh adapter for `params`, of which only shapes are looked at.

    A is normal with variance 1 / inputs; B is 0, so that nothing changes yet.
    """
    keys = iter(jax.random.split(key, len(PROJECTIONS)))

    def make(kernel_LIO):
      layers, n_in, n_out = kernel_LIO.shape
      a_LIr = jax.random.normal(next(keys), (layers, n_in, self.rank))
      return {
          'a': a_LIr / math.sqrt(n_in),
          'b': jnp.zeros((layers, self.rank, n_out)),
      }

    return self._map(make, params)

  def logical_axes(self, axes: sharding.LogicalAxes) -> sharding.LogicalAxes:
    """Of the adapter, from those of the base."""
    return self._map(
        lambda x: {'a': (*x[:2], None), 'b': (x[0], None, x[2])}, axes
    )

  def attach(self, params: base.Params, adapter: base.Params) -> base.Params:
    """The base weights, shared, with the adapter beside their kernels."""
    scale = self.alpha / self.rank
    layers = dict(params['layers'])
    for group, parts in adapter.items():
      layers[group] = dict(layers[group])
      for name, low in parts.items():
        leaves = {_A: low['a'], _B: low['b'] * scale}
        layers[group][name] = {**layers[group][name], **leaves}
    return {**params, 'layers': layers}

  def _map(self, make: Callable[[Any], Any], params: base.Params) -> Any:
    """`make` of each chosen kernel: {group: {projection: made}}."""
    found = {
        group: {
            name: make(parts[name]['kernel'])
            for name in PROJECTIONS
            if name in self.projections and name in parts
        }
        for group, parts in params['layers'].items()
    }
    return {group: parts for group, parts in found.items() if parts}


@dataclasses.dataclass(frozen=True)
class Frozen:
  """Base weights with the kind of adapter that is trained on them.

  Attributes:
    spec: the kind of adapter.
    params: the base weights; the policy with the adapter off.
  """

  spec: LoRA
  params: base.Params

  def attach(self, adapter: base.Params) -> base.Params:
    """The policy with the adapter on."""
    return self.spec.attach(self.params, adapter)


def add(
    params: Mapping[str, jax.Array],
    x: jax.Array,
    y: jax.Array,
    precision: jax.lax.Precision | None = None,
) -> jax.Array:
  """y + x A B, where a projection has an adapter attached; else y."""
  if _A not in params:
    return y
  a, b = (params[name].astype(x.dtype) for name in (_A, _B))
  low = jnp.matmul(x, a, precision=precision)
  return y + jnp.matmul(low, b, precision=precision)


def merge(params: base.Params) -> base.Params:
  """Parameters with attached adapters folded into their kernels."""
  if not isinstance(params, Mapping):
    return params
  if _A not in params:
    return {name: merge(part) for name, part in params.items()}
  change = jnp.matmul(
      params[_A], params[_B], precision=jax.lax.Precision.HIGHEST
  )
  kept = {name: x for name, x in params.items() if name not in (_A, _B)}
  return {**kept, 'kernel': kept['kernel'].astype(change.dtype) + change}
