"""The Tunix side of `sampler.py`; runs in an environment of its own.

  python sampler_tunix.py <folder of the model>

The agent workload goes through the sampler as Tunix's agentic rollout uses it:
a call for each turn of each episode. Prompts are padded to powers of two, as
the sampler does by itself, so its programs are few.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import sampler_workload as workload
from tunix.generate import sampler as sampler_lib
from tunix.models.qwen2 import model as model_lib
from tunix.models.qwen2 import params as params_lib


class _Ids:
  """A tokenizer whose text is ids."""

  def encode(self, text, **unused_kwargs):
    return [int(word) for word in text.split()]

  def decode(self, ids, **unused_kwargs):
    return ' '.join(str(int(i)) for i in ids)

  def bos_id(self):
    return 0

  def eos_id(self):
    return workload.VOCAB - 1

  def pad_id(self):
    return 0


def load(
    folder: str, **changes: Any
) -> tuple[model_lib.Qwen2, model_lib.ModelConfig]:
  """(model, its config) of a Hugging Face folder; `changes` are of the config."""
  shape = json.loads((pathlib.Path(folder) / 'config.json').read_text())
  heads = shape['num_attention_heads']
  config = model_lib.ModelConfig(
      num_layers=shape['num_hidden_layers'],
      vocab_size=shape['vocab_size'],
      embed_dim=shape['hidden_size'],
      hidden_dim=shape['intermediate_size'],
      num_heads=heads,
      head_dim=shape.get('head_dim') or shape['hidden_size'] // heads,
      num_kv_heads=shape['num_key_value_heads'],
      rope_theta=int(shape.get('rope_theta') or 1_000_000),
      norm_eps=shape['rms_norm_eps'],
      use_tied_embedding=shape['tie_word_embeddings'],
      **changes,
  )
  mesh = jax.make_mesh(
      (1, 1), ('fsdp', 'tp'), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  with mesh:
    model = params_lib.create_model_from_safe_tensors(
        folder, config, mesh, jnp.float32
    )
  return model, config


def main(folder: str) -> None:
  """Serves `workload.serve` with Tunix's own sampler."""
  model, config = load(folder)

  def bind(cache_size):
    sizes = config.num_layers, config.num_kv_heads, config.head_dim
    return sampler_lib.Sampler(
        model, _Ids(), sampler_lib.CacheConfig(cache_size, *sizes)
    )

  def run(sampler, prompts, stops, seed, longest=None):
    out = sampler(
        [' '.join(map(str, prompt)) for prompt in prompts],
        max_generation_steps=workload.NEW,
        max_prompt_length=longest,
        temperature=1.0,
        top_p=1.0,
        eos_tokens=stops,
        seed=seed,
        return_logprobs=True,
    )
    return [[int(i) for i in tokens] for tokens in out.tokens]

  batch = bind(workload.PROMPT + workload.NEW)
  single = bind(1024)

  def plain(seed):
    stops = [workload.VOCAB - 1]
    prompts = workload.batch(seed)
    rows = run(batch, prompts, stops, seed, workload.PROMPT)
    return sum(map(len, rows))

  def agent(seed):
    one = lambda prompts, number: run(
        single, prompts, list(workload.STOPS), number
    )
    return workload.one_by_one(one, seed, groups=2)

  workload.serve({'plain': plain, 'agent': agent})


if __name__ == '__main__':
  main(*sys.argv[1:])
