"""Hugging Face folders: bit for bit round trips, and every refusal."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from hgpo_jax.models import hf
from hgpo_jax.models import weight_files

_GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'models'
_HEAD = 'lm_head.weight'
_EMBEDDING = 'model.embed_tokens.weight'


@pytest.fixture(params=['tied', 'untied'])
def source(request) -> pathlib.Path:
  return _GOLDEN / request.param


def _copy(tmp_path, name='tied') -> pathlib.Path:
  folder = tmp_path / 'model'
  shutil.copytree(_GOLDEN / name, folder)
  return folder


def _load(folder):
  return hf.load_params(folder, hf.read_config(folder))


def _tensors(folder):
  return safetensors.numpy.load_file(folder / 'model.safetensors')


def _rewrite(folder, tensors):
  safetensors.numpy.save_file(tensors, folder / 'model.safetensors')


def _set_config(folder, **fields):
  path = folder / 'config.json'
  raw = json.loads(path.read_text()) | fields
  path.write_text(json.dumps({k: v for k, v in raw.items() if v != 'absent'}))


def _shard(tmp_path) -> pathlib.Path:
  folder, config = tmp_path / 'sharded', hf.read_config(_GOLDEN / 'tied')
  hf.save_folder(
      folder, config, _load(_GOLDEN / 'tied'), max_shard_bytes=30_000
  )
  return folder


@pytest.mark.parametrize('max_shard_bytes', [30_000, 10**9])
def test_round_trip_is_bit_for_bit(tmp_path, source, max_shard_bytes):
  config, params = hf.read_config(source), _load(source)
  folder = tmp_path / 'out'
  hf.save_folder(folder, config, params, max_shard_bytes=max_shard_bytes)
  assert hf.read_config(folder) == config
  jax.tree.map(np.testing.assert_array_equal, _load(folder), params)
  written = {}
  for path in folder.glob('*.safetensors'):
    written |= safetensors.numpy.load_file(path)
  original = _tensors(source)
  assert written.keys() == original.keys()
  for name, tensor in original.items():
    np.testing.assert_array_equal(written[name], tensor)
  assert (len(list(folder.glob('*.safetensors'))) > 1) == (
      max_shard_bytes == 30_000
  )


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_half_precision_sources_become_float32_masters(tmp_path, dtype):
  config, params = hf.read_config(_GOLDEN / 'tied'), _load(_GOLDEN / 'tied')
  hf.save_folder(tmp_path / 'a', config, params, dtype=dtype)
  halved = _load(tmp_path / 'a')
  assert halved['embed']['embedding'].dtype == np.float32
  kind = ml_dtypes.bfloat16 if dtype == 'bfloat16' else np.float16
  rounded = jax.tree.map(lambda p: p.astype(kind).astype(np.float32), params)
  jax.tree.map(np.testing.assert_array_equal, halved, rounded)
  hf.save_folder(tmp_path / 'b', config, halved, dtype=dtype)
  assert (tmp_path / 'a/model.safetensors').read_bytes() == (
      tmp_path / 'b/model.safetensors'
  ).read_bytes()
  with pytest.raises(ValueError, match="dtype 'int8': expected one of"):
    hf.save_folder(tmp_path / 'c', config, params, dtype='int8')


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'model_type': 'llama'}, "model_type='llama' is not supported"),
        ({'use_sliding_window': True}, 'use_sliding_window=True .*false'),
        ({'layer_types': ['sliding_attention']}, 'only "full_attention"'),
        ({'rope_parameters': {'rope_type': 'yarn'}}, 'no YaRN'),
        (
            {'rope_parameters': None, 'rope_scaling': {'type': 'linear'}},
            "rope_scaling / rope_parameters={'type': 'linear'}",
        ),
        ({'hidden_act': 'gelu'}, "hidden_act='gelu'"),
        ({'attention_dropout': 0.1}, 'attention_dropout=0.1'),
        ({'quantization_config': {'bits': 4}}, 'quantization_config'),
        ({'num_key_value_heads': 3}, 'num_attention_heads=4 is not a mult'),
        ({'hidden_size': 30}, 'hidden_size=30 .* there is no head_dim'),
        ({'num_key_value_heads': 0}, 'num_key_value_heads=0; expected an int'),
        ({'vocab_size': '96'}, "vocab_size='96'; expected an integer above 0"),
        ({'hidden_size': 32.0}, 'hidden_size=32.0; expected an integer above'),
        ({'head_dim': -8}, 'head_dim=-8; expected an integer above 0'),
        ({'rms_norm_eps': 'x'}, "rms_norm_eps='x'; expected a number above 0"),
        ({'tie_word_embeddings': 1}, 'tie_word_embeddings=1; expected true or'),
        ({'tie_word_embeddings': 'absent'}, r"missing .*'tie_word_embedd"),
        ({'rope_parameters': 'absent'}, r"missing fields \['rope_theta'\]"),
    ],
)
def test_a_config_of_another_model_is_refused(tmp_path, fields, message):
  folder = _copy(tmp_path)
  _set_config(folder, **fields)
  with pytest.raises(ValueError, match=message):
    hf.read_config(folder)


def test_a_config_that_is_no_object_is_refused(tmp_path):
  folder = _copy(tmp_path)
  (folder / 'config.json').write_text('[1]')
  with pytest.raises(ValueError, match='config.json holds a list, expected a'):
    hf.read_config(folder)
  (folder / 'config.json').write_bytes(b'\xff')
  with pytest.raises(ValueError, match='config.json is not valid JSON'):
    hf.read_config(folder)


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path, bad):
  folder = _copy(tmp_path)
  tensors = _tensors(folder)
  tensors[_EMBEDDING] = tensors[_EMBEDDING].copy()
  tensors[_EMBEDDING][3, 4] = bad
  _rewrite(folder, tensors)
  with pytest.raises(ValueError, match=f'{_EMBEDDING}.* are nan or inf'):
    _load(folder)


def test_weights_too_large_for_float16_are_not_exported_as_inf(tmp_path):
  config, params = hf.read_config(_GOLDEN / 'tied'), _load(_GOLDEN / 'tied')
  params['final_norm']['scale'][:] = 1e5
  with pytest.raises(ValueError, match="'model.norm.weight' as float16 has"):
    hf.save_folder(tmp_path / 'out', config, params, dtype='float16')
  assert not list(tmp_path.iterdir())
  hf.save_folder(tmp_path / 'out', config, params, dtype='bfloat16')


def test_config_of_older_transformers_is_read(tmp_path):
  folder = _copy(tmp_path)
  _set_config(
      folder, rope_parameters='absent', rope_theta=5e5, rope_scaling=None
  )
  assert hf.read_config(folder).rope_theta == 5e5


def test_untied_config_needs_a_head(tmp_path):
  folder = _copy(tmp_path)
  _set_config(folder, tie_word_embeddings=False)
  with pytest.raises(
      ValueError,
      match='tie_word_embeddings=false.*lm_head.weight.*=true; otherwise get',
  ):
    _load(folder)


def test_a_tied_model_may_repeat_its_embedding_only(tmp_path):
  folder = _copy(tmp_path)
  tensors = _tensors(folder)
  _rewrite(folder, tensors | {_HEAD: tensors[_EMBEDDING]})
  jax.tree.map(
      np.testing.assert_array_equal, _load(folder), _load(_GOLDEN / 'tied')
  )
  _rewrite(folder, tensors | {_HEAD: tensors[_EMBEDDING] + 1e-3})
  with pytest.raises(ValueError, match='true, but .lm_head.weight. differs'):
    _load(folder)


def test_wrong_tensors_are_refused(tmp_path):
  folder = _copy(tmp_path)
  tensors, key = _tensors(folder), 'model.layers.1.mlp.up_proj.weight'
  _rewrite(folder, {k: v for k, v in tensors.items() if k != key})
  with pytest.raises(ValueError, match=f'1 tensors are missing.*{key}'):
    _load(folder)
  _rewrite(folder, tensors | {'model.layers.2.extra': tensors[key]})
  with pytest.raises(ValueError, match='model.safetensors: 1 unexpected.*2.ex'):
    _load(folder)
  _rewrite(folder, tensors | {key: tensors[key].T})
  with pytest.raises(ValueError, match=r'shape \(32, 48\).*makes it \(48, 32'):
    _load(folder)
  _rewrite(folder, tensors | {key: tensors[key].astype(np.int8)})
  with pytest.raises(ValueError, match='dtype I8.*Quantized'):
    _load(folder)


def test_damaged_files_are_refused(tmp_path):
  folder = _copy(tmp_path)
  path = folder / 'model.safetensors'
  whole = path.read_bytes()
  for size in (len(whole) - 1, 100, 3):
    path.write_bytes(whole[:size])
    with pytest.raises(ValueError, match=f'{size} bytes. is truncated'):
      _load(folder)
  path.unlink()
  with pytest.raises(FileNotFoundError, match='holds no weights: expected'):
    _load(folder)
  (folder / 'pytorch_model.bin').write_bytes(b'\x80\x04')
  with pytest.raises(ValueError, match='pickled weights .pytorch_model.bin'):
    _load(folder)


def test_shards_must_be_complete_and_agree(tmp_path):
  folder = _shard(tmp_path)
  index = folder / weight_files.INDEX
  content = json.loads(index.read_text())
  first = folder / content['weight_map'][_EMBEDDING]
  other = content['weight_map']['model.norm.weight']

  moved = content['weight_map'] | {_EMBEDDING: other}
  index.write_text(json.dumps({'weight_map': moved}))
  with pytest.raises(ValueError, match='embed_tokens.*different saves'):
    _load(folder)
  index.write_text(json.dumps({'weight_map': {_EMBEDDING: '../x.safetensors'}}))
  with pytest.raises(ValueError, match='must be a file in the same folder'):
    _load(folder)
  index.write_text('{}')
  with pytest.raises(ValueError, match='not an index of safetensors'):
    _load(folder)

  index.write_text(json.dumps(content))
  first.write_bytes(first.read_bytes()[:-8])
  with pytest.raises(ValueError, match=f'{first.name} .*truncated'):
    _load(folder)
  first.unlink()
  with pytest.raises(FileNotFoundError, match=f'{first.name}.*Download'):
    _load(folder)
  shutil.copy(_GOLDEN / 'tied/model.safetensors', folder)
  with pytest.raises(ValueError, match='both model.safetensors and'):
    _load(folder)


def test_save_copies_the_tokenizer_and_token_ids(tmp_path):
  origin = _copy(tmp_path)
  config, params = hf.read_config(origin), _load(origin)
  with pytest.raises(FileNotFoundError, match='no tokenizer.json to copy'):
    hf.save_folder(tmp_path / 'out', config, params, source_folder=origin)
  (origin / 'tokenizer.json').write_text('{"a": 1}')
  _set_config(origin, eos_token_id=7)
  hf.save_folder(tmp_path / 'out', config, params, source_folder=origin)
  assert (tmp_path / 'out/tokenizer.json').read_text() == '{"a": 1}'
  raw = json.loads((tmp_path / 'out/config.json').read_text())
  assert raw['eos_token_id'] == 7
  assert (tmp_path / 'out/generation_config.json').read_bytes() == (
      origin / 'generation_config.json'
  ).read_bytes()


def test_a_folder_appears_complete_or_not_at_all(tmp_path, monkeypatch):
  config, params = hf.read_config(_GOLDEN / 'tied'), _load(_GOLDEN / 'tied')

  def full_disk(*args):
    raise OSError('No space left on device')

  with monkeypatch.context() as patch:
    patch.setattr(weight_files, 'write', full_disk)
    with pytest.raises(OSError, match='No space'):
      hf.save_folder(tmp_path / 'out', config, params)
  assert not list(tmp_path.iterdir())
  hf.save_folder(tmp_path / 'out', config, params)
  with pytest.raises(FileExistsError, match='not an empty folder'):
    hf.save_folder(tmp_path / 'out', config, params)
  wider = dataclasses.replace(config, vocab_size=128)
  with pytest.raises(ValueError, match=r"'embedding'\] has shape \(96, 32\)"):
    hf.save_folder(tmp_path / 'other', wider, params)


def test_others_can_read_a_saved_folder(tmp_path):
  source = _GOLDEN / 'tied'
  hf.save_folder(tmp_path / 'out', hf.read_config(source), _load(source))
  for path in (tmp_path / 'out', *(tmp_path / 'out').iterdir()):
    assert path.stat().st_mode & 0o044 == 0o044, path
