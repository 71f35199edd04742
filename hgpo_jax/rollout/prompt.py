"""What the agent reads before each action, within a budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import re
from typing import Protocol

import numpy as np

from hgpo_jax import config

_WELCOME = '-= Welcome to TextWorld, ALFRED! =-'
_TASK_MARK = 'Your task is to: '
_NO_EFFECT = 'Nothing happens'
_PREPOSITION = re.compile(' (?:from|to|with) ')
_TREATED = {'heat': 'heated', 'cool': 'cooled', 'clean': 'cleaned'}


class PromptTooLong(ValueError):
  """Task, observation and admissible actions alone exceed the budget."""


@dataclasses.dataclass(frozen=True)
class Turn:
  """A past step: what the agent saw and the command it then gave."""

  observation: str
  action: str


class Template(Protocol):
  """Turns one moment of an episode into the text of the user message."""

  def render(
      self,
      instruction: str,
      turns: Sequence[Turn],
      first_step_number: int,
      observation: str,
      admissible: Sequence[str],
      step: int,
  ) -> str:
    """The text of the prompt.

    Args:
      instruction: the task in words.
      turns: the part of the history to show, oldest first.
      first_step_number: 1-based number of the step of `turns[0]`.
      observation: what the environment last said.
      admissible: commands that the environment would act on now.
      step: 1-based number of the step about to be taken.
    """


@config.configurable
@dataclasses.dataclass(frozen=True)
class AlfworldPrompt:
  """Prompt with the parts, in the order, of the verl-agent ALFWorld protocol.

  Role, task, steps taken, numbered observation-action pairs, the current
  step, admissible actions, form of the answer. At step 1 there is no
  history, and the task is left to the observation that states it.

  Attributes:
    hide_actions: admissible actions that are not listed.
  """

  hide_actions: tuple[str, ...] = ('help',)

  def render(
      self,
      instruction: str,
      turns: Sequence[Turn],
      first_step_number: int,
      observation: str,
      admissible: Sequence[str],
      step: int,
  ) -> str:
    """See `Template.render`."""
    actions = '\n'.join(f"'{a}'" for a in _listed(admissible, self))
    history = '\n'.join(
        f"[Observation {n}: '{turn.observation}', Action {n}: '{turn.action}']"
        for n, turn in enumerate(turns, first_step_number)
    )
    parts = ['You are a skilled agent at work in the ALFRED household world.']
    if step > 1 or instruction not in observation:
      parts.append(f'Your task is to: {instruction}')
    if step > 1:
      parts.append(f'Steps taken so far: {step - 1}.')
    if turns:
      parts.append(f'The last {len(turns)} of them were:\n{history}')
    if step > 1:
      parts.append(f'This is step {step}. You observe: {observation}')
    else:
      parts.append(f'You observe: {observation}')
    parts.append(f'The actions you can take now are:\n{actions}')
    parts.append(
        'Choose what to do next. First reason step by step about the state of'
        ' the task, inside <think> </think> tags. Then give exactly one of the'
        ' actions above, inside <action> </action> tags.'
    )
    return '\n'.join(parts)


@config.configurable
@dataclasses.dataclass(frozen=True)
class CompactPrompt:
  """Short prompt for small policies: what past actions amount to, task last.

  Of the history it tells where the agent has been, what it has put down and
  what it holds, in few words that are not those of the actions on offer: a
  small model copies what followed the word it has just written, and must find
  that among the actions it can take now.

  Attributes:
    hide_actions: admissible actions that are not listed.
  """

  hide_actions: tuple[str, ...] = ('help', 'inventory', 'look')

  def render(
      self,
      instruction: str,
      turns: Sequence[Turn],
      first_step_number: int,
      observation: str,
      admissible: Sequence[str],
      step: int,
  ) -> str:
    """See `Template.render`; numbers of steps are not shown."""
    del first_step_number, step
    after = [*(turn.observation for turn in turns[1:]), observation]
    worked = [
        turn.action
        for turn, seen in zip(turns, after)
        if not seen.startswith(_NO_EFFECT)
    ]
    been, put, held = _recount(worked)
    lines = [
        f'Been: {", ".join(been) or "nowhere"}',
        f'Put: {", ".join(put) or "nothing"}',
        f'Holding: {held or "nothing"}',
        f'Now: {_scene(observation)}',
        'Actions:',
    ]
    lines += _listed(admissible, self)
    lines.append(f'Task: {instruction.lower().strip()}')
    return '\n'.join(lines)


@dataclasses.dataclass(frozen=True)
class Prompt:
  """Token ids of a prompt, and how many history items the budget left out.

  Attributes:
    ids: int32 [prompt length], read-only.
    dropped_history: items of the history window that did not fit.
  """

  ids: np.ndarray
  dropped_history: int


class Tokenizer(Protocol):
  """The part of `tokenizer.ChatTokenizer` that prompts need."""

  def chat(self, user_text: str) -> list[int]:
    """Ids of one user message, ready for the answer."""


@dataclasses.dataclass(frozen=True)
class PromptBuilder:
  """Renders and tokenizes prompts of at most `max_prompt_tokens` tokens.

  What gives way when a prompt is too long is the history, oldest first; the
  task, the observation and the admissible actions are never cut.

  Attributes:
    template: how a prompt reads.
    tokenizer: makes ids of text.
    history_length: past steps shown at most; 0 shows none.
    max_prompt_tokens: the budget, chat template included.
  """

  template: Template
  tokenizer: Tokenizer
  history_length: int
  max_prompt_tokens: int

  def build(
      self,
      instruction: str,
      turns: Sequence[Turn],
      observation: str,
      admissible: Sequence[str],
  ) -> Prompt:
    """The prompt after `turns`, the whole history of the episode.

    Raises:
      PromptTooLong: it does not fit even without history.
    """
    window = min(self.history_length, len(turns))
    for dropped in range(window + 1):
      first = len(turns) - window + dropped
      text = self.template.render(
          instruction=instruction,
          turns=turns[first:],
          first_step_number=first + 1,
          observation=observation,
          admissible=admissible,
          step=len(turns) + 1,
      )
      ids = self.tokenizer.chat(text)
      if len(ids) <= self.max_prompt_tokens:
        return Prompt(_read_only(ids), dropped)
    raise PromptTooLong(
        f'the prompt of step {len(turns) + 1} has {len(ids)} tokens without '
        f'any history, more than max_prompt_tokens={self.max_prompt_tokens}; '
        'raise Collector.max_prompt_tokens'
    )


def _recount(worked: Sequence[str]) -> tuple[list[str], list[str], str]:
  """(places in the order last gone to, objects put down, object held).

  A held object that was heated, cooled or cleaned since is told as that.
  """
  been: dict[str, None] = {}
  put: dict[str, None] = {}
  held = ''
  for action in worked:
    verb, _, rest = action.partition(' ')
    name = _PREPOSITION.split(rest)[0]
    if action.startswith('go to '):
      place = action.removeprefix('go to ')
      been.pop(place, None)
      been[place] = None
    elif verb == 'take':
      put.pop(name, None)
      held = name
    elif verb == 'move':
      put[name] = None
      held = ''
    elif verb in _TREATED:
      held = f'{name} {_TREATED[verb]}'
  return list(been), list(put), held


def _listed(
    admissible: Sequence[str], template: AlfworldPrompt | CompactPrompt
) -> list[str]:
  return [a for a in admissible if a not in template.hide_actions]


def _scene(observation: str) -> str:
  """The observation without banner and task, on one line."""
  scene = observation.replace(_WELCOME, '').split(_TASK_MARK)[0]
  return ' '.join(scene.split())


def _read_only(ids: Sequence[int]) -> np.ndarray:
  array = np.asarray(ids, np.int32)
  array.flags.writeable = False
  return array
