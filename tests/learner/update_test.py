from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
import numpy as np
import pytest

from hgpo_jax import sharding
from hgpo_jax import types
from hgpo_jax.batch import minibatch
from hgpo_jax.io import checkpoint
from hgpo_jax.io import metrics as metrics_lib
from hgpo_jax.learner import optimizer as optimizer_lib
from hgpo_jax.learner import train_state
from hgpo_jax.learner import update as update_lib
from hgpo_jax.losses import aggregate
from hgpo_jax.losses import ppo
from tests.learner import common

# A plain step of size 1 in all but name: the update is the gradient.
_LOSS = ppo.PPOLoss()
_SGD = optimizer_lib.AdamW(
    learning_rate=1e-3, weight_decay=0.0, max_grad_norm=1e9
)


@functools.cache
def _made(loss, mesh=None, spec=_SGD):
  return update_lib.Update(common.MODEL, spec, loss, temperature=1.0, mesh=mesh)


def _fresh(spec=_SGD, params=None):
  params = common.params() if params is None else params
  return train_state.create(params, spec.make())


def _update(minibatch, loss=_LOSS, mesh=None, params=None):
  """(gradient, metrics, state) of one update from a fresh state."""
  if isinstance(minibatch, types.PolicyBatch):
    minibatch = [minibatch]
  state, metrics = _made(loss, mesh)(_fresh(params=params), minibatch)
  adam = state.opt_state.inner[1][0]
  grads = jax.tree.map(lambda m: np.asarray(m) / (1 - _SGD.b1), adam.mu)
  return grads, jax.device_get(metrics), state


def _assert_same(a, b, rtol=1e-5):
  """Equal to `rtol` of the gradient's largest entry."""
  largest = max(np.abs(x).max() for x in jax.tree.leaves(a))
  jax.tree.map(
      lambda x, y: np.testing.assert_allclose(
          x, y, atol=rtol * max(1.0, largest)
      ),
      *(a, b),
  )


def _cut(batch, order, rows):
  """The batch in this order, in micro-batches of `rows`, filled up."""
  order = np.asarray(order)
  return [
      minibatch.take(batch, order[i : i + rows], rows, common.SPEC)
      for i in range(0, len(order), rows)
  ]


def _assert_same_metrics(a, b):
  for name in a.keys() - {'update/frac_params_changed'}:
    np.testing.assert_allclose(
        a[name], b[name], rtol=1e-5, atol=1e-6, err_msg=name
    )


@pytest.mark.parametrize(
    'rows, order',
    [
        (8, [3, 1, 7, 0, 5, 2, 6, 4]),  # Permuted.
        (12, range(8)),  # Padded with rows of nothing.
        (4, range(8)),  # Two micro-batches.
        (2, range(8)),  # Four, of different lengths.
        (3, [6, 4, 3, 1, 7, 0, 5, 2]),  # All of it.
    ],
)
def test_loss_and_gradient_ignore_order_padding_and_micro_batches(rows, order):
  batch = common.policy_batch(8)
  grads, metrics, _ = _update(batch)
  assert metrics['update/grad_norm'] > 1e-2
  other, other_metrics, _ = _update(_cut(batch, order, rows))
  _assert_same(grads, other)
  _assert_same_metrics(metrics, other_metrics)


@pytest.mark.parametrize(
    'mode', [aggregate.SEQ_MEAN_TOKEN_SUM, aggregate.SEQ_MEAN_TOKEN_MEAN]
)
def test_other_aggregations_ignore_them_too(mode):
  loss = ppo.PPOLoss(aggregation=mode, entropy_coef=0.1)
  batch = common.policy_batch(8)
  grads, metrics, _ = _update(batch, loss)
  cut = _cut(batch, [6, 4, 3, 1, 7, 0, 5, 2], 3)
  other, other_metrics, _ = _update(cut, loss)
  _assert_same(grads, other)
  np.testing.assert_allclose(
      metrics['loss/total'], other_metrics['loss/total'], rtol=1e-5
  )


def test_padding_to_longer_rows_changes_nothing():
  batch = common.policy_batch(8)
  longer = dataclasses.replace(common.SPEC, length_buckets=(32,))
  grads, metrics, _ = _update(batch)
  padded = minibatch.take(batch, np.arange(8), 8, longer)
  shape = batch.rollout.tokens_BT.shape
  assert padded.rollout.tokens_BT.shape[1] == 32 > shape[1]
  other, other_metrics, _ = _update(padded)
  _assert_same(grads, other)
  np.testing.assert_allclose(
      metrics['loss/total'], other_metrics['loss/total'], atol=1e-6
  )


def test_garbage_on_padding_changes_no_bit():
  batch = common.policy_batch(8)
  mask_BR = batch.rollout.action_mask_BR
  spoil = lambda x: np.where(mask_BR, x, np.nan).astype(np.float32)
  spoiled = dataclasses.replace(
      batch,
      old_logprobs_BR=spoil(batch.old_logprobs_BR),
      ref_logprobs_BR=spoil(batch.ref_logprobs_BR),
      advantage_BR=spoil(batch.advantage_BR),
  )
  a, _, _ = _update(batch)
  b, metrics, _ = _update(spoiled)
  jax.tree.map(np.testing.assert_array_equal, a, b)
  assert metrics['update/skipped'] == 0


@pytest.mark.parametrize('packed', [False, True])
def test_eight_devices_equal_one(packed):
  if len(jax.devices()) < 8:
    pytest.skip('needs 8 devices')
  mesh = jax.make_mesh(
      (2, 2, 2), sharding.MESH_AXES, axis_types=(AxisType.Auto,) * 3
  )
  batch = common.policy_batch(8)
  parts = _cut(batch, range(8), 4)
  loss = ppo.PPOLoss()
  if packed:
    loss = ppo.PPOLoss(aggregation=aggregate.SEQ_MEAN_TOKEN_MEAN)
    spec = dataclasses.replace(
        common.SPEC, packing='pack', response_buckets=(8, 24)
    )
    (parts,) = minibatch.split(
        batch, spec, seed=0, iteration=0, epoch=0, rows=8
    )
    assert max(p.rollout.segment_ids_BT.max() for p in parts) > 1
  grads, metrics, _ = _update(parts, loss)
  where = sharding.param_shardings(mesh, common.MODEL.logical_axes())
  params = sharding.put(common.params(), where)
  other, other_metrics, state = _update(parts, loss, mesh=mesh, params=params)
  _assert_same(grads, other)
  _assert_same_metrics(metrics, other_metrics)
  found = jax.tree.map(lambda x: x.sharding, state.params)
  assert found == where


def test_a_batch_that_the_mesh_does_not_divide_is_refused():
  if len(jax.devices()) < 8:
    pytest.skip('needs 8 devices')
  mesh = sharding.Mesh(data=4, fsdp=2).make_mesh()
  with pytest.raises(ValueError, match='6 is not divisible by 8'):
    _update(common.policy_batch(6), mesh=mesh)


def test_exactly_the_response_tokens_count_the_first_included():
  """P positions predict the R response tokens: from P-1 to P+R-2."""
  rollout = minibatch.policy_batch(
      common.policy_batch(1).rollout, np.ones(1, np.float32), np.zeros((1, 8))
  ).rollout
  (step,) = common.steps(1)
  prompt, response = len(step.prompt_ids), len(step.response_ids)
  probe_BTD = jnp.zeros((1, rollout.tokens_BT.shape[1], 16))

  def total(probe_BTD):
    model = _Probed(common.MODEL, probe_BTD)
    return update_lib.scorer.response_logprobs(
        model, common.params(), rollout, 1.0
    )[0].sum()

  used_T = np.abs(jax.grad(total)(probe_BTD)[0]).sum(-1) > 0
  expected = range(prompt - 1, prompt + response - 1)
  np.testing.assert_array_equal(np.flatnonzero(used_T), list(expected))


@dataclasses.dataclass(frozen=True)
class _Probed:
  """The model with something added to its final hidden states."""

  model: object
  probe_BTD: jax.Array

  def hidden(self, *args):
    return self.model.hidden(*args) + self.probe_BTD

  def logits(self, *args):
    return self.model.logits(*args)


def _on_policy(advantage: float | None = None) -> types.PolicyBatch:
  batch = common.policy_batch(8)
  logprobs_BR = common.logprobs(batch.rollout)
  if advantage is None:
    # Centred over tokens, so that the value of the loss is 0.
    mask = batch.rollout.action_mask_BR
    advantage_BR = np.where(mask, batch.advantage_BR, 0)
    advantage_BR -= np.where(mask, advantage_BR.sum() / mask.sum(), 0)
  else:
    advantage_BR = np.full_like(batch.advantage_BR, advantage)
  return dataclasses.replace(
      batch, old_logprobs_BR=logprobs_BR, advantage_BR=advantage_BR
  )


def test_on_policy_the_ratio_is_one_and_the_gradient_is_not_zero():
  loss = ppo.PPOLoss(entropy_coef=0.0, kl_coef=0.0)
  _, metrics, _ = _update(_on_policy(), loss=loss)
  np.testing.assert_allclose(metrics['policy/ratio'], 1.0, atol=1e-6)
  np.testing.assert_allclose(metrics['loss/total'], 0.0, atol=1e-6)
  assert metrics['policy/clip_frac'] == 0
  assert metrics['update/grad_norm'] > 1e-2


def test_without_advantage_only_the_kl_has_a_gradient():
  batch = _on_policy(advantage=0.0)
  still = ppo.PPOLoss(entropy_coef=0.0, kl_coef=0.0)
  assert _update(batch, loss=still)[1]['update/grad_norm'] == 0
  pulled = dataclasses.replace(still, kl_coef=0.1)
  assert _update(batch, loss=pulled)[1]['update/grad_norm'] > 1e-3


def test_an_infinite_gradient_is_skipped_and_counted():
  batch = common.policy_batch(8)
  broken = dataclasses.replace(
      batch, advantage_BR=np.full_like(batch.advantage_BR, np.inf)
  )
  update = _made(ppo.PPOLoss())
  state, _ = update(_fresh(), [batch])
  before = jax.device_get(state)
  state, metrics = update(state, [batch, broken])
  assert metrics['update/skipped'] == 1 and state.opt_state.skipped == 1
  assert metrics['update/frac_params_changed'] == 0
  after = jax.device_get(state)
  jax.tree.map(np.testing.assert_array_equal, before.params, after.params)
  jax.tree.map(
      np.testing.assert_array_equal,
      before.opt_state.inner,
      after.opt_state.inner,
  )
  assert after.updates == 1
  state, metrics = update(state, [batch])
  assert metrics['update/skipped'] == 0 and state.updates == 2


def test_no_compilation_beyond_the_buckets():
  update = update_lib.Update(common.MODEL, _SGD, ppo.PPOLoss(), temperature=1.0)
  state = _fresh()
  shapes = set()
  rng = np.random.default_rng(0)
  for seed in range(20):
    batch = common.policy_batch(
        int(rng.integers(1, 9)), seed, longest=int(rng.integers(9, 33))
    )
    (part,) = minibatch.split(
        batch, common.SPEC, seed=0, iteration=seed, epoch=0, rows=4
    )
    shapes |= {micro.rollout.tokens_BT.shape for micro in part}
    state, _ = update(state, part)
  assert len(shapes) == 3
  assert update.compilations == 3


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
  spec = optimizer_lib.AdamW(
      learning_rate=1e-3, warmup_steps=3, schedule='cosine', decay_steps=8
  )
  batches = [common.policy_batch(8, seed) for seed in range(6)]
  update = _made(ppo.PPOLoss(), spec=spec)

  def run(state, batches):
    rates = []
    for batch in batches:
      state, metrics = update(state, [batch])
      rates.append(float(metrics['update/learning_rate']))
    return state, rates

  whole, rates = run(_fresh(spec), batches)
  half, _ = run(_fresh(spec), batches[:3])
  checkpoint.Checkpoints(tmp_path).save(2, half, {})
  restored = checkpoint.Checkpoints(tmp_path).restore(_fresh(spec))
  resumed, resumed_rates = run(restored.state, batches[3:])
  assert resumed_rates == rates[3:]
  jax.tree.map(np.testing.assert_array_equal, whole, resumed)


def test_metric_names_are_known():
  _, metrics, _ = _update(common.policy_batch(8))
  for name in metrics:
    metrics_lib.check_name(name)
