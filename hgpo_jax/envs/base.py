"""What an environment is to the rest of the system.

An environment lives in a worker process, so what crosses the border is data:
an `EnvSpec` (picklable, cheap, checked before anything starts), a `Task`, and
`StepResult`s. The conformance suite in `tests/envs/conformance.py` holds every
environment to this page.
"""

from __future__ import annotations

from typing import Protocol

from hgpo_jax import types


class Env(Protocol):
  """One live environment. Deterministic: (task, actions) fix every result."""

  def reset(self, task: types.Task) -> types.StepResult:
    """Starts `task` from its beginning; any earlier episode is forgotten."""

  def step(self, action: str) -> types.StepResult:
    """Acts. An unknown or inadmissible action is a step like any other."""

  def close(self) -> None:
    """Frees what the environment holds. Safe to call twice."""


class Split(Protocol):
  """A finite, ordered set of tasks. Two splits never share a task."""

  name: str

  def __len__(self) -> int:
    """Number of tasks."""

  def __getitem__(self, index: int) -> types.Task:
    """The task at `index`; raises IndexError outside 0..len-1."""


class EnvSpec(Protocol):
  """The gin-configured description of an environment; a frozen dataclass."""

  max_steps: int

  def check(self) -> None:
    """Raises an error that names the knob if the environment cannot start.

    Called once at start-up, before weights load; looks at versions and data.
    """

  def make(self) -> Env:
    """Makes a live environment; called in a worker process."""

  def split(self, name: str) -> Split:
    """The split called `name`; raises KeyError naming the known ones."""


class PreparingSpec(EnvSpec, Protocol):
  """A spec whose tasks take time to load; the pool calls it if it is there."""

  def prepare(self, task: types.Task) -> None:
    """Loads what a reset to `task` needs; called in an idle worker."""
