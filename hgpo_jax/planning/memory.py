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

from hgpo_jax.planning import rollout
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
  state, sums = _state(work), _FLOAT32 * work.trained().share
  moments = _moments(work)
  if not _on_host(work, platform):
    state |= moments
  held, programs = _ahead(work, platform) if work.ahead else ({}, {})
  learning = state | held
  updating = learning | {'gradient sums': sums}
  last = {'optimizer step': step(work, platform)}
  return {
      'rollout': _need(state, rollout.parts(work, platform)),
      'score': _need(learning, _score(work) | programs),
      'gradient': _need(updating, gradient(work) | programs),
      'step': _need(updating | moments, last | programs),
  }


def _need(fixed: Mapping[str, float], rest: Mapping[str, float]) -> Need:
  return Need({**fixed, **rest}, frozenset(fixed))


def largest(needs: Mapping[str, Need]) -> tuple[str, Need]:
  """The phase that needs most."""
  return max(needs.items(), key=lambda item: item[1].total)


def _state(work: workload.Workload) -> dict[str, float]:
  """What lies on a device in every phase, but for the moments."""
  own, trained = work.parameters(), work.trained()
  parts = {'weights': _FLOAT32 * trained.share}
  if work.lora is not None:
    # The reference is the base alone: it costs nothing more.
    parts['weights'] += workload.BYTES[work.lora.base_dtype] * own.share
  elif work.reference:
    parts['reference'] = _FLOAT32 * own.share
  return parts


def _moments(work: workload.Workload) -> dict[str, float]:
  width = _FLOAT32 + workload.BYTES[work.moment_dtype]
  return {'moments': width * work.trained().share}


def _on_host(work: workload.Workload, platform: str) -> bool:
  """Whether moments lie elsewhere between updates.

  The memory of a CPU is the host's.
  """
  return platform != 'cpu' and work.moments_on != 'device'


@dataclasses.dataclass(frozen=True)
class _Arrays:
  """Bytes of one copy of the arrays of a pass, on one device.

  Attributes:
    stack: inputs of all layers, kept for the backward pass.
    scores: attention scores of a block of queries, float32.
    mlp: activations of the MLP's width.
    residual: activations of the model's width.
    heads: activations of the heads.
    totals: one number for each query, float32.
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
  totals: float
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
    queries = rows * m.num_heads * _FLOAT32
    layers = work.trained().layers if work.lora else work.parameters().layers
    return cls(
        stack=m.num_layers * tokens * m.hidden_size * width,
        scores=queries * query_block(length) * length / tensor,
        mlp=tokens * m.intermediate_size * width / tensor,
        residual=tokens * m.hidden_size * width,
        heads=tokens * query * width / tensor,
        totals=queries * length / tensor,
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

  def backward(self, work: workload.Workload) -> float:
    """One layer, forwards again and then backwards.

    CPU's compiler has scores of several blocks of queries at once.
    """
    parts = work.mlp_parts if work.remat else 1
    again = work.remat and not work.keep_attention
    scores = 6.25 if not again else 4.25 if parts == 1 else 6.0
    kernels = 3.0 if parts > 1 and not self.split else 1.0
    return (
        scores * self.scores
        + (5.75 if again else 5.0) / parts * self.mlp
        + (4.5 if again else 3.0) * self.residual
        + (2.5 if again else 1.5) * self.heads
        + (kernels * self.mlp_kernel if work.lora is None or self.split else 0)
    )


def query_block(length: int) -> int:
  """Queries that attend at a time; see `models.blockwise`."""
  return min(length, 128 * math.ceil(length / 512))


def gradient(work: workload.Workload) -> dict[str, float]:
  """Temporary bytes of one forward and backward pass, beside the sums.

  The fullest of three moments: the head, a layer backwards, and the sum of
  gradients over the `data` shares at the end.
  """
  arrays = _Arrays.of(work, work.rows, work.length)
  full = work.lora is None
  made = {'new gradient': arrays.layer_gradients} if full else {}
  moments = [_head(work, arrays), made | _layer(work, arrays)]
  if full and work.mesh[0] > 1 and not arrays.split:
    ends = 4 * arrays.head * _FLOAT32 / work.width
    moments.append(made | {'head gradient': ends - arrays.stack})
  fullest = max(moments, key=lambda parts: sum(parts.values()))
  kept = _kept(work, arrays)
  found = {'kept activations': arrays.stack + kept, **fullest}
  return {name: size for name, size in found.items() if size}


def _head(work: workload.Workload, arrays: _Arrays) -> dict[str, float]:
  """Logits and their gradient; a chunk after the other adds to a sum."""
  logits, chunks = _logits(work)
  copies = 1 if chunks == 1 else 2
  if arrays.split:
    owned = copies - 1 if work.lora is None else 0
    return {
        'gathered head': arrays.head,
        'head gradient': owned * arrays.head,
        'logits': (3 if chunks == 1 else 2.5) * logits,
    }
  if work.lora is not None:
    return {'logits': 3.4 * logits}
  return {'head gradient': copies * arrays.head, 'logits': copies * logits}


def _layer(work: workload.Workload, arrays: _Arrays) -> dict[str, float]:
  """A layer backwards, and what the head has left for the end of the pass."""
  logits, chunks = _logits(work)
  found = {'one layer': arrays.backward(work)}
  if work.lora is not None:
    return found
  if chunks == 1 and not arrays.split:
    # The product that makes the head's gradient is the last of all.
    return found | {'logits': logits}
  if work.model.tie_word_embeddings or chunks > 1:
    # Several data shares add theirs up at once, into what each will keep.
    kept = arrays.head if work.mesh[0] == 1 or not arrays.split else 0.0
    return found | {'head gradient': kept}
  return found | {'logits': 3 * logits}


def _kept(work: workload.Workload, arrays: _Arrays) -> float:
  """Activations inside layers that are kept for the backward pass."""
  if not work.remat:
    inside = 5 * arrays.mlp + 6 * arrays.residual + arrays.totals
    return work.model.num_layers * (inside + 4 * arrays.heads)
  if work.keep_attention:
    return 1.5 * work.model.num_layers * (arrays.heads + arrays.totals)
  return 0.0


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


def _ahead(
    work: workload.Workload, platform: str
) -> tuple[dict[str, float], ...]:
  """What playing keeps beside the learner, and what its programs need."""
  programs = rollout.sampling(work, platform)
  held = {name: programs.pop(name) for name in ('decode weights', 'KV cache')}
  return held, {'rollout programs': sum(programs.values())}
