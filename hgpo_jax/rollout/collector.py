"""Plays episodes: prompts, responses, actions and results, as records."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
import contextlib
import dataclasses
from typing import Protocol

import numpy as np

from hgpo_jax import config
from hgpo_jax import types
from hgpo_jax.models import base
from hgpo_jax.rollout import episode as episode_lib
from hgpo_jax.rollout import parse
from hgpo_jax.rollout import prompt as prompt_lib
from hgpo_jax.rollout import requests
from hgpo_jax.rollout import sampler as sampler_lib
from hgpo_jax.rollout import tokenizer as tokenizer_lib

_Answer = episode_lib.Answer
_Said = tuple[prompt_lib.Prompt, requests.Completion, parse.ParsedAction]


# How long to wait for an environment where there is nothing else to do.
_WAIT_S = 60.0


class Pool(Protocol):
  """The part of `envs.pool.EnvPool` that a collector needs."""

  num_slots: int

  def submit(self, acts: Mapping[int, types.Task | str]) -> None:
    """Starts a task or acts in each slot named, without waiting."""

  def poll(self, timeout_s: float = 0.0) -> dict[int, _Answer]:
    """Answers that have come; waits up to `timeout_s` for the first one."""

  def worker_of(self, slot: int) -> int:
    """Number of the worker that a slot lives in."""


@config.configurable
@dataclasses.dataclass(frozen=True)
class Collector:
  """How episodes are played, in training and in evaluation.

  Attributes:
    history_length: past steps shown in a prompt at most.
    max_prompt_tokens: longest prompt; history is dropped to keep to it, and
      an episode whose prompt does not fit without history ends as 'context'.
    prompt: the template of prompts.
    parser: how responses are read: 'tagged', 'webshop' or 'appworld'.
    answer: responses are bound to this text, with one of the admissible
      actions in place of {}, such as '<think></think><action>{}</action>'; ''
      leaves them free. For evaluation: recorded log-probs are those among the
      admissible responses, which the learner does not know. Needs
      `Sampler.admissible`.
  """

  history_length: int
  max_prompt_tokens: int
  prompt: prompt_lib.Template
  parser: str = 'tagged'
  answer: str = ''

  def __post_init__(self):
    if self.history_length < 0 or self.max_prompt_tokens < 1:
      raise ValueError(
          f'Collector.history_length is {self.history_length} and '
          f'Collector.max_prompt_tokens {self.max_prompt_tokens}; expected at '
          'least 0 and 1'
      )
    if self.parser not in parse.PARSERS:
      raise ValueError(
          f'Collector.parser is {self.parser!r}; expected one of '
          f'{sorted(parse.PARSERS)}'
      )
    if self.answer and self.answer.count('{}') != 1:
      raise ValueError(
          f'Collector.answer is {self.answer!r}; expected {{}} in it once, where'
          ' the action stands'
      )

  def check(self, sampler: sampler_lib.Sampler) -> None:
    """Raises ValueError unless the sampler has room for what is asked of it."""
    longest = sampler.prompt_buckets[-1]
    if self.max_prompt_tokens > longest:
      raise ValueError(
          f'Collector.max_prompt_tokens is {self.max_prompt_tokens}, more than '
          f'the last of Sampler.prompt_buckets, {longest}; set it to {longest} '
          'or add a bucket'
      )
    if self.answer and not sampler.admissible[0]:
      raise ValueError(
          f'Collector.answer is {self.answer!r}, but Sampler.admissible is'
          f' {sampler.admissible}; set it to how many actions there are at most,'
          ' and the tokens of the longest answer'
      )

  def bind(
      self,
      pool: Pool,
      tokenizer: tokenizer_lib.ChatTokenizer,
      sampler: sampler_lib.BoundSampler,
  ) -> BoundCollector:
    """The collector that plays in `pool` with the policy of `sampler`."""
    return BoundCollector(self, pool, tokenizer, sampler)


class BoundCollector:
  """Plays episodes in the slots of a pool, as many at a time as it has.

  Attributes:
    pool: environments.
    sampler: of the policy.
    prompts: makes prompts.
  """

  def __init__(
      self,
      spec: Collector,
      pool: Pool,
      tokenizer: tokenizer_lib.ChatTokenizer,
      sampler: sampler_lib.BoundSampler,
  ):
    """See `Collector.bind`.

    Raises:
      ValueError: as `Collector.check`.
    """
    spec.check(sampler.spec)
    self.pool = pool
    self.sampler = sampler
    self._tokenizer = tokenizer
    self._parse = parse.PARSERS[spec.parser]
    self._answer = spec.answer
    self.prompts = prompt_lib.PromptBuilder(
        spec.prompt, tokenizer, spec.history_length, spec.max_prompt_tokens
    )

  def parse(self, ids: np.ndarray) -> parse.ParsedAction:
    """The command of a response."""
    return self._parse(self._tokenizer.decode(ids))

  def bounds(self, admissible: Sequence[str]) -> list[list[int]] | None:
    """Ids of the responses that there may be; None for any."""
    if not self._answer or not admissible:
      return None
    stop = self._tokenizer.stop_ids[0]
    texts = [self._answer.replace('{}', action) for action in admissible]
    return [[*self._tokenizer.encode(text), stop] for text in texts]

  def collect(
      self,
      params: base.Params,
      tasks: Sequence[types.Task],
      group_size: int,
      seed: int,
      iteration: int,
      temperature: float,
      openings: Sequence[Sequence[types.Step]] = (),
      first_group: int = 0,
  ) -> list[types.Trajectory]:
    """One group of `group_size` episodes for each task, ordered by id.

    The i-th task is played by group g = first_group + i; the members of the
    group are trajectories g * group_size + m.
    Tokens depend on (seed, iteration, task, trajectory, step) and on nothing
    else: not on the number of slots, nor on which episodes run side by side.

    Args:
      params: parameters of the policy, as the learner has them or, better,
        from `BoundSampler.prepare`.
      tasks: the task of each group.
      group_size: episodes of a task; 1 for evaluation.
      seed: of the run; not negative.
      iteration: of the run; not negative.
      temperature: of sampling; 0 is greedy.
      openings: of each group, recorded steps that its episodes begin with:
        their actions are replayed, and sampling goes on from there. Not for
        training: tokens of replayed steps are those of the record.
      first_group: id of the first group; that of the next one of an iteration
        that collects more than once.

    Raises:
      episode.ReplayError: a replay did not lead where the record says.
    """
    openings = openings or [()] * len(tasks)
    episodes = [
        episode_lib.Episode(task, group, group * group_size + member, opening)
        for group, (task, opening) in enumerate(
            zip(tasks, openings, strict=True), start=first_group
        )
        for member in range(group_size)
    ]
    _Play(self, params, episodes, (seed, iteration), temperature).run()
    return [episode.trajectory_record() for episode in episodes]


class _Play:
  """Episodes under way: each goes on as soon as what it waits for is there."""

  def __init__(
      self,
      collector: BoundCollector,
      params: base.Params,
      episodes: Sequence[episode_lib.Episode],
      key: tuple[int, ...],
      temperature: float,
  ):
    self._collector = collector
    self._pool = collector.pool
    self._key = key
    self._temperature = temperature
    self._waiting = collections.deque(episodes)
    self._live: dict[int, episode_lib.Episode] = {}
    # What the engine works on: (slot, prompt) by ticket; and the rest.
    self._asked: dict[int, tuple[int, prompt_lib.Prompt]] = {}
    self._acting: dict[int, _Said | None] = {}
    self._engine = collector.sampler.open(params) if episodes else None

  def run(self) -> None:
    """Plays all episodes to their end."""
    # Neighbours, such as the members of a group, into one worker: what it
    # derives for the game of one of them serves all.
    slots = range(min(self._pool.num_slots, len(self._waiting)))
    self._begin(sorted(slots, key=self._pool.worker_of))
    try:
      while self._live:
        self._engine.dispatch()
        idle = not self._engine.busy
        self._take(self._pool.poll(_WAIT_S if idle else 0.0))
        self._act(self._engine.collect())
    except Exception:
      self._drain()
      raise

  def _drain(self) -> None:
    """Leaves no act under way, and no answer for whoever plays next."""
    with contextlib.suppress(RuntimeError):  # The pool may have been closed.
      while self._acting and (answers := self._pool.poll(_WAIT_S)):
        for slot in answers:
          self._acting.pop(slot, None)

  def _begin(self, slots: Sequence[int]) -> None:
    """Starts waiting episodes in free slots."""
    started = {s: self._waiting.popleft() for s in slots[: len(self._waiting)]}
    self._live |= started
    self._acting |= dict.fromkeys(started)
    self._pool.submit({s: e.task for s, e in started.items()})

  def _take(self, answers: Mapping[int, _Answer]) -> None:
    """What environments answered: an end, a replay, or the next prompt."""
    free, acts = [], {}
    for slot, answer in answers.items():
      episode, said = self._live[slot], self._acting.pop(slot)
      if said is not None:
        episode.advance(*said, answer)
      elif episode.now is None:
        episode.begin(answer)
      else:
        episode.replay(answer)
      if not episode.end_reason and episode.opening:
        acts[slot] = episode.opening[0].action
      elif not episode.end_reason:
        self._ask(slot, episode)
      if episode.end_reason:
        del self._live[slot]
        self._engine.release(slot)
        free.append(slot)
    if acts:
      self._acting |= dict.fromkeys(acts)
      self._pool.submit(acts)
    if free and self._waiting:
      self._begin(free)

  def _ask(self, slot: int, episode: episode_lib.Episode) -> None:
    """Asks for a response; ends an episode whose prompt cannot fit."""
    try:
      prompt = self._collector.prompts.build(
          episode.instruction,
          episode.turns,
          episode.now.observation,
          episode.now.admissible,
      )
    except prompt_lib.PromptTooLong:
      episode.end_reason = types.CONTEXT
      return
    place = episode.task.index, episode.trajectory, len(episode.steps)
    request = self._collector.sampler.request(
        prompt.ids,
        (*self._key, *place),
        self._temperature,
        session=slot,
        admissible=self._collector.bounds(episode.now.admissible),
    )
    self._asked[self._engine.submit(request)] = slot, prompt

  def _act(
      self, completions: Sequence[tuple[int, requests.Completion]]
  ) -> None:
    """Sends the commands of responses."""
    acts = {}
    for ticket, completion in completions:
      slot, prompt = self._asked.pop(ticket)
      parsed = self._collector.parse(completion.ids)
      self._acting[slot] = prompt, completion, parsed
      acts[slot] = parsed.action
    if acts:
      self._pool.submit(acts)
