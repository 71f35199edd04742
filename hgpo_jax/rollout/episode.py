"""One episode while it is played: what it was, is, and ended as."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

from hgpo_jax import types
from hgpo_jax.envs import pool as pool_lib
from hgpo_jax.rollout import parse
from hgpo_jax.rollout import prompt as prompt_lib
from hgpo_jax.rollout import requests

Answer = types.StepResult | pool_lib.EnvFailure


class ReplayError(RuntimeError):
  """An environment did not answer as it did when the record was made."""


class Episode:
  """An episode under way; `opening` holds the steps yet to be replayed."""

  def __init__(
      self,
      task: types.Task,
      group: int,
      trajectory: int,
      opening: Sequence[types.Step] = (),
  ):
    self.task = task
    self.opening = list(opening)
    self.group = group
    self.trajectory = trajectory
    self.instruction = ''
    self.now: types.StepResult | None = None
    self.turns: list[prompt_lib.Turn] = []
    self.steps: list[types.Step] = []
    self.end_reason = ''
    self.error = ''

  def begin(self, answer: Answer) -> None:
    """Takes the answer to the reset."""
    if self._take(answer):
      self.instruction = answer.instruction

  def advance(
      self,
      prompt: prompt_lib.Prompt,
      completion: requests.Completion,
      parsed: parse.ParsedAction,
      answer: Answer,
  ) -> None:
    """Takes the answer to a command; a step that failed is not recorded."""
    before = self.now
    if not self._take(answer):
      return
    self.turns.append(prompt_lib.Turn(before.observation, parsed.action))
    step = types.Step(
        group=self.group,
        trajectory=self.trajectory,
        step=len(self.steps),
        prompt_ids=prompt.ids,
        response_ids=completion.ids,
        sampler_logprobs=completion.logprobs,
        finish_reason=completion.finish_reason,
        action=parsed.action,
        action_valid=parsed.valid,
        action_admissible=parsed.action in before.admissible,
        observation=before.observation,
        state_key=before.state_key,
        next_state_key=answer.state_key,
        reward=answer.reward,
        dropped_history=prompt.dropped_history,
    )
    self.steps.append(step)

  def replay(self, answer: Answer) -> None:
    """Takes the answer to the next action of the opening."""
    before, step = self.now, self.opening.pop(0)
    if not self._take(answer):
      return
    found = before.state_key, answer.state_key
    if found != (step.state_key, step.next_state_key):
      raise ReplayError(
          f'replay of task {self.task.task_id!r}: step {step.step} led from'
          f' {found[0]!r} to {found[1]!r}, expected from {step.state_key!r} to'
          f' {step.next_state_key!r}; give the environment that the record was'
          ' made with, whose results depend on task and actions alone'
      )
    self.turns.append(prompt_lib.Turn(before.observation, step.action))
    self.steps.append(
        dataclasses.replace(step, group=self.group, trajectory=self.trajectory)
    )

  def trajectory_record(self) -> types.Trajectory:
    """The record of the ended episode."""
    return types.Trajectory(
        task=self.task,
        group=self.group,
        trajectory=self.trajectory,
        steps=tuple(self.steps),
        success=self.now is not None and bool(self.now.success),
        score=0.0 if self.now is None else self.now.score,
        end_reason=self.end_reason,
        error=self.error,
    )

  def _take(self, answer: Answer) -> bool:
    """Notes where the episode stands; False if the environment failed."""
    if isinstance(answer, pool_lib.EnvFailure):
      self.end_reason, self.error = answer.kind, answer.message
      return False
    self.now = answer
    if answer.terminated:
      self.end_reason = types.SOLVED if answer.success else types.FAILED
    elif answer.truncated:
      self.end_reason = types.MAX_STEPS
    return True
