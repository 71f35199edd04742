"""Bytes that one device needs to sample: weights, cache, and the programs.

Weights are laid out for decoding on the sampler's mesh: split over its tensor
axis, whole on each of its data shares, kernels of layers in int8 if asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math

import jax

from hgpo_jax.models import qwen2_params
from hgpo_jax.planning import workload

_FLOAT32 = 4


@dataclasses.dataclass(frozen=True)
class Weights:
  """Bytes of the weights that are decoded with.

  Attributes:
    held: of all, on one device.
    whole: of all, on a device that has gathered its fsdp shares.
    layers: of decoder layers, gathered likewise.
    read: what a step of decoding reads: of an embedding that is not the head
      only a few rows.
    kernels: the same as `layers`, of int8 kernels put into the compute dtype.
  """

  held: float
  whole: float
  layers: float
  read: float
  kernels: float


def weights(work: workload.Workload) -> Weights:
  """Counts the parameter tree, kernels of layers apart."""
  specs, mesh = qwen2_params.specs(work.model), work.sampled_on
  gathered = (1, 1, mesh[2])
  total = lambda tree, mesh, of: sum(
      of(spec, mesh) for spec in jax.tree.leaves(tree)
  )
  of = lambda spec, mesh: _bytes(spec, mesh, work)
  whole = total(specs, gathered, of)
  table = total(specs['embed'], gathered, of)
  return Weights(
      held=total(specs, mesh, of),
      whole=whole,
      layers=total(specs['layers'], gathered, of),
      read=whole if work.model.tie_word_embeddings else whole - table,
      kernels=total(
          specs['layers'],
          gathered,
          lambda spec, mesh: work.width
          * math.prod(spec.shape)
          / workload.ways(mesh, spec.axes)
          if _is_kernel(spec)
          else 0.0,
      ),
  )


def _is_kernel(spec: qwen2_params.ParamSpec) -> bool:
  """Whether it is a matrix in each layer, which int8 makes smaller."""
  return spec.axes[0] == 'layers' and len(spec.shape) == 3


def _bytes(
    spec: qwen2_params.ParamSpec,
    mesh: tuple[int, int, int],
    work: workload.Workload,
) -> float:
  """Of one parameter on one device; in int8 with a scale for each output."""
  share = math.prod(spec.shape) / workload.ways(mesh, spec.axes)
  if not (work.int8_rollout and _is_kernel(spec)):
    return work.width * share
  (layers, _, outputs), (_, _, axis) = spec.shape, spec.axes
  return share + _FLOAT32 * layers * outputs / workload.ways(mesh, (axis,))


def token_bytes(work: workload.Workload) -> float:
  """Of keys and values of one token, on one tensor share."""
  m = work.model
  numbers = 2 * m.num_layers * m.num_kv_heads * m.head_dim
  return numbers * work.width / work.sampled_on[2]


def parts(work: workload.Workload, platform: str) -> dict[str, float]:
  """The fuller of two moments: responses are sampled, or weights laid out."""
  moments = sampling(work, platform), laying_out(work, platform)
  return max(moments, key=lambda found: sum(found.values()))


def sampling(work: workload.Workload, platform: str) -> dict[str, float]:
  """Weights, the cache, and the fuller of two programs."""
  rows = work.sampler_rows / work.sampler_shares
  fixed = {
      'decode weights': weights(work).held,
      'KV cache': rows * work.entries * token_bytes(work),
  }
  programs = _prefill(work, platform), _decode(work, platform)
  return fixed | max(programs, key=lambda found: sum(found.values()))


def laying_out(work: workload.Workload, platform: str) -> dict[str, float]:
  """What makes these weights of the learner's; there is no cache yet.

  Its own share is cast first, then gathered, and the largest array is there
  once more; twice where tensor shares are cut smaller. For int8, CPU's compiler
  has all kernels in float32 at once, unless it waits for shares of them.
  """
  size, own = weights(work), work.width * work.parameters().share
  m, (_, fsdp, tensor) = work.model, work.sampled_on
  gathers = math.prod(work.mesh[1:]) > fsdp * tensor
  copies = 2 if tensor > work.mesh[2] else int(gathers)
  table = work.width * m.vocab_size * m.hidden_size / (fsdp * tensor)
  found = {'decode weights': size.held, 'gathered head': copies * table}
  if gathers:
    if work.width < _FLOAT32:
      found['cast weights'] = own
  elif work.int8_rollout and platform == 'cpu':
    found['int8 from floats'] = _FLOAT32 / work.width * size.kernels
  return {name: size for name, size in found.items() if size}


def _prefill(work: workload.Workload, platform: str) -> dict[str, float]:
  """Blocks of prompts; the last layer has only its keys and values made."""
  m, tensor = work.model, work.sampled_on[2]
  blocks = work.prefill_blocks / work.sampler_shares
  a_share = blocks * work.prefill_block
  numbers = work.width * work.entries / tensor
  seen = blocks * 2 * m.num_kv_heads * m.head_dim * numbers
  scores = a_share * m.num_heads * work.entries * _FLOAT32 / tensor
  residual = a_share * m.hidden_size * work.width
  mlp = a_share * m.intermediate_size * work.width / tensor
  attending = seen / 2 + 2 * scores
  found = {
      'prompt activations': max(attending + 2 * residual, 3 * mlp + residual)
  }
  size = weights(work)
  layers = 1 - 1 / m.num_layers
  return found | _made(work, platform, size.layers * layers, layers)


def _decode(work: workload.Workload, platform: str) -> dict[str, float]:
  """A token of each row; drawing needs some logits whole."""
  m, tensor = work.model, work.sampled_on[2]
  rows = work.sampler_rows / work.sampler_shares
  logits = rows * m.vocab_size * _FLOAT32
  scores = rows * m.num_heads * work.entries * _FLOAT32 / tensor
  found = {'logits': max((2.5 + 3.5 / tensor) * logits, 2 * scores)}
  return found | _made(work, platform, weights(work).whole, 1.0)


def _made(
    work: workload.Workload, platform: str, gathered: float, layers: float
) -> Mapping[str, float]:
  """Copies of weights that a program makes of those that it is given.

  All fsdp shares are gathered before the first step. What is in int8 goes
  through the compute dtype: CPU's compiler has all layers so at once, others a
  kernel at a time inside of its product.
  """
  found = {}
  if work.sampled_on[1] > 1:
    found['gathered weights'] = gathered
  if work.int8_rollout and platform == 'cpu':
    found['int8 put into floats'] = layers * weights(work).kernels
  return found
