"""A training run whose environments live in Ray actors."""

from __future__ import annotations

import importlib.util
from unittest import mock

import pytest

from hgpo_jax.experiment import workers
from tests.envs import toy
from tests.experiment import runs


def test_a_run_on_ray_is_the_run_on_this_machine(policy, one_device, tmp_path):
  if importlib.util.find_spec('ray') is None:
    pytest.skip("Ray is not installed: pip install 'hgpo-jax[ray]'")
  one = 'Experiment.iterations = 1'
  on_ray = ('Workers.ray_nodes = 2', 'Workers.processes = 1')
  runs.train(policy, tmp_path / 'here', one)
  runs.train(policy, tmp_path / 'there', one, *on_ray)
  here, there = (runs.lines(tmp_path / name) for name in ('here', 'there'))
  for line in there:
    assert line.pop('pool/nodes_lost') == 0.0
  assert here == there


def test_a_run_on_ray_that_is_not_installed(
    policy, one_device, tmp_path, monkeypatch
):
  monkeypatch.setattr(workers.ray_pool, 'importlib', mock.MagicMock())
  workers.ray_pool.importlib.util.find_spec.return_value = None
  run_dir = tmp_path / 'run'
  found = runs.main(*runs.arguments(policy, run_dir, 'Workers.ray_nodes = 2'))
  assert found.startswith(
      'error: Workers.ray_nodes is above 0, which needs Ray'
  )
  assert "pip install 'hgpo-jax[ray]'" in found and '\n' not in found
  assert not run_dir.exists()


def test_a_negative_number_of_nodes_is_refused():
  with pytest.raises(ValueError, match='ray_nodes >= 0, got 2, 0 and -1'):
    workers.Workers(ray_nodes=-1)


def test_pools_of_nothing_are_refused():
  with pytest.raises(
      ValueError, match=r'\(slots, workers, nodes\) = \(1, 0, 1'
  ):
    workers.ray_pool.RayPool(toy.ToySpec(), 1, 0, 1)
