"""A run's policy as a Hugging Face folder."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax.experiment import loop
from hgpo_jax.experiment import saved_policy
from hgpo_jax.models import hf
from hgpo_jax.models import qwen2
from hgpo_jax.rollout import tokenizer as tokenizer_lib
from tests.experiment import runs


def _logits(model, params, ids) -> np.ndarray:
  tokens_BT = jnp.asarray([ids], jnp.int32)
  positions_BT = jnp.arange(len(ids))[None]
  hidden = model.hidden(
      params, tokens_BT, positions_BT, jnp.ones_like(tokens_BT)
  )
  return np.asarray(model.logits(params, hidden))


def test_exported_folder_is_the_policy_of_the_run(
    policy, finished, one_device, tmp_path
):
  out = tmp_path / 'exported'
  process = runs.Process(
      'export', [f'--run_dir={finished}', f'--out={out}'], tmp_path / 'log'
  )
  assert process.wait() == 0, process.output
  assert f'policy after 2 iterations: {out}' in process.output

  spec = runs.load(policy, 'Experiment.iterations = 2')
  model, params, iteration = saved_policy.newest_policy(spec, finished)
  assert iteration == 2
  shapes = hf.read_config(out)
  assert shapes == hf.read_config(policy)
  loaded = hf.load_params(out, shapes)
  jax.tree.map(np.testing.assert_array_equal, loaded, params)

  tokenizer = tokenizer_lib.ChatTokenizer(out)
  ids = tokenizer.chat('Task: open box 2')
  assert ids == tokenizer_lib.ChatTokenizer(policy).chat('Task: open box 2')
  again = _logits(qwen2.Qwen2(shapes), loaded, ids)
  np.testing.assert_array_equal(again, _logits(model, params, ids))
  start = _logits(model, hf.load_params(policy, shapes), ids)
  assert np.abs(again - start).max() > 1e-3  # It has learned something.

  # The folder is a policy to go on from, and is not overwritten.
  process = runs.Process(
      'export', [f'--run_dir={finished}', f'--out={out}'], tmp_path / 'log'
  )
  assert process.wait() == 1
  assert f'error: {out} exists and is not an empty folder' in process.output
  assert 'Traceback' not in process.output


def test_a_run_without_a_checkpoint_has_nothing_to_export(
    policy, one_device, tmp_path
):
  spec = runs.load(policy)
  folder = tmp_path / 'checkpoints'
  with pytest.raises(loop.FAILURES, match='has no checkpoints; give the'):
    saved_policy.newest_policy(spec, tmp_path)
  folder.mkdir()
  with pytest.raises(loop.FAILURES, match='holds no complete checkpoint yet'):
    saved_policy.newest_policy(spec, tmp_path)
  assert not list(folder.iterdir())  # Reading leaves nothing behind.
