"""What every side of `sampler.py` samples, and how it is timed; numpy only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import json
import sys
import time

import numpy as np

VOCAB = 4096
ROWS, PROMPT, NEW = 32, 256, 64
# The agent workload.
GROUPS, MEMBERS, TURNS = 16, 8, 5
FIRST, OBSERVED = 128, 16
# Random weights give every token about the same probability, so responses
# that end at any of so many ids have lengths of a geometric distribution.
STOPS = tuple(range(1, 1 + VOCAB // 16))
# Drawn as prompts: no stop id, and no padding.
_FIRST_ID = STOPS[-1] + 1

# Samples responses to prompts, of at most so many tokens, by a seed.
Generate = Callable[[Sequence[np.ndarray], int], Sequence[Sequence[int]]]


def batch(seed: int) -> np.ndarray:
  """Prompts [ROWS, PROMPT] of the plain workload."""
  return _ids(seed, (ROWS, PROMPT))


def task(seed: int, group: int) -> np.ndarray:
  """The first prompt of the episodes of a group."""
  return _ids(1000 + 100 * seed + group, (FIRST,))


def observation(seed: int, group: int, member: int, turn: int) -> np.ndarray:
  """What follows the response of a turn."""
  numbers = (10**6 + seed, group, member, turn)
  return _ids(np.random.SeedSequence(numbers), (OBSERVED,))


def _ids(seed: object, shape: tuple[int, ...]) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return rng.integers(_FIRST_ID, VOCAB, shape, np.int32)


def one_by_one(generate: Generate, seed: int, groups: int) -> int:
  """Plays the agent workload a turn of an episode at a time: tokens made."""
  made = 0
  for group in range(groups):
    for member in range(MEMBERS):
      prompt = task(seed, group)
      for turn in range(TURNS):
        number = ((seed * 100 + group) * 100 + member) * 100 + turn
        (ids,) = generate([prompt], number)
        made += len(ids)
        seen = observation(seed, group, member, turn)
        prompt = np.concatenate([prompt, np.asarray(ids, np.int32), seen])
  return made


def serve(workloads: dict[str, Callable[[int], int]]) -> None:
  """Answers each line of stdin, (workload, seed), with one round of it.

  Before the first round of each comes another, which compiles.
  """
  say({'ready': sorted(workloads)})
  warm = set()
  for line in sys.stdin:
    name, seed = json.loads(line)
    if name not in warm:
      workloads[name](0)
      warm.add(name)
    cpu, wall = time.process_time(), time.perf_counter()
    tokens = workloads[name](seed)
    say(
        {
            'tokens': tokens,
            'cpu_s': time.process_time() - cpu,
            'wall_s': time.perf_counter() - wall,
        }
    )


def say(message: dict[str, object]) -> None:
  """Writes a line that the parent reads; other output is none of it."""
  print('@' + json.dumps(message), flush=True)
