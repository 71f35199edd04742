"""One optimizer update from one minibatch, a micro-batch at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hgpo_jax import types
from hgpo_jax.learner import arrays
from hgpo_jax.learner import optimizer as optimizer_lib
from hgpo_jax.learner import scorer
from hgpo_jax.learner import train_state
from hgpo_jax.losses import aggregate
from hgpo_jax.losses import ppo
from hgpo_jax.models import base

Metrics = dict[str, jax.Array]
Update = Callable[
    [train_state.TrainState, types.PolicyBatch],
    tuple[train_state.TrainState, Metrics],
]


def make_update(
    model: base.LanguageModel,
    optimizer: optimizer_lib.AdamW,
    loss: ppo.PPOLoss,
    *,
    temperature: float,
    micro_batch_rows: int,
    mesh: jax.sharding.Mesh | None = None,
) -> Update:
  """Returns update(state, minibatch) -> (state, metrics); eats its state.

  Gradients and metrics of micro-batches of `micro_batch_rows` rows (over the
  whole mesh) are added up in float32; each is divided by what the whole
  minibatch counts, so neither depends on how it is cut. Trailing micro-batches
  of padding alone are not run. A gradient that is not finite changes nothing
  but the count of skipped updates. Metrics stay on the device.
  """
  if temperature <= 0:
    raise ValueError(
        f'training temperature is {temperature}; expected above 0: the ratio '
        'is taken between distributions that tokens were sampled from.'
    )
  transform = optimizer.make()

  def step(state, micro_batches):
    grads, metrics = _accumulate(
        model, loss, temperature, state.params, micro_batches
    )
    return _apply(optimizer, transform, state, grads, metrics)

  jitted: dict[Any, Callable[..., Any]] = {}

  def update(state, minibatch):
    stacked = arrays.put_micro_batches(minibatch, micro_batch_rows, mesh)
    # Pinned, since propagation may choose other shardings for the new state.
    where = jax.tree.map(lambda x: x.sharding, state)
    key = tuple(jax.tree.leaves(where))
    if key not in jitted:
      jitted[key] = jax.jit(
          step, donate_argnums=0, out_shardings=(where, None)
      )
    with scorer.mesh_context(mesh):
      return jitted[key](state, stacked)

  update.compilations = lambda: sum(f._cache_size() for f in jitted.values())
  return update


def micro_batch_loss(
    model: base.LanguageModel,
    loss: ppo.PPOLoss,
    temperature: float,
    params: base.Params,
    batch: types.PolicyBatch,
    denominators: aggregate.Denominators,
) -> tuple[jax.Array, Metrics]:
  """A micro-batch's share of the minibatch's loss, and of its metrics."""
  logprobs_BR, entropy_BR = scorer.response_logprobs(
      model, params, batch.rollout, temperature
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
  )


def _accumulate(
    model: base.LanguageModel,
    loss: ppo.PPOLoss,
    temperature: float,
    params: base.Params,
    micro_batches: types.PolicyBatch,
) -> tuple[base.Params, Metrics]:
  """Sums gradients and metrics over micro-batches, arrays [M, B, ...]."""
  rollout = micro_batches.rollout
  merge = lambda x: x.reshape(-1, *x.shape[2:])
  denominators = loss.denominators(
      merge(rollout.action_mask_BR),
      merge(rollout.row_weight_B),
      merge(micro_batches.advantage_BR),
  )

  def share(params, batch):
    return micro_batch_loss(
        model, loss, temperature, params, batch, denominators
    )

  gradient = jax.grad(share, has_aux=True)
  first = jax.tree.map(lambda x: x[0], micro_batches)
  shapes = jax.eval_shape(gradient, params, first)
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)

  def body(index, sums):
    batch = jax.tree.map(lambda x: x[index], micro_batches)
    return jax.tree.map(jnp.add, sums, gradient(params, batch))

  # A bound that is data, not shape: one compilation serves any number of rows.
  live_M = jnp.any(rollout.row_weight_B > 0, axis=1)
  live = jnp.max(jnp.where(live_M, jnp.arange(live_M.shape[0]) + 1, 0))
  return jax.lax.fori_loop(0, live, body, zeros)


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
