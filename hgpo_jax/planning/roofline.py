"""Seconds of an iteration's phases if hardware were used as well as assumed.

Work is counted as the programs do it: padded rows, attention over whole rows,
every layer again in the backward pass. Everything outside the devices is left
out (environments, host, compilation), and every episode takes all its steps, so
tokens are at most and seconds are those of the devices alone.
"""

from __future__ import annotations

import dataclasses
import math

from hgpo_jax.planning import devices
from hgpo_jax.planning import workload

# Passes over the [heads, T, T] scores in float32, which are memory traffic:
# written, read by the softmax, weights written, read. Twice that backwards.
_SCORE_PASSES = 4


@dataclasses.dataclass(frozen=True)
class Efficiency:
  """Fractions of the peak that are reached; assumed unless measured.

  `benchmarks/gpu.py` measures both on a GPU.

  Attributes:
    compute: of FLOP/s, in matrix products of many rows.
    bandwidth: of memory bandwidth.
  """

  compute: float = 0.4
  bandwidth: float = 0.6

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
  """

  sync: float
  prefill: float
  decode: float
  score: float
  update: float
  tokens: int

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
  there = _Rate(work.sampling, device, efficiency)
  return Seconds(
      sync=_sync(rate, there),
      prefill=_prefill(work.sampling, there),
      decode=_decode(work.sampling, there),
      score=_score(work, rate),
      update=_update(work, rate),
      tokens=work.total_steps * (work.prompt + work.new_tokens),
  )


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

  def gather(self, size: float) -> float:
    """Seconds until every fsdp share has all `size` bytes of a tensor share."""
    fsdp = self.work.mesh[1]
    return size * (fsdp - 1) / fsdp / self.link

  def reduce(self, tokens: float) -> float:
    """Seconds of one layer's sum over tensor shares of [tokens, D]."""
    tensor = self.work.mesh[2]
    size = tokens * self.work.model.hidden_size * self.work.width
    return 2 * size * (tensor - 1) / tensor / self.link


def forward_flops(work: workload.Workload, tokens: float, seen: float) -> float:
  """Of the layers: 2 a weight and token, and attention to `seen` tokens."""
  m = work.model
  attention = 4 * m.num_layers * m.num_heads * m.head_dim * seen
  return tokens * (2 * work.parameters().layers + attention)


def head_flops(work: workload.Workload, tokens: float) -> float:
  """Of the logits of so many positions."""
  return 2 * tokens * work.model.hidden_size * work.model.vocab_size


def _score_bytes(work: workload.Workload, rows: float, length: int) -> float:
  m = work.model
  return _SCORE_PASSES * 4 * rows * m.num_layers * m.num_heads * length**2


def _layer_bytes(work: workload.Workload) -> float:
  """Of the layers' weights in the compute dtype, on one tensor share."""
  return work.parameters().whole * work.width / work.mesh[2]


def _calls(work: workload.Workload) -> int:
  """Batches that are sampled in an iteration."""
  return work.steps * math.ceil(work.episodes / work.sampler_rows)


def _sync(rate: _Rate, there: _Rate) -> float:
  """Reading weights and writing them in another layout; what links move."""
  work = there.work
  held, made = rate.work.parameters().share, work.parameters().share
  written = (4 * held + work.width * made) / rate.bytes
  return written + work.width * max(0.0, made - held) / rate.link


def _prefill(work: workload.Workload, rate: _Rate) -> float:
  rows = work.total_steps
  flops = forward_flops(work, rows * work.prompt, work.prompt)
  moved = _score_bytes(work, rows, work.prompt)
  a_share = rows * work.prompt / work.shares
  # Once to read prompts and once for the loop.
  links = 2 * rate.gather(_layer_bytes(work)) * _calls(work)
  links += 2 * work.model.num_layers * rate.reduce(a_share)
  return max(rate.whole(flops + head_flops(work, rows), moved), links)


def _decode(work: workload.Workload, rate: _Rate) -> float:
  """A token at a time: weights and cache are read for each."""
  m, cache = work.model, work.prompt + work.new_tokens
  rows = min(work.sampler_rows, work.episodes) / work.shares
  kv = 4 * m.num_layers * m.num_kv_heads * m.head_dim * work.width // 2
  moved = _layer_bytes(work) + rows * cache * kv / work.mesh[2]
  flops = forward_flops(work, rows, cache) + head_flops(work, rows)
  a_token = max(moved / rate.bytes, flops / work.mesh[2] / rate.flops)
  a_token += 2 * m.num_layers * rate.reduce(rows)
  return _calls(work) * work.new_tokens * a_token


def _score(work: workload.Workload, rate: _Rate) -> float:
  rows = work.total_steps
  flops = forward_flops(work, rows * work.length, work.length)
  flops += head_flops(work, rows * work.response)
  once = rate.whole(flops, _score_bytes(work, rows, work.length))
  links = rate.gather(_layer_bytes(work)) * _passes(work)
  links += (
      2 * work.model.num_layers * rate.reduce(rows * work.length / work.shares)
  )
  return max(once, links) * (2 if work.reference else 1)


def _passes(work: workload.Workload) -> int:
  return math.ceil(work.total_steps / (work.rows * work.shares))


def _update(work: workload.Workload, rate: _Rate) -> float:
  """Forward, forward again, and twice that backwards; then the optimizer."""
  rows, again = work.total_steps, 1 if work.remat else 0
  # Backwards costs 2 forward passes; with frozen weights 1 and the adapter.
  passes = 3 + again if work.lora is None else 2 + again
  flops = passes * forward_flops(work, rows * work.length, work.length)
  flops += 4 * head_flops(work, rows * work.response)
  moved = (3 + again) * _score_bytes(work, rows, work.length)
  links = passes * rate.gather(_layer_bytes(work)) * _passes(work)
  links += (
      (4 + 2 * again)
      * work.model.num_layers
      * rate.reduce(rows * work.length / work.shares)
  )
  # Parameters, moments and gradients: read once and written once.
  state = work.trained().share * 4 * 8 / rate.bytes
  updates = math.ceil(work.total_steps / work.minibatch_steps)
  once = max(rate.whole(flops, moved), links) + updates * state
  return work.epochs * once
