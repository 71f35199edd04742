"""The tokenizer of a Hugging Face model folder; text goes in and out here."""

from __future__ import annotations

from collections.abc import Sequence
import os
import pathlib

import tokenizers

from hgpo_jax.models import hf_config

# The advice at import is to install torch, which nothing here uses.
os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')
import transformers  # pylint: disable=wrong-import-position

IM_START = '<|im_start|>'
IM_END = '<|im_end|>'
END_OF_TEXT = '<|endoftext|>'
_FILES = ('tokenizer.json', 'tokenizer_config.json')


class ChatTokenizer:
  """Token ids of plain text and of chat prompts, and back.

  `tokenizer.json` is used as it stands: transformers only fills the chat
  template, since its Qwen2 class replaces the split rule in the file, and all
  of its classes add the special tokens that a file should have but lacks. No
  file is fetched and no code from the folder runs.

  Attributes:
    stop_ids: sorted ids that end a response: `eos_token_id` of the folder's
      generation_config.json, else <|im_end|> and <|endoftext|>.
    size: one more than the largest id.
  """

  stop_ids: tuple[int, ...]
  size: int

  def __init__(self, folder: str | pathlib.Path):
    """Reads `folder`.

    Raises:
      FileNotFoundError: a tokenizer file is missing.
      ValueError: a file cannot be read, there is no chat template, or a
        special token is missing.
    """
    self._folder = pathlib.Path(folder)
    _check_files(self._folder)
    try:
      self._tokenizer = tokenizers.Tokenizer.from_file(
          str(self._folder / 'tokenizer.json')
      )
      self._chat = transformers.PreTrainedTokenizerFast.from_pretrained(
          str(self._folder), local_files_only=True
      )
    except Exception as error:  # tokenizers raises bare Exception.
      raise ValueError(
          f'the tokenizer in {self._folder} cannot be read ({error}); copy'
          f' {" and ".join(_FILES)} again'
      ) from error
    if not self._chat.chat_template:
      raise ValueError(
          f'{self._folder} has no chat template; expected "chat_template" in '
          'tokenizer_config.json or a file chat_template.jinja'
      )
    self._check_template()
    special_ids = self._special_ids()
    self.stop_ids = _stop_ids(
        self._folder, [special_ids[IM_END], special_ids[END_OF_TEXT]]
    )
    self.size = 1 + max(self._tokenizer.get_vocab().values())

  def encode(self, text: str) -> list[int]:
    """Ids of `text`; special tokens written in it become their ids."""
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def chat(self, user_text: str) -> list[int]:
    """Ids of one user message in the chat template, ready for the answer."""
    return self.encode(self.chat_text(user_text))

  def chat_text(self, user_text: str) -> str:
    """The text that `chat` encodes."""
    return self._chat.apply_chat_template(
        [{'role': 'user', 'content': user_text}],
        tokenize=False,
        add_generation_prompt=True,
    )

  def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
    """Text of `ids`, with or without special tokens; no clean-up of spaces."""
    return self._tokenizer.decode(
        [int(i) for i in ids], skip_special_tokens=skip_special
    )

  def _check_template(self) -> None:
    """Raises unless the template has a place for what the user says."""
    said = 'Task: open box 2'
    try:
      text = self.chat_text(said)
    except Exception as error:  # Whatever Jinja makes of it.
      raise ValueError(
          f'the chat template in {self._folder} cannot be used ({error})'
      ) from error
    if said not in text:
      raise ValueError(
          f'the chat template in {self._folder} makes {text!r} of {said!r};'
          ' expected the message in it'
      )

  def _special_ids(self) -> dict[str, int]:
    ids = {}
    for token in (IM_START, IM_END, END_OF_TEXT):
      ids[token] = self._tokenizer.token_to_id(token)
      if ids[token] is None or self.encode(token) != [ids[token]]:
        raise ValueError(
            f'the tokenizer in {self._folder} has no special token {token}; '
            f'expected {IM_START}, {IM_END} and {END_OF_TEXT} among the '
            'added_tokens of tokenizer.json, as in Qwen2.5'
        )
    return ids


def check_vocab(tokenizer: ChatTokenizer, vocab_size: int) -> None:
  """Raises ValueError if the model has no embedding for some token."""
  if tokenizer.size > vocab_size:
    raise ValueError(
        f'the tokenizer has ids up to {tokenizer.size - 1} but the model has '
        f'vocab_size={vocab_size}; they come from different folders, or '
        'vocab_size in config.json is wrong'
    )


def _check_files(folder: pathlib.Path) -> None:
  missing = [name for name in _FILES if not (folder / name).is_file()]
  if missing:
    raise FileNotFoundError(
        f'{folder} lacks {" and ".join(missing)}; expected a Hugging Face '
        'model folder with a fast tokenizer'
    )


def _stop_ids(folder: pathlib.Path, default: list[int]) -> tuple[int, ...]:
  path = folder / 'generation_config.json'
  config = hf_config.read_json(path) if path.is_file() else {}
  stop = config.get('eos_token_id', default)
  stop = stop if isinstance(stop, list) else [stop]
  if not all(type(i) is int for i in stop):
    raise ValueError(
        f'{path}: eos_token_id is {config["eos_token_id"]!r}; expected an id'
        ' or a list of ids'
    )
  return tuple(sorted(set(stop)))
