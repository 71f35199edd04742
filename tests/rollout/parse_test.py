"""The published rules, exactly."""

import json
import pathlib

import pytest

from hgpo_jax.rollout import parse

_GOLDEN = pathlib.Path(__file__).parents[1] / 'golden' / 'projection'
_PARSER_OF = {
    'alfworld': 'tagged',
    'webshop': 'webshop',
    'appworld': 'appworld',
}


@pytest.mark.parametrize('env', _PARSER_OF)
@pytest.mark.parametrize('path', sorted(_GOLDEN.glob('*.json')), ids=str)
def test_golden(path, env):
  case = json.loads(path.read_text())
  parser = parse.PARSERS[_PARSER_OF[env]]
  parsed = [parser(text) for text in case['texts']]
  assert len(parsed) >= 60
  assert [p.action for p in parsed] == case['expected'][env]['action']
  assert [int(p.valid) for p in parsed] == case['expected'][env]['valid']


def test_a_cut_response_keeps_what_parses():
  cut = '<think>find a mug</think><action>go to desk 1</action'
  parsed = parse.parse_tagged_action(cut)
  assert parsed == ('k><action>go to desk 1</action', False)
