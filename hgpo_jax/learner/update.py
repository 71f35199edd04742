"""One optimizer update from one minibatch, a micro-batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from hgpo_jax import sharding
from hgpo_jax import types
from hgpo_jax.learner import arrays
from hgpo_jax.learner import optimizer as optimizer_lib
from hgpo_jax.learner import scorer
from hgpo_jax.learner import train_state
from hgpo_jax.losses import aggregate
from hgpo_jax.losses import ppo
from hgpo_jax.losses import token_logprobs
from hgpo_jax.models import base
from hgpo_jax.models import lora

Metrics = dict[str, jax.Array]

# XLA's default on CPU runs what it can side by side and holds it all at once.
_LEAST_MEMORY = {
    'xla_cpu_scheduler_type': 'CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED'
}


class Update:
  """update(state, minibatch) -> (state, metrics); eats its state.

  A minibatch is a sequence of micro-batches, which may differ in T and R: each
  shape is one compilation. Their gradients and metrics are added up in
  float32, each divided by what the whole minibatch counts, so that how it is
  cut changes nothing. A gradient that is not finite changes nothing but the
  count of skipped updates. Metrics stay on the device.

  Args:
    model: functions of the policy.
    optimizer: from gradients to changes.
    loss: the objective.
    temperature: that responses were sampled at.
    mesh: where everything lies; None for one device.
    frozen: what the parameters of the state are an adapter to; None where they
      are the whole policy.
    chunk_tokens: response tokens whose logits are held at once.

  Raises:
    ValueError: the temperature is not above 0.
  """

  def __init__(
      self,
      model: base.LanguageModel,
      optimizer: optimizer_lib.AdamW,
      loss: ppo.PPOLoss,
      *,
      temperature: float,
      mesh: jax.sharding.Mesh | None = None,
      frozen: lora.Frozen | None = None,
      chunk_tokens: int = token_logprobs.CHUNK_TOKENS,
  ):
    if temperature <= 0:
      raise ValueError(
          f'training temperature is {temperature}; expected above 0: the ratio'
          ' is taken between distributions that tokens were sampled from.'
      )

    def share(params, frozen_params, batch, denominators):
      if frozen is not None:
        params = frozen.spec.attach(frozen_params, params)
      return micro_batch_loss(
          model, loss, temperature, params, batch, denominators, chunk_tokens
      )

    self._gradient = jax.grad(share, has_aux=True)
    # An argument of the programs, lest they hold it as a constant.
    self._frozen_params = None if frozen is None else frozen.params
    self._optimizer = optimizer
    self._count = jax.jit(loss.denominators)
    self._mesh = mesh
    self._programs: Programs | None = None

  @property
  def compilations(self) -> int:
    """How many shapes of micro-batches were compiled for so far."""
    return self._programs.add._cache_size() if self._programs else 0

  def __call__(
      self,
      state: train_state.TrainState,
      minibatch: Sequence[types.PolicyBatch],
  ) -> tuple[train_state.TrainState, Metrics]:
    denominators = functools.reduce(
        operator.add,
        (
            self._count(
                part.rollout.action_mask_BR,
                part.rollout.row_weight_B,
                part.rollout.step_BR,
            )
            for part in minibatch
        ),
    )
    with sharding.use(self._mesh):
      sums = None
      for part in minibatch:
        batch = arrays.put(part, self._mesh)
        if self._programs is None:
          self._programs = self.programs(state, batch, denominators)
        with sharding.launching():
          if sums is None:
            sums = self._programs.zeros()
          sums = self._programs.add(
              state.params, sums, self._frozen_params, batch, denominators
          )
      return self._apply(state, sums)

  def _apply(
      self, state: train_state.TrainState, sums: tuple[base.Params, Metrics]
  ) -> tuple[train_state.TrainState, Metrics]:
    """Fetches moments that lie on the host only now that gradients are there."""
    home = jax.tree.map(lambda x: x.sharding, state.opt_state)
    near = jax.tree.map(train_state.device_sharding, home)
    moved = lambda state, to: dataclasses.replace(
        state, opt_state=train_state.move(state.opt_state, to)
    )
    with sharding.launching():
      state, metrics = self._programs.apply(moved(state, near), *sums)
    return moved(state, home), metrics

  def programs(
      self,
      state: train_state.TrainState,
      batch: types.PolicyBatch,
      denominators: aggregate.Denominators,
  ) -> Programs:
    """The programs for states that lie on the devices as this one does."""
    shapes = jax.eval_shape(
        self._gradient, state.params, self._frozen_params, batch, denominators
    )
    transform = self._optimizer.make()

    def zeros():
      return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)

    def add(params, sums, frozen_params, batch, denominators):
      more = self._gradient(params, frozen_params, batch, denominators)
      return jax.tree.map(jnp.add, sums, more)

    def apply(state, grads, metrics):
      return _apply(self._optimizer, transform, state, grads, metrics)

    # Pinned, since propagation may choose other shardings than the state's.
    where = jax.tree.map(
        lambda x: train_state.device_sharding(x.sharding), state
    )
    sums = (where.params, None)
    return Programs(
        jax.jit(zeros, out_shardings=sums),
        jax.jit(
            add,
            out_shardings=sums,
            donate_argnums=1,
            compiler_options=_compiler_options(state),
        ),
        jax.jit(apply, out_shardings=(where, None), donate_argnums=0),
    )


def _compiler_options(state: train_state.TrainState) -> dict[str, str] | None:
  devices = state.updates.sharding.device_set
  (platform,) = {device.platform for device in devices}
  return _LEAST_MEMORY if platform == 'cpu' else None


class Programs(NamedTuple):
  """The jitted parts of an update; sums are (gradient, metrics)."""

  zeros: Callable[..., Any]
  add: Callable[..., Any]
  apply: Callable[..., Any]


def micro_batch_loss(
    model: base.LanguageModel,
    loss: ppo.PPOLoss,
    temperature: float,
    params: base.Params,
    batch: types.PolicyBatch,
    denominators: aggregate.Denominators,
    chunk_tokens: int = token_logprobs.CHUNK_TOKENS,
) -> tuple[jax.Array, Metrics]:
  """A micro-batch's share of the minibatch's loss, and of its metrics."""
  logprobs_BR, entropy_BR = scorer.response_logprobs(
      model, params, batch.rollout, temperature, chunk_tokens
  )
  return loss(
      logprobs_BR,
      batch.old_logprobs_BR,
      batch.ref_logprobs_BR,
      entropy_BR,
      batch.advantage_BR,
      batch.rollout.action_mask_BR,
      batch.rollout.row_weight_B,
      denominators,
      batch.rollout.step_BR,
      batch.rollout.sampler_logprobs_BR,
  )


def _apply(
    optimizer: optimizer_lib.AdamW,
    transform: optax.GradientTransformation,
    state: train_state.TrainState,
    grads: base.Params,
    metrics: Metrics,
) -> tuple[train_state.TrainState, Metrics]:
  norm = optax.global_norm(grads)
  finite = jnp.isfinite(norm)
  changes, opt_state = transform.update(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, changes)
  metrics = {
      **metrics,
      'update/grad_norm': norm,
      'update/learning_rate': optimizer.learning_rate_at(state.updates),
      'update/skipped': 1.0 - finite,
      'update/frac_params_changed': _frac_changed(state.params, params),
  }
  state = train_state.TrainState(params, opt_state, state.updates + finite)
  return state, metrics


def _frac_changed(old: base.Params, new: base.Params) -> jax.Array:
  """Fraction of parameters that are not bit for bit what they were."""
  sizes = [x.size for x in jax.tree.leaves(old)]
  means = [
      jnp.mean(a != b, dtype=jnp.float32)
      for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new))
  ]
  return sum(m * (n / sum(sizes)) for m, n in zip(means, sizes))
