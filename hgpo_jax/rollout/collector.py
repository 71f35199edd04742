"""Plays episodes: prompts, responses, actions and results, as records."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
import dataclasses
from typing import Protocol

import numpy as np

from hgpo_jax import config
from hgpo_jax import types
from hgpo_jax.models import base
from hgpo_jax.rollout import episode as episode_lib
from hgpo_jax.rollout import parse
from hgpo_jax.rollout import prompt as prompt_lib
from hgpo_jax.rollout import sampler as sampler_lib
from hgpo_jax.rollout import tokenizer as tokenizer_lib

_Answer = episode_lib.Answer


class Pool(Protocol):
  """The part of `envs.pool.EnvPool` that a collector needs."""

  num_slots: int

  def reset(self, tasks: Mapping[int, types.Task]) -> dict[int, _Answer]:
    """Starts the task of each slot named."""

  def step(self, actions: Mapping[int, str]) -> dict[int, _Answer]:
    """Acts in each slot named."""


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
  """

  history_length: int
  max_prompt_tokens: int
  prompt: prompt_lib.Template
  parser: str = 'tagged'

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

  def bind(
      self,
      pool: Pool,
      tokenizer: tokenizer_lib.ChatTokenizer,
      sampler: sampler_lib.BoundSampler,
  ) -> BoundCollector:
    """The collector that plays in `pool` with the policy of `sampler`."""
    return BoundCollector(self, pool, tokenizer, sampler)


class BoundCollector:
  """Plays episodes in the slots of a pool, as many at a time as it has."""

  def __init__(
      self,
      spec: Collector,
      pool: Pool,
      tokenizer: tokenizer_lib.ChatTokenizer,
      sampler: sampler_lib.BoundSampler,
  ):
    """See `Collector.bind`.

    Raises:
      ValueError: the sampler takes no prompts as long as the spec allows.
    """
    longest = sampler.spec.prompt_buckets[-1]
    if spec.max_prompt_tokens > longest:
      raise ValueError(
          f'Collector.max_prompt_tokens is {spec.max_prompt_tokens}, more than '
          f'the last of Sampler.prompt_buckets, {longest}; set it to {longest} '
          'or add a bucket'
      )
    self._pool = pool
    self._tokenizer = tokenizer
    self._sampler = sampler
    self._parse = parse.PARSERS[spec.parser]
    self._prompts = prompt_lib.PromptBuilder(
        spec.prompt, tokenizer, spec.history_length, spec.max_prompt_tokens
    )

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
      params: parameters of the policy, as the learner has them.
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
    params = self._sampler.prepare(params)
    waiting = collections.deque(episodes)
    live: dict[int, episode_lib.Episode] = {}
    while waiting or live:
      self._refill(live, waiting)
      prompts = self._build_prompts(live)
      keys = [
          (seed, iteration, e.task.index, e.trajectory, len(e.steps))
          for e in live.values()
      ]
      completions = self._sampler.generate(
          params,
          [prompt.ids for prompt in prompts.values()],
          np.asarray(keys, np.int64).reshape(-1, 5),
          temperature,
      )
      self._act(live, prompts, dict(zip(live, completions, strict=True)))
    return [episode.trajectory_record() for episode in episodes]

  def _refill(
      self,
      live: dict[int, episode_lib.Episode],
      waiting: collections.deque[episode_lib.Episode],
  ) -> None:
    """Starts waiting episodes in free slots until one of them runs out."""
    while waiting and len(live) < self._pool.num_slots:
      free = [s for s in range(self._pool.num_slots) if s not in live]
      # Neighbours, such as the members of a group, into one worker: what it
      # derives for the game of one of them serves all.
      chosen = sorted(free[: len(waiting)], key=self._pool.worker_of)
      started = {slot: waiting.popleft() for slot in chosen}
      answers = self._pool.reset({s: e.task for s, e in started.items()})
      for slot, episode in started.items():
        episode.begin(answers[slot])
        live[slot] = episode
      _drop_ended(live)
      while behind := {s: e for s, e in live.items() if e.opening}:
        answers = self._pool.step(
            {s: e.opening[0].action for s, e in behind.items()}
        )
        for slot, episode in behind.items():
          episode.replay(answers[slot])
        _drop_ended(live)

  def _build_prompts(
      self, live: dict[int, episode_lib.Episode]
  ) -> dict[int, prompt_lib.Prompt]:
    """Prompts of all live episodes; ends those whose prompt cannot fit."""
    prompts = {}
    for slot, episode in live.items():
      try:
        prompts[slot] = self._prompts.build(
            episode.instruction,
            episode.turns,
            episode.now.observation,
            episode.now.admissible,
        )
      except prompt_lib.PromptTooLong:
        episode.end_reason = types.CONTEXT
    _drop_ended(live)
    return prompts

  def _act(
      self,
      live: dict[int, episode_lib.Episode],
      prompts: Mapping[int, prompt_lib.Prompt],
      completions: Mapping[int, sampler_lib.Completion],
  ) -> None:
    """Sends the commands of the responses and records what they led to."""
    parsed = {
        slot: self._parse(self._tokenizer.decode(completion.ids))
        for slot, completion in completions.items()
    }
    answers = self._pool.step({s: p.action for s, p in parsed.items()})
    for slot, episode in live.items():
      episode.advance(
          prompts[slot], completions[slot], parsed[slot], answers[slot]
      )
    _drop_ended(live)


def _drop_ended(live: dict[int, episode_lib.Episode]) -> None:
  for slot in [s for s, episode in live.items() if episode.end_reason]:
    del live[slot]
