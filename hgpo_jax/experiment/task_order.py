"""Which tasks an iteration plays: pure functions of (seed, iteration)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hgpo_jax import types
from hgpo_jax.envs import base


def choose(
    split: base.Split, count: int, seed: int, iteration: int
) -> list[types.Task]:
  """The tasks of an iteration, all different.

  The split is walked in a new random order each pass, so that every task is
  played before any is played again; a rest shorter than `count` is left out.
  """
  per_pass = len(split) // count
  epoch, position = divmod(iteration, per_pass)
  key = np.random.SeedSequence([seed, epoch])
  order = np.random.default_rng(key).permutation(len(split))
  chosen = order[position * count : (position + 1) * count]
  return [split[int(index)] for index in chosen]


def spare(
    split: base.Split, tasks: Sequence[types.Task], seed: int, iteration: int
) -> Iterator[types.Task]:
  """All tasks but the iteration's own `tasks`, in an order of its own."""
  taken = {task.index for task in tasks}
  # A third entry: no key of `choose` is the same.
  key = np.random.SeedSequence([seed, iteration, 1])
  order = np.random.default_rng(key).permutation(len(split))
  return (split[int(index)] for index in order if index not in taken)
