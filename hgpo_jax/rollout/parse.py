"""From the text of a response to the command sent to the environment.

These are the rules of the published verl-agent protocol, kept to the letter:
validity is format only, the command of an invalid response is sent all the
same, and a command is never checked against the admissible ones here.
"""

from __future__ import annotations

from collections.abc import Callable
import re
from typing import NamedTuple

_CHINESE = re.compile('[\u4e00-\u9fff]')


class ParsedAction(NamedTuple):
  """A command, and whether the response had the required format."""

  action: str
  valid: bool


def parse_tagged_action(text: str) -> ParsedAction:
  """The ALFWorld rule: lower case, <action> tags, tail of 30 characters."""
  return _parse_lowered(text, tail=30)


def parse_webshop(text: str) -> ParsedAction:
  """The WebShop rule: as for ALFWorld with a tail of 20 characters."""
  return _parse_lowered(text, tail=20)


def parse_appworld(text: str) -> ParsedAction:
  """The AppWorld rule: <code> tags, text kept as it is, tail of 100."""
  code = _between(text, '<code>', '</code>')
  if code is None:
    return ParsedAction(text[-100:], False)
  return ParsedAction(code, _has_thought(text))


def _parse_lowered(text: str, tail: int) -> ParsedAction:
  lowered = text.lower()
  action = _between(lowered, '<action>', '</action>')
  if action is None:
    return ParsedAction(lowered[-tail:], False)
  valid = _has_thought(text) and not _CHINESE.search(text)
  return ParsedAction(action.strip(), valid)


def _between(text: str, opening: str, closing: str) -> str | None:
  """Text from the first opening to the first closing tag; None without both.

  A closing tag that comes first gives '', which counts as found.
  """
  start, end = text.find(opening), text.find(closing)
  if start < 0 or end < 0:
    return None
  return text[start + len(opening) : end]


def _has_thought(text: str) -> bool:
  """Both tags occur, in any order; unlike <action>, case matters."""
  return '<think>' in text and '</think>' in text


PARSERS: dict[str, Callable[[str], ParsedAction]] = {
    'tagged': parse_tagged_action,
    'webshop': parse_webshop,
    'appworld': parse_appworld,
}
