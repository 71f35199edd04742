"""The `config.json` of a Hugging Face Qwen2 folder, read strictly."""

from __future__ import annotations

import json
import math
import os
import pathlib
from typing import Any

from hgpo_jax.models import base

# config.json field -> ModelConfig field; all are required.
_FIELDS = {
    'vocab_size': 'vocab_size',
    'hidden_size': 'hidden_size',
    'intermediate_size': 'intermediate_size',
    'num_hidden_layers': 'num_layers',
    'num_attention_heads': 'num_heads',
    'num_key_value_heads': 'num_kv_heads',
    'rms_norm_eps': 'rms_norm_eps',
    'tie_word_embeddings': 'tie_word_embeddings',
    'max_position_embeddings': 'max_position_embeddings',
}


def read(folder: str | os.PathLike[str]) -> base.ModelConfig:
  """The model shape in `config.json`; raises for what isn't plain Qwen2."""
  path = pathlib.Path(folder) / 'config.json'
  raw = read_json(path)
  _refuse_variants(path, raw)
  missing = [name for name in _FIELDS if raw.get(name) is None]
  theta = raw.get('rope_theta', _rope(raw).get('rope_theta'))
  missing += ['rope_theta'] if theta is None else []
  if missing:
    raise ValueError(
        f'{path}: missing fields {missing}. Use the complete config.json of'
        ' the model; no field is guessed.'
    )
  fields = {ours: raw[theirs] for theirs, ours in _FIELDS.items()}
  head_dim = raw.get('head_dim')
  for name, value in (
      *((name, raw[name]) for name in _FIELDS),
      ('rope_theta', theta),
      *([('head_dim', head_dim)] if head_dim is not None else []),
  ):
    _check_type(path, name, value)
  heads, kv_heads = fields['num_heads'], fields['num_kv_heads']
  if heads % kv_heads:
    raise ValueError(
        f'{path}: num_attention_heads={heads} is not a multiple of'
        f' num_key_value_heads={kv_heads}.'
    )
  if head_dim is None:
    head_dim, rest = divmod(fields['hidden_size'], heads)
    if rest:
      raise ValueError(
          f'{path}: hidden_size={fields["hidden_size"]} is not a multiple of'
          f' num_attention_heads={heads}, and there is no head_dim.'
      )
  return base.ModelConfig(head_dim=head_dim, rope_theta=float(theta), **fields)


def to_json(config: base.ModelConfig, dtype: str) -> dict[str, Any]:
  """The content of a `config.json` that `read` and transformers accept."""
  return {
      'architectures': ['Qwen2ForCausalLM'],
      'model_type': 'qwen2',
      'attention_dropout': 0.0,
      'hidden_act': 'silu',
      'initializer_range': 0.02,
      **{theirs: getattr(config, ours) for theirs, ours in _FIELDS.items()},
      'head_dim': config.head_dim,
      'rope_theta': config.rope_theta,
      'torch_dtype': dtype,
      'use_cache': True,
      'use_sliding_window': False,
  }


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """The object in a JSON file."""
  if not path.exists():
    raise FileNotFoundError(
        f'{path} does not exist; a model folder needs a {path.name}.'
    )
  try:
    content = json.loads(path.read_text(encoding='utf-8'))
  except ValueError as error:
    raise ValueError(f'{path} is not valid JSON: {error}.') from error
  if not isinstance(content, dict):
    raise ValueError(
        f'{path} holds a {type(content).__name__}, expected a JSON object.'
    )
  return content


def _check_type(path: pathlib.Path, name: str, value: Any) -> None:
  if name == 'tie_word_embeddings':
    fits, expected = isinstance(value, bool), 'true or false'
  else:
    real = name in ('rms_norm_eps', 'rope_theta')
    expected = 'a number above 0' if real else 'an integer above 0'
    fits = isinstance(value, (int, float) if real else int)
    fits = fits and not isinstance(value, bool) and 0 < value < math.inf
  if not fits:
    raise ValueError(f'{path}: {name}={value!r}; expected {expected}.')


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
  """Rotary settings; transformers 5 moved them into one object."""
  return raw.get('rope_parameters') or raw.get('rope_scaling') or {}


def _refuse_variants(path: pathlib.Path, raw: dict[str, Any]) -> None:
  """Raises for a setting under which this model would compute otherwise."""
  rope = _rope(raw)
  rope_type = rope.get('rope_type', rope.get('type', 'default'))
  layer_types = set(raw.get('layer_types') or ['full_attention'])
  partial = rope.get('partial_rotary_factor', 1.0)
  # (field, what it holds, whether that is supported, what is supported)
  checks = (
      (
          'model_type',
          raw.get('model_type'),
          raw.get('model_type') == 'qwen2',
          '"qwen2"',
      ),
      (
          'use_sliding_window',
          raw.get('use_sliding_window'),
          not raw.get('use_sliding_window'),
          'false',
      ),
      (
          'layer_types',
          sorted(layer_types),
          layer_types == {'full_attention'},
          'only "full_attention"',
      ),
      (
          'rope_scaling / rope_parameters',
          rope,
          rope_type == 'default' and partial == 1.0,
          'null or rope_type "default" (no YaRN or other scaling)',
      ),
      (
          'hidden_act',
          raw.get('hidden_act'),
          raw.get('hidden_act', 'silu') == 'silu',
          '"silu"',
      ),
      (
          'attention_dropout',
          raw.get('attention_dropout'),
          not raw.get('attention_dropout'),
          '0.0',
      ),
      (
          'quantization_config',
          raw.get('quantization_config'),
          raw.get('quantization_config') is None,
          'none',
      ),
  )
  for field, value, supported, expected in checks:
    if not supported:
      raise ValueError(
          f'{path}: {field}={value!r} is not supported; expected {expected}.'
          ' Use a plain Qwen2 or Qwen2.5 model.'
      )
