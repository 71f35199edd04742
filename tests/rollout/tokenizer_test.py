"""ChatTokenizer against ids of Qwen2.5's own tokenizer."""

import json
import os
import pathlib
import shutil

import pytest

from hgpo_jax.rollout import tokenizer as tokenizer_lib

_GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'tokenizer'
_PAIRS = json.loads((_GOLDEN / 'pairs.json').read_text())
_FULL = 'HGPO_QWEN_TOKENIZER'


@pytest.fixture(name='folder')
def _folder(tmp_path):
  """A copy of the reduced Qwen2.5 tokenizer that a test may spoil."""
  return pathlib.Path(shutil.copytree(_GOLDEN / 'reduced', tmp_path / 'model'))


def _edit(path, change):
  content = json.loads(path.read_text())
  change(content)
  path.write_text(json.dumps(content))


def _check_pairs(tokenizer):
  assert len(_PAIRS['encode']) > 10
  for pair in _PAIRS['encode']:
    assert tokenizer.encode(pair['text']) == pair['ids']
  for pair in _PAIRS['chat']:
    assert tokenizer.chat_text(pair['text']) == pair['encoded']
    assert tokenizer.chat(pair['text']) == pair['ids']


def test_ids_of_qwen(folder):
  _check_pairs(tokenizer_lib.ChatTokenizer(folder))


@pytest.mark.skipif(_FULL not in os.environ, reason=f'{_FULL} names no folder')
def test_ids_of_the_full_qwen_tokenizer():
  tokenizer = tokenizer_lib.ChatTokenizer(os.environ[_FULL])
  assert tokenizer.size == 151_665
  _check_pairs(tokenizer)


def test_default_system_prompt_is_rendered(folder):
  assert tokenizer_lib.ChatTokenizer(folder).chat_text('hi') == (
      '<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a '
      'helpful assistant.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n'
      '<|im_start|>assistant\n'
  )


def test_decode_returns_the_text_with_or_without_special_tokens(folder):
  tokenizer = tokenizer_lib.ChatTokenizer(folder)
  text = "<think>it ' s , here .</think> \n<action>look</action>"
  ids = tokenizer.encode(text) + [151645]
  assert tokenizer.decode(ids) == text
  assert tokenizer.decode(ids, skip_special=False) == text + '<|im_end|>'


def test_split_rule_of_the_file_is_kept(folder):
  """transformers' Qwen2 class would split 'a1' where this file does not."""

  def whole_words(content):
    split = content['pre_tokenizer']['pretokenizers'][0]
    split['pattern']['Regex'] = r'\S+|\s+'
    content['model']['vocab']['a1'] = 5000
    content['model']['merges'].append('a 1')

  _edit(folder / 'tokenizer.json', whole_words)
  assert tokenizer_lib.ChatTokenizer(folder).encode('a1') == [5000]


def test_stop_ids(folder):
  assert tokenizer_lib.ChatTokenizer(folder).stop_ids == (151643, 151645)
  config = folder / 'generation_config.json'
  config.write_text('{"eos_token_id": 151645}')
  assert tokenizer_lib.ChatTokenizer(folder).stop_ids == (151645,)
  config.write_text('{"eos_token_id": [151645, 7]}')
  assert tokenizer_lib.ChatTokenizer(folder).stop_ids == (7, 151645)


@pytest.mark.parametrize('ids', ['null', '"7"', '[7, null]', '[true]'])
def test_stop_ids_that_are_none(folder, ids):
  config = folder / 'generation_config.json'
  config.write_text(f'{{"eos_token_id": {ids}}}')
  with pytest.raises(ValueError, match='eos_token_id is .*; expected an id or'):
    tokenizer_lib.ChatTokenizer(folder)


@pytest.mark.parametrize(
    'template, expected',
    [
        ('{{ missing.field.of }}', r'cannot be used \(.*undefined'),
        ('{% if %}', r'cannot be used \('),
        ('hello', "makes 'hello' of 'Task: open box 2'; expected the message"),
    ],
)
def test_chat_template_that_does_not_work(folder, template, expected):
  _edit(
      folder / 'tokenizer_config.json',
      lambda c: c.update(chat_template=template),
  )
  with pytest.raises(ValueError, match=expected):
    tokenizer_lib.ChatTokenizer(folder)


def test_missing_file_is_named(folder):
  (folder / 'tokenizer.json').unlink()
  with pytest.raises(FileNotFoundError, match='lacks tokenizer.json; expected'):
    tokenizer_lib.ChatTokenizer(folder)


def test_missing_chat_template_is_named(folder):
  _edit(folder / 'tokenizer_config.json', lambda c: c.pop('chat_template'))
  with pytest.raises(ValueError, match='no chat template; expected'):
    tokenizer_lib.ChatTokenizer(folder)


def test_missing_special_token_is_named(folder):
  def drop(content):
    content['added_tokens'] = [
        t for t in content['added_tokens'] if t['content'] != '<|im_end|>'
    ]
    del content['model']['vocab']['<|im_end|>']

  _edit(folder / 'tokenizer.json', drop)
  _edit(
      folder / 'tokenizer_config.json',
      lambda c: c.update(eos_token=None, additional_special_tokens=[]),
  )
  with pytest.raises(ValueError, match=r'no special token <\|im_end\|>'):
    tokenizer_lib.ChatTokenizer(folder)


def test_vocab_check(folder):
  tokenizer = tokenizer_lib.ChatTokenizer(folder)
  tokenizer_lib.check_vocab(tokenizer, 151_936)
  with pytest.raises(ValueError, match='up to 151664 .* vocab_size=600'):
    tokenizer_lib.check_vocab(tokenizer, 600)
