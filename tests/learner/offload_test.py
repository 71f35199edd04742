"""Moments that lie on the host: where, through updates and checkpoints."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax import sharding
from hgpo_jax.io import checkpoint
from hgpo_jax.learner import optimizer as optimizer_lib
from hgpo_jax.learner import train_state

_SPEC = optimizer_lib.AdamW(moments_on='host')


def _state(moments_on='host'):
  mesh = sharding.Mesh(fsdp=4).make_mesh(jax.devices()[:4])
  axes = {'w': ('embed', 'mlp'), 'b': ('norm',)}
  params = sharding.put(
      {'w': np.ones((8, 4)), 'b': np.ones(3)},
      sharding.param_shardings(mesh, axes),
  )
  return train_state.create(params, _SPEC.make(), moments_on)


def _kinds(state):
  """Memory kinds of (parameters, moments, count)."""
  adam = state.opt_state.inner[1][0]
  kinds = lambda tree: {x.sharding.memory_kind for x in jax.tree.leaves(tree)}
  return kinds(state.params), kinds((adam.mu, adam.nu)), kinds(adam.count)


def test_moments_alone_lie_on_the_host_split_as_the_parameters(tmp_path):
  near = jax.devices()[0].default_memory().kind
  state = _state()
  assert _kinds(state) == ({near}, {'pinned_host'}, {near})
  adam = state.opt_state.inner[1][0]
  assert adam.nu['w'].sharding.spec == state.params['w'].sharding.spec

  moved = jax.tree.map(lambda x: x + 1, adam.mu)
  moved = train_state.move(moved, jax.tree.map(lambda x: x.sharding, adam.mu))
  inner = (state.opt_state.inner[0], (adam._replace(mu=moved),))
  changed = dataclasses.replace(
      state, opt_state=state.opt_state._replace(inner=inner)
  )
  saved = checkpoint.Checkpoints(tmp_path / 'c', keep=1)
  saved.save(1, changed, {})
  saved.close()
  template = dataclasses.replace(
      changed, opt_state=jax.tree.map(lambda x: x, changed.opt_state)
  )
  restored = checkpoint.Checkpoints(tmp_path / 'c', keep=1).restore(template)
  assert _kinds(restored.state) == _kinds(changed)
  jax.tree.map(np.testing.assert_array_equal, restored.state, changed)


def test_auto_leaves_them_where_moving_gains_nothing():
  assert _kinds(_state('auto')) == _kinds(_state('device'))


def test_devices_without_such_memory_are_refused(monkeypatch):
  monkeypatch.setattr(train_state, '_HOST', 'another_host')
  with pytest.raises(ValueError, match="needs devices with 'another_host' mem"):
    train_state.create({'w': jnp.ones(3)}, _SPEC.make(), 'host')
  state = train_state.create({'w': jnp.ones(3)}, _SPEC.make(), 'auto')
  assert not state.updates
