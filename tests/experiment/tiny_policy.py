"""A policy of two layers, made by hand, that opens a box by chance.

Its random weights are small but for a chain written into embedding and head:
each token of the answer is followed by the next one, ' box' by a number.
"""

from __future__ import annotations

from collections.abc import Iterator
import itertools
import pathlib

import jax
import numpy as np

from hgpo_jax.assets import tiny_tokenizer
from hgpo_jax.envs import household
from hgpo_jax.models import base
from hgpo_jax.models import hf
from hgpo_jax.models import qwen2_params
from hgpo_jax.rollout import tokenizer as tokenizer_lib

LAYOUT = household.Layout(receptacles=(5, 8), most_per_type=1, objects=(3, 6))
BOXES = 3
_ANSWER = '<think>box</think><action>open box {}</action><|im_end|>'
_CERTAIN = 3.0  # Times sqrt(width) from the norm: a logit of 17.


def make(folder: pathlib.Path) -> pathlib.Path:
  """Writes the policy as a Hugging Face folder; returns the folder."""
  source = folder.with_name(folder.name + '_tokenizer')
  tiny_tokenizer.save(tiny_tokenizer.train(_texts(), 640), source)
  tokenizer = tokenizer_lib.ChatTokenizer(source)
  config = base.ModelConfig(
      vocab_size=tokenizer.size + tokenizer.size % 2,
      hidden_size=32,
      intermediate_size=64,
      num_layers=2,
      num_heads=4,
      num_kv_heads=2,
      head_dim=8,
      tie_word_embeddings=False,
      max_position_embeddings=1024,
  )
  hf.save_folder(folder, config, _params(config, tokenizer), source)
  return folder


def _texts() -> Iterator[str]:
  """What the tokenizer should have words for: both environments."""
  for n in range(1, BOXES + 1):
    yield f'box\nopen box {n}' * 9
    yield f'Done: nothing, open box {n}\nNow: You open the box {n}.\n'
    yield f'go to box {n}\nput the apple in box {n}. Nothing happens.\n' * 3
    yield f'You are in a room. You see a box {n},\nActions:\nTask: open box {n}'
  for seed, kind in itertools.product(range(9), household.KINDS):
    game = household.generate(seed, kind, LAYOUT)
    yield f'Task: {game.instruction}\nYou arrive at. You see nothing. closed'
    for place in game.receptacles:
      yield f'\ngo to {place.name}\nopen {place.name}\nexamine {place.name}'
    for item in game.items:
      yield f'\ntake {item.name} from {item.place.name}, move {item.name}'


def _params(
    config: base.ModelConfig, tokenizer: tokenizer_lib.ChatTokenizer
) -> base.Params:
  rng = np.random.default_rng(0)

  def draw(spec: qwen2_params.ParamSpec) -> np.ndarray:
    if spec.init == 'normal':
      return rng.normal(0.0, 0.02, spec.shape).astype(np.float32)
    return np.full(spec.shape, float(spec.init == 'ones'), np.float32)

  params = jax.tree.map(draw, qwen2_params.specs(config))
  start = tokenizer.chat('')[-1:]
  chains = [
      start + tokenizer.encode(_ANSWER.format(n)) for n in range(1, BOXES + 1)
  ]
  pairs = {pair for chain in chains for pair in itertools.pairwise(chain)}
  for axis, token in enumerate(sorted({before for before, _ in pairs})):
    params['embed']['embedding'][token] = np.eye(config.hidden_size)[axis]
    for after in (after for before, after in pairs if before == token):
      params['head']['kernel'][axis, after] += _CERTAIN
  return params
