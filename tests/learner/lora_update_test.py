"""Updates of an adapter: what is trained, what is not, and by what gradient."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from hgpo_jax import sharding
from hgpo_jax.learner import optimizer as optimizer_lib
from hgpo_jax.learner import train_state
from hgpo_jax.learner import update as update_lib
from hgpo_jax.losses import ppo
from hgpo_jax.models import lora
from tests.learner import common

_SGD = optimizer_lib.AdamW(
    learning_rate=1e-3, weight_decay=0.0, max_grad_norm=1e9
)
SPEC = lora.LoRA(rank=2, alpha=4.0)


def _gradient(state):
  adam = state.opt_state.inner[1][0]
  return jax.tree.map(lambda m: np.asarray(m) / (1 - _SGD.b1), adam.mu)


def _step(base, spec=None, mesh=None):
  """(gradient, metrics, state) of one update, of an adapter with `spec`."""
  frozen, params = None, base
  if spec is not None:
    frozen, params = lora.Frozen(spec, base), spec.init(base, jax.random.key(0))
    if mesh is not None:
      axes = spec.logical_axes(common.MODEL.logical_axes())
      params = sharding.put(params, sharding.param_shardings(mesh, axes))
  update = update_lib.Update(
      common.MODEL,
      _SGD,
      ppo.PPOLoss(),
      temperature=1.0,
      mesh=mesh,
      frozen=frozen,
  )
  state = train_state.create(params, _SGD.make())
  state, metrics = update(state, [common.policy_batch(8)])
  return _gradient(state), jax.device_get(metrics), state


def test_a_fresh_adapter_has_the_loss_and_gradient_of_its_base():
  base = common.params()
  full, full_metrics, _ = _step(base)
  grads, metrics, state = _step(base, SPEC)
  for name in metrics:
    if name.startswith(('loss/', 'policy/')):
      np.testing.assert_allclose(
          metrics[name], full_metrics[name], atol=1e-6, err_msg=name
      )
  fresh = SPEC.init(base, jax.random.key(0))
  for group, parts in fresh.items():
    for name, low in parts.items():
      dw_LIO = 2.0 * full['layers'][group][name]['kernel']
      db_LrO = np.einsum('lir,lio->lro', low['a'], dw_LIO)
      got = grads[group][name]
      np.testing.assert_allclose(got['b'], db_LrO, rtol=1e-4, atol=1e-5)
      assert not got['a'].any()  # B is 0.
  # Nothing of the base is in the state: neither weights nor moments.
  leaves = jax.tree.leaves(state)
  adapter = sum(x.size for x in jax.tree.leaves(fresh))
  assert sum(x.size for x in leaves if x.ndim) == 3 * adapter
  assert metrics['update/frac_params_changed'] > 0.1


def test_eight_devices_train_the_same_adapter():
  if len(jax.devices()) < 8:
    pytest.skip('needs 8 devices')
  mesh = sharding.Mesh(data=2, fsdp=2, tensor=2).make_mesh()
  where = sharding.param_shardings(mesh, common.MODEL.logical_axes())
  base = sharding.put(common.params(), where)
  want, want_metrics, _ = _step(common.params(), SPEC)
  got, metrics, _ = _step(base, SPEC, mesh)
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
      *(got, want),
  )
  np.testing.assert_allclose(
      metrics['loss/total'], want_metrics['loss/total'], rtol=1e-5
  )
