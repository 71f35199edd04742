"""Qwen2 models as Hugging Face folders: config.json, safetensors, tokenizer.

Reading is strict: whatever this model would compute differently, or any key
too many or too few, is an error. Reading, writing and reading again gives
the same bits.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import tempfile
from typing import Any

import jax
import numpy as np

from hgpo_jax.models import base
from hgpo_jax.models import hf_config
from hgpo_jax.models import qwen2_params
from hgpo_jax.models import weight_files

_TOKEN_FIELDS = ('bos_token_id', 'eos_token_id', 'pad_token_id')
_TOKENIZER_FILES = (
    'tokenizer.json',
    'tokenizer_config.json',
    'vocab.json',
    'merges.txt',
    'special_tokens_map.json',
    'added_tokens.json',
    'chat_template.jinja',
)
_LAYER_KEYS = {
    'input_layernorm.weight': ('attention_norm', 'scale'),
    'self_attn.q_proj.weight': ('attention', 'q', 'kernel'),
    'self_attn.q_proj.bias': ('attention', 'q', 'bias'),
    'self_attn.k_proj.weight': ('attention', 'k', 'kernel'),
    'self_attn.k_proj.bias': ('attention', 'k', 'bias'),
    'self_attn.v_proj.weight': ('attention', 'v', 'kernel'),
    'self_attn.v_proj.bias': ('attention', 'v', 'bias'),
    'self_attn.o_proj.weight': ('attention', 'o', 'kernel'),
    'post_attention_layernorm.weight': ('mlp_norm', 'scale'),
    'mlp.gate_proj.weight': ('mlp', 'gate', 'kernel'),
    'mlp.up_proj.weight': ('mlp', 'up', 'kernel'),
    'mlp.down_proj.weight': ('mlp', 'down', 'kernel'),
}
_EMBEDDING = 'model.embed_tokens.weight'
_HEAD = 'lm_head.weight'


def read_config(folder: str | os.PathLike[str]) -> base.ModelConfig:
  """The model shape in `config.json`; raises for what isn't plain Qwen2."""
  return hf_config.read(folder)


def load_params(
    folder: str | os.PathLike[str], config: base.ModelConfig
) -> base.Params:
  """Float32 parameters on the host, layers stacked; checks every key.

  A tied model may carry an `lm_head.weight` that equals the embedding.
  """
  folder = pathlib.Path(folder)
  shapes = tensor_shapes(config)
  specs = qwen2_params.specs(config)
  params = jax.tree.map(lambda s: np.empty(s.shape, np.float32), specs)
  with weight_files.WeightFiles(folder) as files:
    extra_head = config.tie_word_embeddings and _HEAD in files.file_of
    _check_keys(folder, config, set(shapes), files.file_of)
    for name, shape in shapes.items():
      _tensor_view(params, name)[...] = files.read(name, shape)
    if extra_head:
      head = files.read(_HEAD, shapes[_EMBEDDING])
      if not np.array_equal(head, params['embed']['embedding']):
        raise ValueError(
            f'{folder / files.file_of[_HEAD]}: config.json has'
            f' tie_word_embeddings=true, but {_HEAD!r} differs from'
            f' {_EMBEDDING!r}. Set tie_word_embeddings=false if the head was'
            ' trained, or remove the tensor if it is a leftover.'
        )
  return params


def save_folder(
    folder: str | os.PathLike[str],
    config: base.ModelConfig,
    params: base.Params,
    source_folder: str | os.PathLike[str] | None = None,
    dtype: str = 'float32',
    max_shard_bytes: int = 5 * 10**9,
) -> None:
  """Writes a folder that transformers and inference engines can load.

  The folder appears complete or not at all: it is written under another name
  beside `folder` and renamed. A tied model is saved without `lm_head.weight`,
  as the published ones are.

  Args:
    folder: must not exist, or be empty.
    config: the shape of the model.
    params: a parameter tree of that shape.
    source_folder: where tokenizer files, the generation config and special
      token ids are copied from; None writes none of them.
    dtype: 'float32', 'float16' or 'bfloat16'.
    max_shard_bytes: above this size the weights are split into shards.
  """
  folder = pathlib.Path(folder)
  if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise FileExistsError(
        f'{folder} exists and is not an empty folder. Save to a new folder,'
        ' or remove this one first.'
    )
  _check_params(config, params)
  folder.parent.mkdir(parents=True, exist_ok=True)
  partial = pathlib.Path(
      tempfile.mkdtemp(prefix=f'.{folder.name}.', dir=folder.parent)
  )
  try:
    _write_files(partial, config, params, source_folder, dtype, max_shard_bytes)
    # The temporary folder and safetensors' files are private to their owner.
    partial.chmod(0o755)
    for path in partial.iterdir():
      path.chmod(0o644)
    partial.rename(folder)
  except BaseException:
    shutil.rmtree(partial, ignore_errors=True)
    raise


def tensor_shapes(config: base.ModelConfig) -> dict[str, tuple[int, ...]]:
  """Name and shape of every tensor of the Hugging Face model, in order."""
  specs = qwen2_params.specs(config)
  shapes = {_EMBEDDING: specs['embed']['embedding'].shape}
  for layer in range(config.num_layers):
    for key, path in _LAYER_KEYS.items():
      shape = _at(specs['layers'], path).shape[1:]
      shapes[f'model.layers.{layer}.{key}'] = shape[::-1]
  shapes['model.norm.weight'] = specs['final_norm']['scale'].shape
  if not config.tie_word_embeddings:
    shapes[_HEAD] = specs['head']['kernel'].shape[::-1]
  return shapes


def _tensor_view(params: base.Params, name: str) -> np.ndarray:
  """The parameter behind a Hugging Face name, as a view in its layout."""
  if name == _EMBEDDING:
    return params['embed']['embedding']
  if name == _HEAD:
    return params['head']['kernel'].T
  if name == 'model.norm.weight':
    return params['final_norm']['scale']
  _, _, layer, key = name.split('.', 3)
  return _at(params['layers'], _LAYER_KEYS[key])[int(layer)].T


def _at(tree: Any, path: tuple[str, ...]) -> Any:
  for key in path:
    tree = tree[key]
  return tree


def _check_keys(
    folder: pathlib.Path,
    config: base.ModelConfig,
    expected: set[str],
    file_of: dict[str, str],
) -> None:
  found = set(file_of)
  if config.tie_word_embeddings:
    found.discard(_HEAD)  # Compared with the embedding by the caller.
  if _HEAD in expected - found:
    raise ValueError(
        f'{folder}: config.json has tie_word_embeddings=false, but the'
        f' weights have no {_HEAD!r}. If the model ties its embeddings, set'
        ' tie_word_embeddings=true; otherwise get the files with the head.'
    )
  missing, extra = sorted(expected - found), sorted(found - expected)
  if missing:
    raise ValueError(
        f'{folder}: {len(missing)} tensors are missing from the weights,'
        f' first {missing[0]!r}; config.json has num_hidden_layers='
        f'{config.num_layers}. Use the config.json and weights of one model.'
    )
  if extra:
    raise ValueError(
        f'{folder / file_of[extra[0]]}: {len(extra)} unexpected tensors,'
        f' first {extra[0]!r}; config.json has num_hidden_layers='
        f'{config.num_layers}. Merge adapters and remove what is not part of'
        ' a Qwen2 model.'
    )


def _check_params(config: base.ModelConfig, params: base.Params) -> None:
  wanted = jax.tree.map(lambda spec: spec.shape, qwen2_params.specs(config))
  got = jax.tree.map(np.shape, params)
  if got != wanted:
    is_shape = lambda x: isinstance(x, tuple)
    flat = dict(jax.tree.leaves_with_path(wanted, is_leaf=is_shape))
    have = dict(jax.tree.leaves_with_path(got, is_leaf=is_shape))
    path = next(p for p in [*flat, *have] if flat.get(p) != have.get(p))
    raise ValueError(
        f'params{jax.tree_util.keystr(path)} has shape {have.get(path)}, but'
        f' the config makes it {flat.get(path)}. Save with the config that'
        ' the parameters were made with.'
    )


def _write_files(
    folder: pathlib.Path,
    config: base.ModelConfig,
    params: base.Params,
    source_folder: str | os.PathLike[str] | None,
    dtype: str,
    max_shard_bytes: int,
) -> None:
  source = pathlib.Path(source_folder) if source_folder is not None else None
  raw = hf_config.to_json(config, dtype)
  if source is not None:
    origin = hf_config.read_json(source / 'config.json')
    raw |= {k: origin[k] for k in _TOKEN_FIELDS if k in origin}
    _copy_tokenizer(source, folder)
  _write_json(folder / 'config.json', raw)
  if not (folder / 'generation_config.json').exists():
    tokens = {k: raw[k] for k in _TOKEN_FIELDS if k in raw}
    _write_json(folder / 'generation_config.json', {'do_sample': True} | tokens)
  host = jax.tree.map(np.asarray, params)
  weight_files.write(
      folder,
      tensor_shapes(config),
      lambda name: _tensor_view(host, name),
      dtype,
      max_shard_bytes,
  )


def _copy_tokenizer(source: pathlib.Path, folder: pathlib.Path) -> None:
  names = [n for n in _TOKENIZER_FILES if (source / n).exists()]
  if 'tokenizer.json' not in names:
    raise FileNotFoundError(
        f'{source} has no tokenizer.json to copy. Give the folder of the'
        ' model that was trained as source_folder.'
    )
  if (source / 'generation_config.json').exists():
    names.append('generation_config.json')
  for name in names:
    shutil.copyfile(source / name, folder / name)


def _write_json(path: pathlib.Path, value: dict[str, Any]) -> None:
  path.write_text(json.dumps(value, indent=2) + '\n', encoding='utf-8')
