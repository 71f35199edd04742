"""Log-probabilities and entropies of the response tokens of a batch."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax import sharding
from hgpo_jax import types
from hgpo_jax.learner import arrays
from hgpo_jax.losses import token_logprobs
from hgpo_jax.models import base


def response_logprobs(
    model: base.LanguageModel,
    params: base.Params,
    rollout: types.RolloutBatch,
    temperature: float,
    chunk_tokens: int = token_logprobs.CHUNK_TOKENS,
) -> tuple[jax.Array, jax.Array]:
  """(log-prob, entropy), float32 [B, R], of softmax(logits / temperature).

  Only the positions that predict response tokens reach the head, about
  `chunk_tokens` at a time; 0 where there is no response token.
  """
  hidden_BTD = model.hidden(
      params, rollout.tokens_BT, rollout.positions_BT, rollout.segment_ids_BT
  )
  hidden_BRD, tokens_BR = token_logprobs.gather_targets(
      hidden_BTD, rollout.tokens_BT, rollout.target_BR
  )
  logprobs_BR, entropy_BR = token_logprobs.token_logprobs(
      hidden_BRD,
      tokens_BR,
      lambda x: model.logits(params, x),
      temperature,
      chunk_tokens,
  )
  mask_BR = rollout.action_mask_BR
  return (
      jnp.where(mask_BR, logprobs_BR, 0.0),
      jnp.where(mask_BR, entropy_BR, 0.0),
  )


class Scorer:
  """Scores batches of any number of rows, a fixed number of rows at a time."""

  def __init__(
      self,
      model: base.LanguageModel,
      temperature: float,
      mesh: jax.sharding.Mesh | None = None,
      chunk_tokens: int = token_logprobs.CHUNK_TOKENS,
  ):
    self._mesh = mesh
    self._score = jax.jit(
        lambda params, rollout: response_logprobs(
            model, params, rollout, temperature, chunk_tokens
        )
    )

  def score(
      self, params: base.Params, rollout: types.RolloutBatch
  ) -> tuple[jax.Array, jax.Array]:
    """(log-probs, entropies), [B, R] on the device, in one pass."""
    placed = arrays.put(rollout, self._mesh)
    with sharding.use(self._mesh), sharding.launching():
      return self._score(params, placed)

  def score_parts(
      self,
      params: base.Params,
      parts: Iterable[tuple[np.ndarray, types.RolloutBatch]],
      shape: tuple[int, int],
  ) -> tuple[np.ndarray, np.ndarray]:
    """The same for parts (row indices, rows), as arrays [B, R] on the host.

    `shape` is the (B, R) of the batch that the parts were taken from, one step
    a row; a part may be narrower, or hold several of them in a row. Rows in no
    part are 0.
    """
    # All passes are queued before the first result is waited for.
    scored = [(x[0], x[1], self.score(params, x[1])) for x in parts]
    out = np.zeros((2, *shape), np.float32)
    for rows, part, results in scored:
      mask_BR, (segment, column) = part.action_mask_BR, _slots(part)
      for index, values_BR in enumerate(jax.device_get(results)):
        out[index, rows[segment], column] = values_BR[mask_BR]
    out.flags.writeable = False
    return out[0], out[1]


def _slots(rollout: types.RolloutBatch) -> tuple[np.ndarray, np.ndarray]:
  """Of each response token, row by row: its segment, and its index in that.

  Segments are counted over all rows, from 0; each has a response.
  """
  mask_BR = rollout.action_mask_BR
  segment_BR = np.take_along_axis(
      rollout.segment_ids_BT, rollout.target_BR, axis=1
  )
  row = np.nonzero(mask_BR)[0]
  segment = segment_BR[mask_BR]
  new = np.ones(len(row), bool)
  new[1:] = (row[1:] != row[:-1]) | (segment[1:] != segment[:-1])
  starts, index = np.flatnonzero(new), np.cumsum(new) - 1
  return index, np.arange(len(row)) - starts[index]


def logprob_gap(
    rollout: types.RolloutBatch, logprobs_BR: np.ndarray
) -> types.Metrics:
  """Sampler against scorer, over response tokens of real rows alone.

  With gap = scorer - sampler a token: mean and p99 and max of |gap|, and of
  the steps the largest |sum of gaps|, as the ratio exp(.) that a
  sequence-level loss would see.
  """
  mask_BR = rollout.action_mask_BR & (rollout.row_weight_B > 0)[:, None]
  if not mask_BR.any():
    return {}
  gap_BR = np.zeros(mask_BR.shape)
  gap_BR[mask_BR] = (
      np.asarray(logprobs_BR, np.float64)[mask_BR]
      - rollout.sampler_logprobs_BR[mask_BR]
  )
  size = np.abs(gap_BR[mask_BR])
  sums = np.bincount(rollout.step_BR[mask_BR], weights=gap_BR[mask_BR])
  return {
      'logprob_gap/mean': float(size.mean()),
      'logprob_gap/p99': float(np.quantile(size, 0.99)),
      'logprob_gap/max': float(size.max()),
      'logprob_gap/max_sequence_ratio': float(np.exp(np.abs(sums).max())),
  }
