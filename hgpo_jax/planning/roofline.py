"""Seconds of an iteration's phases if hardware were used as well as assumed.

Work is counted as the programs do it: padded rows, attention over whole rows,
every layer again in the backward pass. Everything outside the devices is left
out (environments, host, compilation). Every episode takes all its steps, every
response all its tokens, and no prompt finds in the cache what another left: so
work is at most, and seconds are those of the devices alone.
"""

from __future__ import annotations

import dataclasses
import math

from hgpo_jax.planning import devices
from hgpo_jax.planning import memory
from hgpo_jax.planning import rollout
from hgpo_jax.planning import workload

# Passes over the [heads, T, T] scores in float32, which are memory traffic:
# written, read by the softmax, weights written, read. Twice that backwards.
_SCORE_PASSES = 4
# Of the rows of the cache that blocks of prompts attend to: read, copied, read.
_ROW_PASSES = 3
# Over float32 logits to draw from them: written, two sums, a draw.
_LOGIT_PASSES = 6


@dataclasses.dataclass(frozen=True)
class Efficiency:
  """Fractions of the peak that are reached; assumed unless measured.

  `benchmarks/gpu.py` measures both on a GPU.

  Attributes:
    compute: of FLOP/s, in matrix products of many rows.
    bandwidth: of memory bandwidth.
    latency: seconds of a sum over devices, however small.
  """

  compute: float = 0.4
  bandwidth: float = 0.6
  latency: float = 6e-6

  def __post_init__(self) -> None:
    for name in ('compute', 'bandwidth'):
      if not 0 < getattr(self, name) <= 1:
        raise ValueError(
            f'{name} efficiency is {getattr(self, name)}; expected above 0 and'
            ' at most 1'
        )


ASSUMED = Efficiency()


@dataclasses.dataclass(frozen=True)
class Seconds:
  """Seconds of each phase of one iteration.

  Attributes:
    sync: laying out the weights for sampling.
    prefill: reading prompts.
    decode: writing responses.
    score: log-probs of the learner and of the reference.
    update: gradients and optimizer.
    tokens: prompt and response tokens of the iteration, padding included.
    prefill_calls: calls that read prompts.
    decode_steps: steps of decoding, each a token of every row.
  """

  sync: float
  prefill: float
  decode: float
  score: float
  update: float
  tokens: int
  prefill_calls: int
  decode_steps: int

  @property
  def rollout(self) -> float:
    return self.sync + self.prefill + self.decode

  @property
  def total(self) -> float:
    return self.rollout + self.score + self.update

  @property
  def tokens_per_second(self) -> float:
    return self.tokens / self.total


def seconds(
    work: workload.Workload,
    device: devices.Device,
    efficiency: Efficiency = ASSUMED,
) -> Seconds:
  """Seconds of the phases on this many of these devices, one mesh of them."""
  rate = _Rate(work, device, efficiency)
  return Seconds(
      sync=_sync(work, rate),
      prefill=_prefill(work, rate),
      decode=_decode(work, rate),
      score=_score(work, rate),
      update=_update(work, rate),
      tokens=work.total_steps * (work.prompt + work.new_tokens),
      prefill_calls=prefill_calls(work),
      decode_steps=decode_steps(work),
  )


def prefill_calls(work: workload.Workload) -> int:
  """Full ones, whose blocks hold all tokens of all prompts but the last."""
  blocks = math.ceil((work.prompt - 1) / work.prefill_block)
  return math.ceil(work.total_steps * blocks / work.prefill_blocks)


def decode_steps(work: workload.Workload) -> int:
  """All tokens over the rows that are live: one that ends is taken at once."""
  live = min(work.sampler_rows, work.episodes)
  return math.ceil(work.total_steps * work.new_tokens / live)


@dataclasses.dataclass(frozen=True)
class _Rate:
  """What one device does in a second, on one of `chips` equal shares."""

  work: workload.Workload
  device: devices.Device
  efficiency: Efficiency

  @property
  def chips(self) -> int:
    return math.prod(self.work.mesh)

  @property
  def flops(self) -> float:
    return self.device.teraflops * 1e12 * self.efficiency.compute

  @property
  def bytes(self) -> float:
    return self.device.bandwidth_gbs * 1e9 * self.efficiency.bandwidth

  @property
  def link(self) -> float:
    """Bytes that leave a device in a second: half of both directions."""
    return self.device.link_gbs / 2 * 1e9 * self.efficiency.bandwidth

  def whole(self, flops: float, moved: float = 0.0) -> float:
    """Seconds of work that all devices share."""
    return (flops / self.flops + moved / self.bytes) / self.chips

  def gather(self, size: float, fsdp: int | None = None) -> float:
    """Seconds until every fsdp share has all `size` bytes of a tensor share."""
    fsdp = self.work.mesh[1] if fsdp is None else fsdp
    return size * (fsdp - 1) / fsdp / self.link

  def sum_over(self, shares: int, size: float) -> float:
    """Seconds of a sum of `size` bytes over so many devices, all get it."""
    if shares == 1:
      return 0.0
    return self.efficiency.latency + 2 * size * (1 - 1 / shares) / self.link

  def reduce(self, tokens: float, tensor: int | None = None) -> float:
    """Seconds of one layer's sum over tensor shares of [tokens, D]."""
    size = tokens * self.work.model.hidden_size * self.work.width
    return self.sum_over(self.work.mesh[2] if tensor is None else tensor, size)


def forward_flops(work: workload.Workload, tokens: float, seen: float) -> float:
  """Of the layers: 2 a weight and token, and attention to `seen` tokens."""
  m = work.model
  attention = 4 * m.num_layers * m.num_heads * m.head_dim * seen
  return tokens * (2 * work.parameters().layers + attention)


def head_flops(work: workload.Workload, tokens: float) -> float:
  """Of the logits of so many positions."""
  return 2 * tokens * work.model.hidden_size * work.model.vocab_size


def _score_bytes(
    work: workload.Workload, rate: _Rate, tokens: float, seen: float
) -> float:
  """Traffic of attention scores; a flash kernel has none."""
  m = work.model
  if work.flash(rate.device.platform):
    return 0.0
  return _SCORE_PASSES * 4 * tokens * m.num_layers * m.num_heads * seen


def _seen(length: int) -> float:
  """Tokens before it that a token is compared with, by blocks of queries."""
  blocks = math.ceil(length / memory.query_block(length))
  return length * (blocks + 1) / (2 * blocks)


def _layer_bytes(work: workload.Workload) -> float:
  """Of the layers' weights in the compute dtype, on one tensor share."""
  return work.parameters().whole * work.width / work.mesh[2]


def _sync(work: workload.Workload, rate: _Rate) -> float:
  """Reading weights and writing them in another layout; what links move."""
  held, made = work.parameters().share, rollout.weights(work).held
  moved = max(0.0, made - min(made, work.width * held))
  return (4 * held + made) / rate.bytes + moved / rate.link


def _prefill(work: workload.Workload, rate: _Rate) -> float:
  """Full calls; each reads the weights, and the rows that it attends to.

  Every share computes as many blocks, of its own rows.
  """
  m, (_, fsdp, tensor) = work.model, work.sampled_on
  size, seen = rollout.weights(work), _attended(work)
  blocks = work.prefill_blocks // work.sampler_shares
  tokens = blocks * work.prefill_block
  rows = blocks * seen * rollout.token_bytes(work)
  scores = _SCORE_PASSES * 4 * tokens * m.num_layers * m.num_heads * seen
  flops = forward_flops(work, tokens, seen) / tensor
  a_call = max(flops / rate.flops, size.layers / rate.bytes)
  a_call += (_ROW_PASSES * rows + scores / tensor) / rate.bytes
  # Nothing hides the links: what they bring is waited for.
  a_call += 2 * m.num_layers * rate.reduce(tokens, tensor)
  a_call += rate.gather(size.layers, fsdp)
  return prefill_calls(work) * a_call


def _attended(work: workload.Workload) -> float:
  """Entries that a block attends to: half of them, or all; the mean."""
  half = work.entries // 2
  return work.entries - half * min(1.0, half / work.prompt)


def _decode(work: workload.Workload, rate: _Rate) -> float:
  """Each step reads the weights once and all entries of all rows."""
  m, (_, fsdp, tensor) = work.model, work.sampled_on
  rows, size = work.sampler_rows / work.sampler_shares, rollout.weights(work)
  logits = rows * m.vocab_size * 4
  moved = size.read + rows * work.entries * rollout.token_bytes(work)
  moved += _LOGIT_PASSES * logits
  flops = forward_flops(work, rows, work.entries) + head_flops(work, rows)
  a_step = max(moved / rate.bytes, flops / tensor / rate.flops)
  a_step += 2 * m.num_layers * rate.reduce(rows, tensor)
  a_step += rate.gather(logits, tensor)
  a_step += rate.gather(size.whole, fsdp)
  return decode_steps(work) * a_step


def _score(work: workload.Workload, rate: _Rate) -> float:
  tokens, seen = work.total_steps * work.length, _seen(work.length)
  flops = forward_flops(work, tokens, seen)
  flops += head_flops(work, work.total_steps * work.response)
  once = rate.whole(flops, _score_bytes(work, rate, tokens, seen))
  links = rate.gather(_layer_bytes(work)) * _passes(work)
  links += 2 * work.model.num_layers * rate.reduce(tokens / work.shares)
  return max(once, links) * (2 if work.reference else 1)


def _passes(work: workload.Workload) -> int:
  return math.ceil(work.total_steps / (work.rows * work.shares))


def _update(work: workload.Workload, rate: _Rate) -> float:
  """Forward, forward again, and twice that backwards; then the optimizer."""
  tokens, seen = work.total_steps * work.length, _seen(work.length)
  again = 1 if work.remat else 0
  # Backwards costs 2 forward passes; with frozen weights 1 and the adapter.
  passes = 3 + again if work.lora is None else 2 + again
  flops = passes * forward_flops(work, tokens, seen)
  flops += 4 * head_flops(work, work.total_steps * work.response)
  moved = (3 + again) * _score_bytes(work, rate, tokens, seen)
  links = passes * rate.gather(_layer_bytes(work)) * _passes(work)
  sums = (4 + 2 * again) * work.model.num_layers
  links += sums * rate.reduce(tokens / work.shares)
  # Parameters, moments and gradients: read once and written once.
  state = work.trained().share * 4 * 8 / rate.bytes
  updates = math.ceil(work.total_steps / work.minibatch_steps)
  once = max(rate.whole(flops, moved), links) + updates * state
  return work.epochs * once
