"""The tiny policy's tokenizer: byte-level BPE in which a word is one token."""

from __future__ import annotations

from collections.abc import Iterable
import json
import pathlib

import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import trainers

SPECIAL = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')
TAGS = ('<think>', '</think>', '<action>', '</action>')

# A word with its leading space, one digit, or a run of anything else. Qwen's
# own rule keeps spaces apart, which costs a small model a fifth more tokens.
_SPLIT = r' ?\p{L}+| ?\p{N}|[^\s\p{L}\p{N}]+\n*|\s+'

# Qwen2.5's chat format without its default system message.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n'"
    " + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
  """A tokenizer whose merges are learned from `texts`."""
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
      [
          pre_tokenizers.Split(tokenizers.Regex(_SPLIT), 'isolated'),
          pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
      ]
  )
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens(list(SPECIAL))
  tokenizer.add_tokens(
      [tokenizers.AddedToken(t, normalized=False) for t in TAGS]
  )
  tokenizer.train_from_iterator(
      texts,
      trainers.BpeTrainer(
          vocab_size=vocab_size,
          special_tokens=list(SPECIAL),
          initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
          show_progress=False,
      ),
  )
  return tokenizer


def save(tokenizer: tokenizers.Tokenizer, folder: pathlib.Path) -> None:
  """Writes the tokenizer files of a Hugging Face folder."""
  folder.mkdir(parents=True, exist_ok=True)
  tokenizer.save(str(folder / 'tokenizer.json'))
  settings = {
      'tokenizer_class': 'PreTrainedTokenizerFast',
      'chat_template': CHAT_TEMPLATE,
      'eos_token': '<|im_end|>',
      'pad_token': '<|endoftext|>',
      'model_max_length': 4096,
      'clean_up_tokenization_spaces': False,
  }
  path = folder / 'tokenizer_config.json'
  path.write_text(json.dumps(settings, indent=2) + '\n', encoding='utf-8')
  stops = [
      tokenizer.token_to_id('<|im_end|>'),
      tokenizer.token_to_id('<|endoftext|>'),
  ]
  generation = {'eos_token_id': stops, 'pad_token_id': stops[1]}
  path = folder / 'generation_config.json'
  path.write_text(json.dumps(generation, indent=2) + '\n', encoding='utf-8')
  # The part of config.json that names tokens; the model's shape joins it when
  # weights are saved.
  tokens = {'eos_token_id': stops[0], 'pad_token_id': stops[1]}
  (folder / 'config.json').write_text(
      json.dumps(tokens, indent=2) + '\n', encoding='utf-8'
  )
