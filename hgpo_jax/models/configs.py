"""Shapes of the Qwen2.5 Instruct models, as published in `config.json`.

For models made from scratch and for planning memory; a model that is loaded
has its own `config.json`, which counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from hgpo_jax.models import base

CONFIGS: Mapping[str, base.ModelConfig] = {
    # The policy of the quick start; its vocabulary is that of its tokenizer.
    'tiny': base.ModelConfig(
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=192,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=48,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    ),
    '0.5b': base.ModelConfig(
        vocab_size=151_936,
        hidden_size=896,
        intermediate_size=4864,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
    ),
    '1.5b': base.ModelConfig(
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
        head_dim=128,
        tie_word_embeddings=True,
    ),
    '3b': base.ModelConfig(
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=11_008,
        num_layers=36,
        num_heads=16,
        num_kv_heads=2,
        head_dim=128,
        tie_word_embeddings=True,
    ),
    '7b': base.ModelConfig(
        vocab_size=152_064,
        hidden_size=3584,
        intermediate_size=18_944,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        head_dim=128,
    ),
    '14b': base.ModelConfig(
        vocab_size=152_064,
        hidden_size=5120,
        intermediate_size=13_824,
        num_layers=48,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
    ),
}
