"""Weights from the learner to the sampler, and a check that they arrived.

The sampler has a copy in another layout, dtype and place. A copy that went
wrong samples fluently from a policy that is not the one trained, and no other
number shows it at once. So both sides score the same tokens after each sync.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax import config
from hgpo_jax import sharding
from hgpo_jax import types
from hgpo_jax.models import base as models
from hgpo_jax.models import qwen2
from hgpo_jax.rollout import sampler as sampler_lib

# Errors that rounding does not make, see `SyncProbe`.
_ALARMS = {'float32': 1e-4, 'bfloat16': 0.03}
_ALARM_INT8 = 0.1
# Every so many positions are compared: logits of all would be large.
_STRIDE = 4


@config.configurable
@dataclasses.dataclass(frozen=True)
class SyncProbe:
  """Tokens that the learner and the sampler both score after every sync.

  With x and y the logits of the two, each less its mean over the vocabulary,
  the error is sqrt(sum (x - y)^2 / sum x^2). Rounding makes about 1e-6 in
  float32, 0.003 to 0.01 in bfloat16 and 0.01 to 0.025 in int8; a wrong kernel
  in one of 4 to 24 layers 0.01 to 1.4, mostly more than 0.04.

  Attributes:
    rows: sequences, rounded up to what the meshes divide.
    tokens: of each sequence, a multiple of 4; every fourth is compared.
    alarm_error: from this error on every iteration warns; 0 never does. None
      is 1e-4 in float32, 0.03 in bfloat16, and 0.1 with
      `PolicySource.int8_rollout`.
  """

  rows: int = 4
  tokens: int = 64
  alarm_error: float | None = None

  def __post_init__(self) -> None:
    if self.rows < 1 or self.tokens < 1 or self.tokens % _STRIDE:
      raise ValueError(
          f'SyncProbe has rows={self.rows} and tokens={self.tokens}; expected'
          f' at least 1 row, and a multiple of {_STRIDE} tokens'
      )
    if self.alarm_error is not None and not 0 <= self.alarm_error < math.inf:
      raise ValueError(
          f'SyncProbe.alarm_error is {self.alarm_error}; expected a finite'
          ' number of at least 0, or None'
      )

  def threshold(self, model: qwen2.Qwen2) -> float:
    """The error from which on to warn; 0 for never."""
    if self.alarm_error is not None:
      return self.alarm_error
    if model.int8_rollout:
      return _ALARM_INT8
    return _ALARMS[jnp.dtype(model.compute_dtype).name]


class Sync:
  """Lays out the learner's weights for the sampler, and compares the two.

  Compiles three small programs when it is first called, and none later.
  """

  def __init__(
      self,
      spec: SyncProbe,
      model: qwen2.Qwen2,
      sampler: sampler_lib.BoundSampler,
      mesh: jax.sharding.Mesh,
  ):
    """Args:
    spec: what is compared.
    model: functions of the model.
    sampler: what the weights are for.
    mesh: that the learner computes on.
    """
    self._model, self._sampler, self._mesh = model, sampler, mesh
    self._alarm = spec.threshold(model)
    self._tokens_BT = probe_tokens(spec, model, mesh, sampler.mesh)

  def __call__(
      self, params: models.Params
  ) -> tuple[models.Params, types.Metrics]:
    """(weights for the sampler, how far the two sides are apart).

    The weights are arrays of their own, which no update touches.

    Args:
      params: of the policy, as the learner has them.
    """
    weights = self._sampler.prepare(params)
    return weights, self.check(params, weights)

  def check(
      self, params: models.Params, weights: models.Params
  ) -> types.Metrics:
    """'sync/' metrics; warns if the weights cannot be those of `params`."""
    with sharding.use(self._mesh):
      ours = _learner_logits(self._model, params, self._tokens_BT)
    with sharding.use(self._sampler.mesh):
      theirs = _sampler_logits(self._model, weights, self._tokens_BT)
      found = jax.device_get(_compare(ours, theirs))
    metrics = {f'sync/{name}': float(x) for name, x in found.items()}
    if self._alarm and not metrics['sync/error'] < self._alarm:
      logging.warning(
          'the logits of the sampler differ from those of the learner by %.3g'
          ' of their size (mean |log p| gap %.3g), at least'
          ' SyncProbe.alarm_error = %g: what is sampled is not the policy that'
          ' is trained. If rounding is meant to be this coarse'
          ' (PolicySource.compute_dtype, PolicySource.int8_rollout), raise it;'
          ' else weights were lost on their way to the sampler',
          *(metrics['sync/error'], metrics['sync/gap_mean'], self._alarm),
      )
    return metrics


def probe_tokens(
    spec: SyncProbe, model: qwen2.Qwen2, *meshes: jax.sharding.Mesh | None
) -> np.ndarray:
  """Ids [B, T], the same in every run; every mesh divides their rows."""
  parts = [sharding.ways(m, 'batch') for m in meshes if m is not None]
  unit = math.lcm(*parts)
  shape = -(-spec.rows // unit) * unit, spec.tokens
  drawn_BT = np.random.default_rng(0).integers(
      model.config.vocab_size, size=shape
  )
  return drawn_BT.astype(np.int32)


@functools.partial(jax.jit, static_argnums=0)
def _learner_logits(
    model: qwen2.Qwen2, params: models.Params, tokens_BT: jax.Array
) -> jax.Array:
  """As the scorer and the update compute them, at every fourth position."""
  place_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
  hidden_BTD = model.hidden(
      params, tokens_BT, place_BT, jnp.ones_like(tokens_BT)
  )
  return model.logits(params, hidden_BTD[:, _STRIDE - 1 :: _STRIDE])


@functools.partial(jax.jit, static_argnums=0)
def _sampler_logits(
    model: qwen2.Qwen2, weights: models.Params, tokens_BT: jax.Array
) -> jax.Array:
  """As prefill and decoding compute them, in a cache of the probe's own."""
  rows, length = tokens_BT.shape
  hidden_BTD, _ = model.extend(
      weights,
      model.init_cache(rows, length),
      tokens_BT,
      jnp.zeros(rows, jnp.int32),
      jnp.arange(rows),
  )
  return model.logits(weights, hidden_BTD[:, _STRIDE - 1 :: _STRIDE])


@jax.jit
def _compare(ours_BTV: jax.Array, theirs_BTV: jax.Array) -> types.Metrics:
  """The error of `SyncProbe`, the KL divergence, and |delta log p|.

  The last is of the learner's likeliest token, its mean and its largest.
  """
  less_mean = lambda x: x - x.mean(axis=-1, keepdims=True)
  size = jnp.sum(less_mean(ours_BTV) ** 2)
  apart = jnp.sum(less_mean(ours_BTV - theirs_BTV) ** 2)
  log_p, log_q = map(jax.nn.log_softmax, (ours_BTV, theirs_BTV))
  kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
  likeliest = jnp.argmax(log_p, axis=-1)[..., None]
  gap = jnp.abs(jnp.take_along_axis(log_p - log_q, likeliest, axis=-1))
  return {
      # No logits differ where all are equal, such as with weights of 0.
      'error': jnp.where(apart == 0, 0.0, jnp.sqrt(apart / size)),
      'kl': kl.mean(),
      'gap_mean': gap.mean(),
      'gap_max': gap.max(),
  }
