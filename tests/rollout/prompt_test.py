"""Layout of the templates, and the token budget."""

import pytest

from hgpo_jax.rollout import prompt as prompt_lib

_FIRST = (
    '-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. '
    'Looking quickly around you, you see a bed 1, and a desk 2.\n\nYour task '
    'is to: put some Mug on desk.'
)
_TASK = 'put some Mug on desk.'
_ADMISSIBLE = ('go to bed 1', 'go to desk 2', 'help', 'inventory', 'look')


class _Words:
  """One id a word; keeps the texts it was given."""

  def __init__(self):
    self.texts = []

  def chat(self, text):
    self.texts.append(text)
    return list(range(len(text.split())))


def _turns(count):
  return [prompt_lib.Turn(f'seen {n}', f'do {n}') for n in range(1, count + 1)]


def _build(template, turns, history_length, budget=100_000):
  words = _Words()
  builder = prompt_lib.PromptBuilder(template, words, history_length, budget)
  observation = 'You are here.' if turns else _FIRST
  prompt = builder.build(_TASK, turns, observation, _ADMISSIBLE)
  return prompt, words.texts[-1]


def test_alfworld_first_step():
  _, text = _build(prompt_lib.AlfworldPrompt(), [], 2)
  assert _FIRST in text and text.count(_TASK) == 1
  assert "'go to bed 1'\n'go to desk 2'\n'inventory'\n'look'\n" in text
  assert 'help' not in text and 'Steps taken' not in text
  assert '<think>' in text and '<action>' in text


def test_alfworld_later_step_has_numbered_history():
  _, text = _build(prompt_lib.AlfworldPrompt(), _turns(5), 2)
  lines = text.split('\n')
  assert lines[1] == f'Your task is to: {_TASK}'
  assert lines[2] == 'Steps taken so far: 5.'
  assert lines[4] == "[Observation 4: 'seen 4', Action 4: 'do 4']"
  assert lines[5] == "[Observation 5: 'seen 5', Action 5: 'do 5']"
  assert lines[6] == 'This is step 6. You observe: You are here.'
  assert 'seen 3' not in text


def test_alfworld_without_history_keeps_task_and_step():
  _, text = _build(prompt_lib.AlfworldPrompt(), _turns(5), 0)
  assert _TASK in text and 'step 6' in text and 'seen' not in text


def test_compact_first_step():
  _, text = _build(prompt_lib.CompactPrompt(), [], 10)
  assert text == (
      'Been: nowhere\nPut: nothing\nHolding: nothing\nNow: You are in the '
      'middle of a room. Looking quickly around you, you see a bed 1, and a '
      'desk 2.\nActions:\ngo to bed 1\ngo to desk 2\nTask: put some mug on '
      'desk.'
  )


_WALK = (
    ('You see a desk 1.', 'go to desk 1'),
    ('You arrive at desk 1.', 'take mug 1 from desk 1'),
    ('You pick up the mug 1.', 'go to shelf 1'),
    ('You arrive at shelf 1.', 'go to desk 1'),
    ('You arrive at desk 1.', 'heat mug 1 with microwave 1'),
    ('You heat the mug 1.', 'take cup 1 from desk 1'),
    ('Nothing happens.', 'move mug 1 to shelf 1'),
)


@pytest.mark.parametrize(
    ('steps', 'told'),
    [
        (2, 'Been: desk 1\nPut: nothing\nHolding: mug 1\n'),
        (4, 'Been: shelf 1, desk 1\nPut: nothing\nHolding: mug 1\n'),
        # What had no effect, the cup that was not there, is not told.
        (6, 'Been: shelf 1, desk 1\nPut: nothing\nHolding: mug 1 heated\n'),
        (7, 'Been: shelf 1, desk 1\nPut: mug 1\nHolding: nothing\n'),
    ],
)
def test_compact_tells_what_past_actions_amount_to(steps, told):
  turns = [prompt_lib.Turn(*turn) for turn in _WALK[:steps]]
  seen = _WALK[steps][0] if steps < len(_WALK) else 'You move the mug 1.'
  text = prompt_lib.CompactPrompt().render('x', turns, 1, seen, (), steps + 1)
  assert text.startswith(told)


@pytest.mark.parametrize(
    ('template', 'verb'),
    [
        (prompt_lib.AlfworldPrompt(), 'do'),
        (prompt_lib.CompactPrompt(()), 'go to'),
    ],
)
def test_budget_drops_oldest_history_and_nothing_else(template, verb):
  turns = [
      prompt_lib.Turn('w ' * 300, f'{verb} {"x " * 50}{n}') for n in range(50)
  ]
  bare, _ = _build(template, turns, 0)
  full, _ = _build(template, turns, 50)
  assert bare.dropped_history == full.dropped_history == 0
  budget = (bare.ids.size + full.ids.size) // 2
  prompt, text = _build(template, turns, 50, budget)
  assert 0 < prompt.dropped_history < 50
  assert prompt.ids.size <= budget
  assert 'x x' in text and text.count('x 49') == 1 and 'x 0' not in text
  assert _TASK.lower() in text.lower()
  assert all(action in text for action in _ADMISSIBLE if action != 'help')
  # One item more would not have fitted.
  again, _ = _build(template, turns, 50 - prompt.dropped_history + 1)
  assert again.ids.size > budget


def test_ids_are_read_only_int32():
  prompt, _ = _build(prompt_lib.CompactPrompt(), [], 10)
  assert prompt.ids.dtype == 'int32'
  with pytest.raises(ValueError, match='read-only'):
    prompt.ids[0] = 1


def test_too_long_without_history_is_refused():
  with pytest.raises(
      prompt_lib.PromptTooLong,
      match=r'step 4 has \d+ tokens without any history, more than '
      'max_prompt_tokens=5; raise Collector.max_prompt_tokens',
  ):
    _build(prompt_lib.CompactPrompt(), _turns(3), 2, budget=5)
