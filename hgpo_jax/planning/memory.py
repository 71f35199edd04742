"""Bytes that one device needs, phase by phase and part by part.

What lies there between programs is exact: shapes, dtypes and the rules of
`sharding`. What a program needs while it runs is a sum over the arrays that are
alive at its fullest moments; how many copies of each there are was counted in
XLA's buffer assignment for CPU (`benchmarks/memory.py` compares the two). For
accelerators the same copies are assumed, in the compute dtype: their compilers
fuse more, so it is rather too much than too little.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math

from hgpo_jax.planning import workload

_FLOAT32 = 4
# Copies of the parameters alive in the optimizer's step beside its arguments.
# XLA for CPU does not fuse the step of a parameter into one loop.
_STEP_COPIES = {'cpu': 2.75}
_STEP_COPIES_FUSED = 1.0


@dataclasses.dataclass(frozen=True)
class Need:
  """Bytes of one device, at the fullest moment of a phase.

  Attributes:
    parts: bytes of each part.
    fixed: names of the parts that lie there whatever the rows of a pass.
  """

  parts: Mapping[str, float]
  fixed: frozenset[str]

  @property
  def total(self) -> float:
    return sum(self.parts.values())

  @property
  def resident(self) -> float:
    """Of the parts that no smaller batch makes smaller."""
    return sum(size for name, size in self.parts.items() if name in self.fixed)

  @property
  def temporary(self) -> float:
    return self.total - self.resident


def need(work: workload.Workload, platform: str = 'tpu') -> Mapping[str, Need]:
  """What each phase needs: 'rollout', 'score', 'gradient' and 'step'.

  Args:
    work: what is asked for.
    platform: as jax names it: 'cpu', 'gpu' or 'tpu'.
  """
  state = _state(work)
  sums = {'gradient sums': _FLOAT32 * work.trained().share}
  return {
      'rollout': _need(state, _rollout(work)),
      'score': _need(state, _score(work)),
      'gradient': _need(state | sums, gradient(work)),
      'step': _need(state | sums, {'optimizer step': step(work, platform)}),
  }


def _need(fixed: Mapping[str, float], rest: Mapping[str, float]) -> Need:
  return Need({**fixed, **rest}, frozenset(fixed))


def largest(needs: Mapping[str, Need]) -> tuple[str, Need]:
  """The phase that needs most."""
  return max(needs.items(), key=lambda item: item[1].total)


def _state(work: workload.Workload) -> dict[str, float]:
  """What lies on a device in every phase."""
  own, trained = work.parameters(), work.trained()
  moments = _FLOAT32 + workload.BYTES[work.moment_dtype]
  parts = {'weights': _FLOAT32 * trained.share}
  if work.lora is not None:
    # The reference is the base alone: it costs nothing more.
    parts['weights'] += workload.BYTES[work.lora.base_dtype] * own.share
  elif work.reference:
    parts['reference'] = _FLOAT32 * own.share
  parts['moments'] = moments * trained.share
  return parts


@dataclasses.dataclass(frozen=True)
class _Arrays:
  """Bytes of one copy of the arrays of a pass, on one device.

  Attributes:
    stack: inputs of all layers, kept for the backward pass.
    scores: attention scores of a layer, float32.
    mlp: activations of the MLP's width.
    residual: activations of the model's width.
    heads: activations of the heads.
    mlp_kernel: one of the three kernels of an MLP, whole on its tensor share.
    attention_kernel: likewise the query kernel.
    head: embedding or head, whole on its tensor share.
    layer_gradients: of all layers' weights, where they end up.
    split: whether weights are gathered from fsdp shares before use.
  """

  stack: float
  scores: float
  mlp: float
  residual: float
  heads: float
  mlp_kernel: float
  attention_kernel: float
  head: float
  layer_gradients: float
  split: bool

  @classmethod
  def of(cls, work: workload.Workload, rows: float, length: int) -> _Arrays:
    m, width = work.model, work.width
    _, fsdp, tensor = work.mesh
    tokens, query = rows * length, m.num_heads * m.head_dim
    layers = work.trained().layers if work.lora else work.parameters().layers
    return cls(
        stack=m.num_layers * tokens * m.hidden_size * width,
        scores=rows * m.num_heads * length**2 * _FLOAT32 / tensor,
        mlp=tokens * m.intermediate_size * width / tensor,
        residual=tokens * m.hidden_size * width,
        heads=tokens * query * width / tensor,
        mlp_kernel=m.hidden_size * m.intermediate_size * width / tensor,
        attention_kernel=m.hidden_size * query * width / tensor,
        head=m.vocab_size * m.hidden_size * width / tensor,
        layer_gradients=layers * _FLOAT32 / (fsdp * tensor),
        split=fsdp > 1,
    )

  def forward(self) -> float:
    """One layer, forwards."""
    gathered = 3 * self.mlp_kernel if self.split else 0.0
    return (
        3.25 * self.scores
        + 1.5 * self.mlp
        + 3 * self.residual
        + self.heads
        + gathered
    )

  def backward(self, weights: bool) -> float:
    """One layer, forwards again and then backwards."""
    kernels = 2 * self.mlp_kernel + 2.5 * self.attention_kernel
    return (
        (2.1 if self.split else 3.0) * self.scores
        + 8 * self.mlp
        + 7 * self.residual
        + 4 * self.heads
        + (kernels if weights or self.split else 0.0)
    )


def gradient(work: workload.Workload) -> dict[str, float]:
  """Temporary bytes of one forward and backward pass, beside the sums.

  The fullest of four moments: a layer forwards, the head, a layer backwards,
  and the sum of gradients over the `data` shares at the end.
  """
  arrays = _Arrays.of(work, work.rows, work.length)
  full = work.lora is None
  logits, chunks = _logits(work)
  tied = work.model.tie_word_embeddings
  gathered = 2 * arrays.head if arrays.split else 0.0
  kept = _kept(work, arrays)
  moments = [
      {'gathered head': gathered, 'one layer': arrays.forward()},
      {'gathered head': gathered, 'logits': 3.4 * logits},
      {'one layer': arrays.backward(full)},
  ]
  if full:
    # Each device's own share of the gradient of the head, which is summed in
    # one go with that of the embedding where the two are the same.
    owned = {'head gradient': arrays.head}
    if not arrays.split:
      again = 2 if chunks > 1 else 1
      moments[1] |= {'head gradient': again * arrays.head}
    moments[2] |= owned if tied else {}
    if work.mesh[0] > 1 and not arrays.split:
      ends = 4 * arrays.head * _FLOAT32 / work.width
      moments.append({'head gradient': ends - arrays.stack})
  fullest = max(moments, key=lambda parts: sum(parts.values()))
  found = {'kept activations': arrays.stack + kept, **fullest}
  if full:
    found['new gradient'] = arrays.layer_gradients
  if tied and arrays.split and work.mesh[2] == 2:
    # Rows of the embedding are looked up in a table gathered over `tensor`
    # (beyond 2 the compiler looks them up where they are), and their gradient
    # is scattered into another; with `data` shares the sum of the head's
    # gradient over them takes its place.
    table = work.model.vocab_size * work.model.hidden_size * _FLOAT32
    table /= work.mesh[1]
    other = table if work.mesh[0] == 1 else arrays.head
    found['embedding tables'] = table + other
  return {name: size for name, size in found.items() if size}


def _kept(work: workload.Workload, arrays: _Arrays) -> float:
  """Activations inside layers that are kept without `remat`."""
  if work.remat:
    return 0.0
  inside = 2 * arrays.scores + 5 * arrays.mlp + 6 * arrays.residual
  return work.model.num_layers * (inside + 4 * arrays.heads)


def _logits(work: workload.Workload) -> tuple[float, int]:
  """(bytes of a chunk of logits, how many chunks a pass has)."""
  chunk = min(work.response, max(1, work.logits_tokens // work.rows))
  size = work.rows * chunk * work.model.vocab_size * _FLOAT32
  return size / work.mesh[2], math.ceil(work.response / chunk)


def step(work: workload.Workload, platform: str) -> float:
  """Temporary bytes of the optimizer's step."""
  copies = _STEP_COPIES.get(platform, _STEP_COPIES_FUSED)
  return copies * _FLOAT32 * work.trained().share


def _score(work: workload.Workload) -> dict[str, float]:
  """Log-probs only: nothing is kept for a backward pass."""
  arrays = _Arrays.of(work, work.rows, work.length)
  head = 2 * arrays.head if arrays.split else 0.0
  logits, _ = _logits(work)
  return {
      'gathered head': head,
      'one layer': arrays.forward(),
      'logits': 2 * logits,
  }


def _rollout(work: workload.Workload) -> dict[str, float]:
  """Weights to decode with, the cache, and reading the longest prompts.

  Programs that sample gather the fsdp shares of all weights, once to read
  prompts and once for the loop, and both copies are alive together.
  """
  m = work.model
  rows = work.sampler_rows / work.shares
  arrays = _Arrays.of(work, rows, work.prompt)
  entries = work.prompt + work.new_tokens - 1
  cache = 2 * m.num_layers * m.num_kv_heads * m.head_dim * work.width
  own = work.parameters()
  parts = {
      'decode weights': work.width * own.share,
      'KV cache': rows * entries * cache / work.mesh[2],
      'prompt activations': (
          1.1 * arrays.scores + 0.5 * arrays.mlp + 8 * arrays.residual
      ),
      'logits': 3 * rows * m.vocab_size * _FLOAT32 / work.mesh[2],
  }
  if arrays.split:
    parts['gathered weights'] = 2 * work.width * own.whole / work.mesh[2]
  return parts
