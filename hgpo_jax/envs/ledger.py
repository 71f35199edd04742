"""What a pool knows of its slots: episodes so far, and acts under way.

No process and no clock here, only data: which requests a slot needs next
(after its worker was lost, a replay of its episode comes first) and what a
reply means for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import dataclasses
import itertools

from absl import logging

from hgpo_jax import types
from hgpo_jax.envs import worker

# A worker may die of something else than the request it was busy with (out of
# memory, a signal), so that request gets a second try, in a fresh worker.
_MAX_CRASHES = 2


@dataclasses.dataclass(frozen=True)
class EnvFailure:
  """The answer of a slot whose environment failed; its episode is lost.

  Attributes:
    kind: 'env_error' or 'timeout', as in `types.END_REASONS`.
    message: what happened, in which task and step.
  """

  kind: str
  message: str


Answers = dict[int, types.StepResult | EnvFailure]


@dataclasses.dataclass
class Job:
  """What is wanted of a slot: a reset (task) or a step."""

  task: types.Task | None = None
  action: str = ''
  crashes: int = 0
  final: int = -1  # Id of the request whose reply answers it.
  check: int = -1  # Id of the last replayed request, if there is one.


@dataclasses.dataclass
class _Episode:
  """Enough to play an episode again: every env is deterministic."""

  task: types.Task
  last: types.StepResult
  actions: list[str] = dataclasses.field(default_factory=list)
  live: bool = True  # False: its worker was lost; replay before acting.


class Ledger:
  """The books of `num_slots` slots.

  Attributes:
    answers: answers that nobody has taken yet.
    counts: 'replays', 'timeouts' and 'env_errors' since the start.
  """

  def __init__(self, num_slots: int):
    self.num_slots = num_slots
    self.answers: Answers = {}
    self.counts = dict.fromkeys(('replays', 'timeouts', 'env_errors'), 0)
    self._ids = itertools.count(worker.START + 1)
    self._episodes: dict[int, _Episode] = {}
    self._jobs: dict[int, Job] = {}

  def open(self, jobs: Mapping[int, Job]) -> None:
    """Adds acts, one a slot. Raises TypeError or ValueError for mistakes."""
    for slot, job in jobs.items():
      if slot not in range(self.num_slots):
        raise ValueError(f'slot {slot} is not in 0..{self.num_slots - 1}')
      if slot in self._jobs:
        raise ValueError(f'slot {slot} is busy: poll for its answer first')
      if job.task is not None:
        if not isinstance(job.task, types.Task):
          raise TypeError(f'slot {slot}: got {job.task!r}, expected a Task')
      elif not isinstance(job.action, str):
        raise TypeError(f'slot {slot}: got {job.action!r}, expected a command')
      elif slot not in self._episodes:
        raise ValueError(f'slot {slot} has no episode: reset it first')
      elif self._episodes[slot].last.done:
        raise ValueError(f'the episode of slot {slot} is over: reset it first')
    self._jobs |= jobs

  def take(self, slots: Iterable[int] | None = None) -> Answers:
    """Hands out answers, of these slots in their order or all there are."""
    chosen = list(self.answers if slots is None else slots)
    return {slot: self.answers.pop(slot) for slot in chosen}

  def waiting(self, slots: Iterable[int]) -> list[int]:
    """Those of `slots` whose act has no answer yet."""
    return [slot for slot in slots if slot in self._jobs]

  def cut_off(self, slots: Iterable[int]) -> list[int]:
    """Those of `slots` that wait for a step in an episode that was lost."""
    return [
        slot
        for slot in self.waiting(slots)
        if self._jobs[slot].task is None and not self._episodes[slot].live
    ]

  def requests(self, slots: Iterable[int]) -> list[worker.Request]:
    """What to send, in order, for those of `slots` that wait."""
    return [r for slot in self.waiting(slots) for r in self._requests(slot)]

  def _requests(self, slot: int) -> list[worker.Request]:
    job, episode = self._jobs[slot], self._episodes.get(slot)
    acts: list[tuple[types.Task | None, str]] = []
    if job.task is None and not episode.live:
      acts = [(episode.task, ''), *((None, a) for a in episode.actions)]
      self.counts['replays'] += 1
    requests = [
        worker.Request(next(self._ids), slot, task, action)
        for task, action in [*acts, (job.task, job.action)]
    ]
    job.final = requests[-1].id
    job.check = requests[-2].id if acts else -1
    return requests

  def settle(self, request: worker.Request, reply: worker.Reply) -> None:
    """Books the reply to one request."""
    slot, job = request.slot, self._jobs.get(request.slot)
    if job is None:  # The rest of a replay that has already failed.
      return
    error = reply.error or self._mismatch(slot, job, reply)
    if error:
      self.fail(slot, types.ENV_ERROR, error)
    elif request.id == job.final:
      self.answer(slot, reply.result)

  def _mismatch(self, slot: int, job: Job, reply: worker.Reply) -> str:
    """Why `reply` cannot be what was asked for; '' if it can."""
    episode = self._episodes.get(slot)
    task_id = (job.task or episode.task).task_id
    if reply.task_id != task_id:
      return f'the reply is for task {reply.task_id!r}, expected {task_id!r}'
    if reply.id == job.check and reply.result != episode.last:
      return (
          f'task {task_id!r}: after a replay of {len(episode.actions)} actions'
          f' the env answered {reply.result}, before {episode.last}; it is not'
          ' deterministic'
      )
    return ''

  def answer(self, slot: int, result: types.StepResult) -> None:
    """Answers the call for `slot`."""
    job = self._jobs[slot]
    if job.task is not None:
      self._episodes[slot] = _Episode(job.task, result)
    else:
      episode = self._episodes[slot]
      episode.actions.append(job.action)
      episode.last, episode.live = result, True
    self.answers[slot] = result
    del self._jobs[slot]

  def crash(self, slot: int, message: str) -> None:
    """The worker ended while busy with `slot`: a second time is a failure."""
    if slot in self._jobs:
      self._jobs[slot].crashes += 1
      if self._jobs[slot].crashes >= _MAX_CRASHES:
        self.fail(slot, types.ENV_ERROR, f'{message}, {_MAX_CRASHES} times')

  def lose(self, slots: Iterable[int]) -> None:
    """The worker of `slots` is gone, and with it where their envs stood."""
    for slot in slots:
      if slot in self._episodes:
        self._episodes[slot].live = False

  def fail(self, slot: int, kind: str, message: str) -> None:
    """Answers the act of `slot` with a failure, if it still waits."""
    job = self._jobs.pop(slot, None)
    if job is None:
      return
    episode = self._episodes.pop(slot, None)
    task = job.task or episode.task
    if task.task_id not in message:
      what = 'reset' if job.task else f'step {len(episode.actions) + 1}'
      message = f'{message} [{what} of task {task.task_id!r}]'
    logging.warning('slot %d: %s: %s', slot, kind, message)
    self.counts['timeouts' if kind == types.TIMEOUT else 'env_errors'] += 1
    self.answers[slot] = EnvFailure(kind, message)
