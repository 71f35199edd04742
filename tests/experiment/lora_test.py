"""Runs that train an adapter, and what makes updates small, in whole runs."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from hgpo_jax.experiment import loop
from hgpo_jax.experiment import saved_policy
from hgpo_jax.io import checkpoint
from hgpo_jax.models import hf
from tests.experiment import runs

LORA = (
    'Experiment.lora = @LoRA()',
    'LoRA.rank = 4',
    'LoRA.alpha = 8.0',
    'AdamW.learning_rate = 1e-2',
)
SMALL = (
    'Minibatches.packing = "pack"',
    'Minibatches.length_buckets = (288,)',
    'Minibatches.response_buckets = (48,)',
    'Minibatches.micro_batch_steps = 2',
    'Minibatches.logits_tokens = 24',
    'AdamW.first_moment_dtype = "bfloat16"',
    'PolicySource.remat = True',
)


@pytest.fixture(scope='module')
def trained(policy, tmp_path_factory):
  """Folder of a run of two iterations with an adapter."""
  run_dir = tmp_path_factory.mktemp('lora')
  runs.train(policy, run_dir, 'Experiment.iterations = 2', *LORA)
  return run_dir


def test_an_adapter_learns_from_its_base(trained):
  first, second, _ = runs.lines(trained)
  # The reference is the policy with the adapter off.
  np.testing.assert_allclose(first['policy/ratio'], 1.0, atol=5e-2)
  assert first['logprob_gap/max'] < 1e-4  # Sampled with merged weights.
  assert first['update/grad_norm'] > 1e-4
  assert second['policy/ref_kl'] > first['policy/ref_kl'] >= 0.0


def test_checkpoints_hold_the_adapter_alone(policy, trained):
  spec = runs.load(policy, 'Experiment.iterations = 2', *LORA)
  model, params, iteration = saved_policy.newest_policy(spec, trained)
  assert iteration == 2
  base = hf.load_params(policy, model.config)
  assert jax.tree.structure(params) == jax.tree.structure(base)
  same = jax.tree.map(np.array_equal, params, base)
  changed = {name for name in same if not all(jax.tree.leaves(same[name]))}
  assert changed == {'layers'}
  same = same['layers']
  assert not any(part['kernel'] for part in same['mlp'].values())
  assert same['attention']['q']['bias'] and same['mlp_norm']['scale']
  folder = trained / 'checkpoints' / '2' / 'params'
  saved = sum(p.stat().st_size for p in folder.rglob('*') if p.is_file())
  assert saved < sum(x.nbytes for x in jax.tree.leaves(base)) / 2


def test_another_kind_of_training_does_not_go_on(policy, trained):
  spec = runs.load(policy, 'Experiment.iterations = 2')
  with pytest.raises(checkpoint.CheckpointError, match='configured otherwise'):
    saved_policy.newest_policy(spec, trained)


def test_an_adapter_belongs_to_its_base(policy, trained, tmp_path):
  shapes = hf.read_config(policy)
  params = hf.load_params(policy, shapes)
  params['final_norm']['scale'] += 1e-3
  hf.save_folder(tmp_path / 'other', shapes, params, policy)
  spec = runs.load(tmp_path / 'other', 'Experiment.iterations = 2', *LORA)
  with pytest.raises(loop.FAILURES, match='are not those that the run began w'):
    saved_policy.newest_policy(spec, trained)


def test_an_adapter_can_be_exported(trained, policy, tmp_path):
  spec = runs.load(policy, 'Experiment.iterations = 2', *LORA)
  model, params, _ = saved_policy.newest_policy(spec, trained)
  hf.save_folder(tmp_path / 'out', model.config, params, spec.policy.path)
  loaded = hf.load_params(tmp_path / 'out', model.config)
  jax.tree.map(np.testing.assert_array_equal, loaded, params)


@pytest.mark.parametrize('more', [(), (*LORA, *SMALL)], ids=['plain', 'all'])
def test_nothing_is_compiled_after_the_first_iteration(
    more, policy, one_device, tmp_path, monkeypatch
):
  compiled, counts = [], []

  def listen(name, unused_seconds, **unused):
    if name.endswith('backend_compile_duration'):
      compiled.append(name)

  def iterate(*args):
    counts.append(len(compiled))
    result = plain(*args)
    counts.append(len(compiled))
    return result

  plain = loop._iterate
  monkeypatch.setattr(loop, '_iterate', iterate)
  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    runs.train(
        policy,
        tmp_path,
        'Experiment.iterations = 5',
        'Experiment.save_every = 1',
        'Evaluation.every = 1',
        'Sampler.prompt_buckets = (128,)',
        *more,
    )
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)
  assert len(counts) == 10 and counts[1] > counts[0]
  # Before the second, so with what evaluating and saving needs.
  assert counts[-1] == counts[2], counts
