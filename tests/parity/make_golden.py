"""Makes tests/golden/models/*: tiny models and their logits by transformers.

Needs torch and transformers; the tests that read the files do not:
  python tests/parity/make_golden.py
"""

from __future__ import annotations

import pathlib

import numpy as np
import torch
import transformers

GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'models'

SHAPE = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    rope_theta=1_000_000.0,
)


def make_model(tied: bool, seed: int = 0) -> transformers.Qwen2ForCausalLM:
  """A random model whose biases and norms matter, unlike fresh ones."""
  torch.manual_seed(seed)
  config = transformers.Qwen2Config(
      **SHAPE, tie_word_embeddings=tied, attn_implementation='eager'
  )
  model = transformers.Qwen2ForCausalLM(config).eval()
  with torch.no_grad():
    for name, value in model.named_parameters():
      if name.endswith('bias') or 'norm' in name:
        value.add_(0.3 * torch.randn_like(value))
      else:
        value.mul_(5.0)
  return model


def make_batch(seed: int = 0) -> dict[str, np.ndarray]:
  """Tokens with rows that are full, padded on the left and on the right."""
  rng = np.random.default_rng(seed)
  tokens_BT = rng.integers(1, SHAPE['vocab_size'], (3, 12))
  valid_BT = np.ones((3, 12), bool)
  valid_BT[1, :5] = False
  valid_BT[2, 8:] = False
  return {'tokens_BT': np.where(valid_BT, tokens_BT, 0), 'valid_BT': valid_BT}


def logits_of(
    model: transformers.Qwen2ForCausalLM, batch: dict[str, np.ndarray]
) -> np.ndarray:
  """Logits [B, T, V] of the model; those of padding mean nothing."""
  valid_BT = torch.tensor(batch['valid_BT'])
  positions_BT = (valid_BT.cumsum(1) - 1).clamp(min=0)
  with torch.no_grad():
    output = model(
        input_ids=torch.tensor(batch['tokens_BT']),
        attention_mask=valid_BT.long(),
        position_ids=positions_BT,
    )
  return output.logits.numpy()


def main() -> None:
  batch = make_batch()
  for name, tied in (('tied', True), ('untied', False)):
    model = make_model(tied)
    model.save_pretrained(GOLDEN / name)
    np.savez(
        GOLDEN / name / 'logits.npz', logits=logits_of(model, batch), **batch
    )


if __name__ == '__main__':
  main()
