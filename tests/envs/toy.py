"""A tiny text game in the manner of ALFWorld, which misbehaves on request.

Two kinds of tasks: 'open' is solved by opening the box that the instruction
names (one step: the fast, learnable one), 'put' by fetching an apple from one
box and putting it into another (four steps).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import os
import pathlib
import random
import signal
import time

from hgpo_jax import types
from hgpo_jax.envs import counters

SOLVED_REWARD = 10.0
NOTHING = 'Nothing happens.'
SPLITS = ('train', 'valid')

# Live environments of this process, and memory that 'leak' leaks.
_live = collections.Counter()
_leaked: list[bytearray] = []

# What `ToySpec.faults` may ask for: `<what>_in_<where>`.
WHATS = (
    'raise',  # An exception.
    'hang',  # Never returns.
    'stop',  # The process stops, as by kill -STOP.
    'exit',  # The process ends.
    'die_once',  # As by kill -9, but only the first time (see `marker`).
    'slow',  # Takes 0.3 s.
    'nan',  # The reward is not a number.
    'wrong_type',  # The result is a tuple.
    'random',  # The observation differs each time.
    'leak',  # 1 MB is never freed.
    'sys_exit',  # SystemExit, which is no Exception.
    'garbage',  # A message that is no reply; once, see `marker`.
    'noise',  # Bytes that are no message; once, see `marker`.
)
WHERES = ('reset', 'step', 'prepare')


@dataclasses.dataclass(frozen=True)
class ToySplit:
  """Tasks of one split; the seed of a task is its place in the whole game."""

  name: str
  size: int
  kinds: tuple[str, ...]

  def __len__(self) -> int:
    return self.size

  def __getitem__(self, index: int) -> types.Task:
    if not 0 <= index < self.size:
      raise IndexError(f'task {index} of split {self.name!r} of {self.size}')
    kind = self.kinds[index % len(self.kinds)]
    seed = index * len(SPLITS) + SPLITS.index(self.name)
    task_id = f'toy/{self.name}/{kind}-{index}'
    return types.Task(self.name, index, task_id, seed, kind)


@dataclasses.dataclass(frozen=True)
class ToySpec:
  """The toy environment.

  Attributes:
    max_steps: step limit.
    boxes: number of boxes.
    kinds: kinds of tasks, in turn.
    fatal: opening the wrong box ends an 'open' task as failed.
    train_size: tasks of 'train'.
    valid_size: tasks of 'valid'.
    faults: pairs (task index, '<what>_in_<where>'), see `WHATS`, `WHERES`.
    fault_step: the step, from 1, at which '..._in_step' faults happen.
    marker: file that 'die_once' leaves behind, and without which (if it is
      named) `make_error` is not raised.
    make_seconds: how long making an environment takes.
    make_error: text of an ImportError that making an environment raises.
  """

  max_steps: int = 6
  boxes: int = 3
  kinds: tuple[str, ...] = ('open', 'put')
  fatal: bool = False
  train_size: int = 16
  valid_size: int = 8
  faults: tuple[tuple[int, str], ...] = ()
  fault_step: int = 1
  marker: str = ''
  make_seconds: float = 0.0
  make_error: str = ''

  def check(self) -> None:
    for _, fault in self.faults:
      what, _, where = fault.partition('_in_')
      if what not in WHATS or where not in WHERES:
        raise ValueError(f'unknown fault {fault!r}: {WHATS} in {WHERES}')

  def make(self) -> ToyEnv:
    time.sleep(self.make_seconds)
    if self.make_error and os.path.exists(self.marker or '/'):
      try:
        raise ImportError(self.make_error)
      except ImportError as error:
        raise RuntimeError('the toy box is empty') from error
    return ToyEnv(self)

  def prepare(self, task: types.Task) -> None:
    counters.add('toy_prepared')
    if dict(self.faults).get(task.index) == 'raise_in_prepare':
      raise ValueError('the box is locked')

  def split(self, name: str) -> ToySplit:
    if name not in SPLITS:
      raise KeyError(f'unknown split {name!r}; known: {SPLITS}')
    size = self.train_size if name == 'train' else self.valid_size
    return ToySplit(name, size, self.kinds)


_FOREIGN = {'garbage': b'\x00\x00\x00\x04junk', 'noise': b'noise ' * 100}


def _write_to_sockets(data: bytes) -> None:
  """Sends `data` to the parent behind the worker's back."""
  for name in os.listdir('/proc/self/fd'):
    with contextlib.suppress(OSError):
      if os.readlink(f'/proc/self/fd/{name}').startswith('socket:'):
        os.write(int(name), data)


def live_envs() -> int:
  """Environments made and not yet closed in this process."""
  return _live.total()


def solution(spec: ToySpec, task: types.Task) -> list[str]:
  """Commands that solve `task`."""
  source, goal = _boxes(spec, task)
  if task.kind == 'open':
    return [f'open box {goal}']
  return [
      f'go to box {source}',
      f'take apple from box {source}',
      f'go to box {goal}',
      f'move apple to box {goal}',
  ]


def _boxes(spec: ToySpec, task: types.Task) -> tuple[int, int]:
  """The box with the apple and the box that counts."""
  source, goal = random.Random(task.seed).sample(range(1, spec.boxes + 1), 2)
  return source, goal


class ToyEnv:
  """A live toy."""

  def __init__(self, spec: ToySpec):
    self._spec = spec
    self._task: types.Task | None = None
    self._done = True
    self._closed = False
    _live[type(self)] += 1

  def close(self) -> None:
    if not self._closed:
      self._closed = True
      _live[type(self)] -= 1

  def reset(self, task: types.Task) -> types.StepResult:
    self._task, self._done, self._steps = task, False, 0
    self._source, self._goal = _boxes(self._spec, task)
    self._place, self._holding, self._solved = 0, False, False
    verb = 'open' if task.kind == 'open' else 'put the apple in'
    goal = f'{verb} box {self._goal}.'
    names = ', '.join(f'a box {n}' for n in range(1, self._spec.boxes + 1))
    text = f'You are in a room. You see {names}. Your task is to: {goal}'
    return self._fault('reset', self._result(text, instruction=goal))

  def step(self, action: str) -> types.StepResult:
    if self._done or self._closed:
      raise RuntimeError('no episode is running: reset the env first')
    self._steps += 1
    possible = action in self._admissible()
    text = self._act(action) if possible else NOTHING
    where = 'step' if self._steps == self._spec.fault_step else ''
    return self._fault(where, self._result(text))

  def _admissible(self) -> tuple[str, ...]:
    boxes = range(1, self._spec.boxes + 1)
    if self._task.kind == 'open':
      return tuple(f'open box {n}' for n in boxes)
    commands = [f'go to box {n}' for n in boxes if n != self._place]
    if self._holding:
      commands.append(f'move apple to box {self._place}')
    elif self._place == self._source:
      commands.append(f'take apple from box {self._place}')
    return (*commands, 'look')

  def _act(self, action: str) -> str:
    box = int(action.split()[-1]) if action != 'look' else self._place
    if action.startswith('open'):
      self._solved = box == self._goal
      self._done = self._solved or self._spec.fatal
      return f'You open the box {box}.'
    if action.startswith('take'):
      self._holding = True
      return f'You pick up the apple from the box {box}.'
    if action.startswith('move'):
      self._holding, self._source = False, box
      self._solved = self._done = box == self._goal
      return f'You move the apple to the box {box}.'
    self._place = box
    inside = 'an apple' if box == self._source and not self._holding else ''
    return f'On the box {box}, you see {inside or "nothing"}.'

  def _result(self, text: str, instruction: str = '') -> types.StepResult:
    terminated = self._done
    truncated = not terminated and self._steps >= self._spec.max_steps
    self._done = terminated or truncated
    return types.StepResult(
        observation=text,
        state_key=text,
        admissible=() if self._done else self._admissible(),
        reward=SOLVED_REWARD * self._solved,
        terminated=terminated,
        truncated=truncated,
        success=self._solved if self._done else None,
        score=float(self._solved),
        instruction=instruction,
    )

  def _fault(self, where: str, result: types.StepResult) -> types.StepResult:
    for index, fault in self._spec.faults:
      if index == self._task.index and fault.endswith(f'_in_{where}'):
        result = self._misbehave(fault.removesuffix(f'_in_{where}'), result)
    return result

  def _misbehave(self, what: str, result: types.StepResult) -> object:
    if what == 'raise':
      raise ValueError('the box bites')
    if what == 'sys_exit':
      raise SystemExit('the toy leaves')
    if what == 'hang':
      time.sleep(3600)
    if what == 'stop':
      os.kill(os.getpid(), signal.SIGSTOP)
    if what == 'exit':
      os._exit(3)
    if what == 'die_once' and not os.path.exists(self._spec.marker):
      pathlib.Path(self._spec.marker).touch()
      os.kill(os.getpid(), 9)
    if what in _FOREIGN and not os.path.exists(self._spec.marker):
      pathlib.Path(self._spec.marker).touch()
      _write_to_sockets(_FOREIGN[what])
    if what == 'slow':
      time.sleep(0.3)
    if what == 'leak':
      _leaked.append(bytearray(os.urandom(1000)) * 1000)
    if what == 'nan':
      return dataclasses.replace(result, reward=math.nan)
    if what == 'wrong_type':
      return (result.observation, result.reward)
    if what == 'random':
      noise = f' {os.urandom(4).hex()}'
      return dataclasses.replace(result, observation=result.observation + noise)
    return result
