"""What is asked of each device, as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from hgpo_jax import sharding
from hgpo_jax.models import attention
from hgpo_jax.models import base
from hgpo_jax.models import lora as lora_lib
from hgpo_jax.models import qwen2
from hgpo_jax.models import qwen2_params

BYTES = {'float32': 4, 'bfloat16': 2}

Axes = tuple[str | None, ...]

# Fields that a pass, an iteration or a round of sampling has at least one of.
_COUNTS = (
    'rows',
    'length',
    'response',
    'logits_tokens',
    'minibatch_steps',
    'epochs',
    'episodes',
    'steps',
    'prompt',
    'new_tokens',
    'sampler_rows',
    'prefill_tokens',
    'prefill_block',
    'mlp_parts',
)


@dataclasses.dataclass(frozen=True)
class Workload:
  """One iteration of training, at its largest.

  Attributes:
    model: shapes of the policy.
    mesh: sizes of (data, fsdp, tensor).
    compute_dtype: of activations; 'float32' or 'bfloat16'.
    attention: the learner's kernel, one of `attention.KERNELS`.
    remat: whether a layer's activations are made again in the backward pass.
    keep_attention: with `remat`, whether what attention gave is kept.
    mlp_parts: with `remat`, parts of a row whose MLP is computed by turns.
    lora: the kind of adapter that is trained; None for all weights.
    reference: whether the loss has a KL to a reference policy.
    moment_dtype: of the first moment.
    moments_on: where moments lie between updates, see `optimizer.AdamW`.
    rows: of a forward and backward pass, on each data-parallel share.
    length: tokens of a row, with padding.
    response: scored tokens of a row, with padding.
    logits_tokens: positions whose logits are held at once, on each share.
    minibatch_steps: steps of one optimizer update.
    epochs: passes over the steps.
    episodes: of an iteration.
    steps: of an episode.
    prompt: tokens of a prompt, with padding.
    new_tokens: of a response, at most.
    sampler_rows: rows of the cache, over all devices.
    prefill_tokens: prompt tokens that one call computes at most.
    prefill_block: prompts are computed in blocks of so many tokens.
    int8_rollout: whether the sampler's kernels of layers are in int8.
    rollout_mesh: sizes of the mesh that is sampled on; None for what
      `sharding.rollout_shape` makes of `mesh`.
    ahead: whether episodes are played while the learner learns.
  """

  model: base.ModelConfig
  mesh: tuple[int, int, int]
  compute_dtype: str = 'bfloat16'
  attention: str = 'auto'
  remat: bool = True
  keep_attention: bool = True
  mlp_parts: int = 1
  lora: lora_lib.LoRA | None = None
  reference: bool = True
  moment_dtype: str = 'float32'
  moments_on: str = 'device'
  rows: int = 1
  length: int = 2560
  response: int = 512
  logits_tokens: int = 1024
  minibatch_steps: int = 256
  epochs: int = 1
  episodes: int = 128
  steps: int = 50
  prompt: int = 2048
  new_tokens: int = 512
  sampler_rows: int = 128
  prefill_tokens: int = 512
  prefill_block: int = 32
  int8_rollout: bool = False
  rollout_mesh: tuple[int, int, int] | None = None
  ahead: bool = False

  @property
  def shares(self) -> int:
    """Data-parallel shares: parts that the rows of a batch are split into."""
    return self.mesh[0] * self.mesh[1]

  @property
  def sampled_on(self) -> tuple[int, int, int]:
    """Sizes of the mesh that responses are sampled on."""
    return self.rollout_mesh or sharding.rollout_shape(self.mesh)

  @property
  def sampler_shares(self) -> int:
    """Parts that the rows of the cache are split into."""
    return self.sampled_on[0] * self.sampled_on[1]

  @property
  def prefill_blocks(self) -> int:
    """Of one call, as `rollout.compiled` rounds them: each share as many."""
    blocks = self.prefill_tokens // self.prefill_block
    return -(-blocks // self.sampler_shares) * self.sampler_shares

  @property
  def width(self) -> int:
    """Bytes of a number in the compute dtype."""
    return BYTES[self.compute_dtype]

  @property
  def total_steps(self) -> int:
    """Steps of an iteration if every episode takes them all."""
    return self.episodes * self.steps

  @property
  def entries(self) -> int:
    """Entries of a row of the cache, as `rollout.sampler` rounds them."""
    unit = math.lcm(64, self.prefill_block)
    return -(-(self.prompt + self.new_tokens - 1) // unit) * unit

  def flash(self, platform: str) -> bool:
    """Whether the learner's attention keeps its scores to itself there."""
    m = self.model
    shape_BTHh = 1, self.length, m.num_heads, m.head_dim
    chosen = attention.choose(
        self.attention, platform, shape_BTHh, jnp.dtype(self.compute_dtype)
    )
    return chosen != 'xla'

  def check(self) -> None:
    """Refuses counts below 1, and meshes that do not divide axes and rows.

    Raises:
      ValueError: naming them.
    """
    self._check_counts()
    sizes = qwen2.Qwen2(self.model).axis_sizes()
    names = sharding.Mesh().name, sharding.RolloutMesh().name
    for shape, name in zip((self.mesh, self.sampled_on), names):
      mesh = jax.sharding.AbstractMesh(shape, sharding.MESH_AXES)
      sharding.check_divides(mesh, sizes, name)
    if math.prod(self.sampled_on) != math.prod(self.mesh):
      raise ValueError(
          f'the rollout mesh {self.sampled_on} has'
          f' {math.prod(self.sampled_on)} devices, the mesh {self.mesh}'
          f' {math.prod(self.mesh)}; expected as many: the same are used'
      )
    if self.sampler_rows % self.sampler_shares:
      raise ValueError(
          f'{self.sampler_rows} rows are sampled on {self.sampler_shares}'
          ' data-parallel shares; expected a multiple: set'
          ' Sampler.row_buckets, or fewer shares and more tensor parallelism'
      )

  def _check_counts(self) -> None:
    for name in _COUNTS:
      if getattr(self, name) < 1:
        raise ValueError(
            f'{name} is {getattr(self, name)}; expected at least 1'
        )
    if self.prefill_tokens % self.prefill_block:
      raise ValueError(
          f'prefill_tokens is {self.prefill_tokens}; expected a multiple of'
          f' prefill_block = {self.prefill_block}'
      )

  def parameters(self) -> Parameters:
    """Numbers of the policy's own weights."""
    return _own(self.model, self.mesh)

  def trained(self) -> Parameters:
    """Numbers of what is trained: all weights, or an adapter."""
    if self.lora is None:
      return self.parameters()
    return _adapter(self.model, self.mesh, self.lora)


@dataclasses.dataclass(frozen=True)
class Parameters:
  """How many numbers a parameter tree has.

  Attributes:
    whole: of the tree.
    share: of the tree, on one device.
    layers: of the tree without embedding, head and final norm.
  """

  whole: int
  share: float
  layers: int


@functools.cache
def _own(model: base.ModelConfig, mesh: tuple[int, int, int]) -> Parameters:
  groups = {
      name: [(s.shape, s.axes) for s in jax.tree.leaves(part)]
      for name, part in qwen2_params.specs(model).items()
  }
  return _count(groups, mesh)


@functools.cache
def _adapter(
    model: base.ModelConfig, mesh: tuple[int, int, int], spec: lora_lib.LoRA
) -> Parameters:
  functions = qwen2.Qwen2(model)

  def made():  # Keys are made in here, or jax would look for a device.
    key = jax.random.key(0)
    return spec.init(functions.init(key), key)

  shapes = jax.eval_shape(made)
  axes = spec.logical_axes(functions.logical_axes())
  pairs = jax.tree.map(lambda x, a: (x.shape, a), shapes, axes)
  is_pair = lambda x: isinstance(x, tuple)
  return _count({'layers': jax.tree.leaves(pairs, is_leaf=is_pair)}, mesh)


def _count(
    groups: Mapping[str, list[tuple[tuple[int, ...], Axes]]],
    mesh: tuple[int, int, int],
) -> Parameters:
  whole = {
      name: sum(math.prod(shape) for shape, _ in leaves)
      for name, leaves in groups.items()
  }
  share = sum(
      math.prod(shape) / ways(mesh, axes)
      for leaves in groups.values()
      for shape, axes in leaves
  )
  return Parameters(
      whole=sum(whole.values()), share=share, layers=whole['layers']
  )


def ways(mesh: tuple[int, int, int], axes: Axes) -> int:
  """Into how many parts the mesh splits an array with these axes."""
  sizes = dict(zip(sharding.MESH_AXES, mesh))
  names = (sharding.RULES[a] for a in axes if a is not None)
  return math.prod(sizes[name] for rule in names for name in rule)
