"""Bytes that one device needs for sampling, beside the training state.

On the mesh of sampling, see `sharding.rollout_shape`.
"""

from __future__ import annotations

from hgpo_jax.planning import workload

_FLOAT32 = 4


def moments(work: workload.Workload) -> dict[str, dict[str, float]]:
  """Parts at three moments: 'sync', and the programs 'prefill' and 'decode'.

  The cache is made after the weights to decode with.
  """
  there, m = work.sampling, work.model
  a_token = 2 * m.num_layers * m.num_kv_heads * m.head_dim * work.width
  rows = work.sampler_rows / there.shares
  weights = {'decode weights': work.width * there.parameters().share}
  cache = {'KV cache': rows * work.entries * a_token / there.mesh[2]}
  return {
      'sync': weights | _sync(work, there),
      'prefill': weights | cache | _prefill(there),
      'decode': weights | cache | _decode(there),
  }


def _sync(
    work: workload.Workload, there: workload.Workload
) -> dict[str, float]:
  """What is gathered, its own share first; and the largest array once more."""
  if there.parameters().share <= work.parameters().share:
    return {}
  m, (_, fsdp, tensor) = work.model, there.mesh
  whole = m.vocab_size * m.hidden_size * work.width
  return {
      'cast weights': work.width * work.parameters().share,
      'gathered head': whole / (fsdp * tensor),
  }


def _prefill(work: workload.Workload) -> dict[str, float]:
  """Blocks of prompts; the last layer has only its keys and values made."""
  m, tensor = work.model, work.mesh[2]
  blocks = work.prefill_tokens / work.prefill_block
  a_share = work.prefill_tokens / work.shares
  numbers = work.width * work.entries / tensor
  seen = blocks * 2 * m.num_kv_heads * m.head_dim * numbers
  scores = a_share * m.num_heads * work.entries * _FLOAT32 / tensor
  residual = a_share * m.hidden_size * work.width
  mlp = a_share * m.intermediate_size * work.width / tensor
  # Of a cache that is split, every device gets the rows of all blocks.
  attending = 2 * seen if work.shares > 1 else seen / 2 + 2 * scores
  parts = {
      'prompt activations': max(attending + 2 * residual, 3 * mlp + residual)
  }
  if work.mesh[1] > 1:
    layers = work.parameters().layers * (m.num_layers - 1) / m.num_layers
    parts['gathered weights'] = work.width * layers / tensor
  return parts


def _decode(work: workload.Workload) -> dict[str, float]:
  """A token of each row; drawing needs some logits whole.

  If that mesh has an fsdp axis, all shares are gathered before the first step.
  """
  m, tensor = work.model, work.mesh[2]
  rows = work.sampler_rows / work.shares
  logits = rows * m.vocab_size * _FLOAT32
  scores = rows * m.num_heads * work.entries * _FLOAT32 / tensor
  parts = {'logits': max((2.5 + 3.5 / tensor) * logits, 2 * scores)}
  if work.mesh[1] > 1:
    whole = work.parameters().whole / tensor
    parts['gathered weights'] = work.width * whole
  return parts
