"""Live comparison with transformers; `make test-parity` runs it."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from hgpo_jax.models import hf
from hgpo_jax.models import module

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')
# Imported last: it needs torch itself.
make_golden = pytest.importorskip('tests.parity.make_golden')


@pytest.fixture(scope='module', params=['tied', 'untied'])
def reference(request):
  return make_golden.make_model(tied=request.param == 'tied', seed=1)


@pytest.fixture(scope='module')
def folder(reference, tmp_path_factory):
  path = tmp_path_factory.mktemp('reference') / 'model'
  reference.save_pretrained(path)
  return path


@pytest.mark.parametrize('padded', [False, True])
def test_logits_agree(reference, folder, padded):
  batch = make_golden.make_batch(seed=2)
  if not padded:
    batch['valid_BT'] = np.ones_like(batch['valid_BT'])
  expected = make_golden.logits_of(reference, batch)
  net = module.Qwen2Module.from_pretrained(folder)
  logits = net(batch['tokens_BT'], batch['valid_BT'])
  valid_BT = batch['valid_BT']
  np.testing.assert_allclose(
      logits[valid_BT], expected[valid_BT], rtol=0, atol=1e-5
  )


def test_logits_agree_at_late_positions(reference, folder):
  tokens_BT = np.random.default_rng(0).integers(1, 96, (1, 400))
  batch = {'tokens_BT': tokens_BT, 'valid_BT': np.ones((1, 400), bool)}
  net = module.Qwen2Module.from_pretrained(folder)
  np.testing.assert_allclose(
      net(tokens_BT),
      make_golden.logits_of(reference, batch),
      rtol=0,
      atol=3e-5,
  )


@pytest.mark.parametrize('max_shard_bytes', [30_000, 10**9])
def test_export_loads_in_transformers(
    reference, folder, tmp_path, max_shard_bytes
):
  config = hf.read_config(folder)
  params = hf.load_params(folder, config)
  hf.save_folder(
      tmp_path / 'out', config, params, max_shard_bytes=max_shard_bytes
  )
  loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
      tmp_path / 'out', output_loading_info=True, dtype='auto'
  )
  assert not any(info.values()), info
  assert type(loaded) is type(reference)
  assert loaded.dtype == torch.float32
  state = loaded.state_dict()
  assert state.keys() == reference.state_dict().keys()
  for name, value in reference.state_dict().items():
    assert torch.equal(state[name], value), name
  loaded.save_pretrained(tmp_path / 'again')
  assert hf.read_config(tmp_path / 'again') == config
  again = hf.load_params(tmp_path / 'again', config)
  jax.tree.map(np.testing.assert_array_equal, again, params)


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_half_precision_export(folder, tmp_path, dtype):
  config = hf.read_config(folder)
  params = hf.load_params(folder, config)
  hf.save_folder(tmp_path / 'out', config, params, dtype=dtype)
  loaded = transformers.AutoModelForCausalLM.from_pretrained(
      tmp_path / 'out', dtype='auto'
  )
  assert loaded.dtype == getattr(torch, dtype)
  ours = hf.load_params(tmp_path / 'out', config)
  np.testing.assert_array_equal(
      ours['embed']['embedding'],
      loaded.model.embed_tokens.weight.detach().float().numpy(),
  )
