"""Random steps for the tests of estimators, and float64 references."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import zlib

import numpy as np

from hgpo_jax import types


def random_inputs(
    seed: int, groups: int = 3, members: int = 4, states: int = 4
) -> types.AdvantageInputs:
  """Episodes of 1 to 8 steps over few states, so that states recur."""
  rng = np.random.default_rng(seed)
  columns: dict[str, list[float]] = {name: [] for name in _COLUMNS}
  for trajectory in range(groups * members):
    length = int(rng.integers(1, 9))
    reward = rng.choice([0.0, 0.0, 0.5, 1.0], length)
    reward[-1] = rng.choice([0.0, 10.0])
    state = rng.integers(0, states, length + 1)
    columns['reward_N'] += reward.tolist()
    columns['outcome_N'] += [reward.sum()] * length
    columns['success_N'] += [reward[-1] == 10.0] * length
    columns['group_N'] += [trajectory // members] * length
    columns['trajectory_N'] += [trajectory] * length
    columns['step_N'] += list(range(length))
    columns['state_N'] += state[:-1].tolist()
    columns['next_state_N'] += state[1:].tolist()
    columns['action_N'] += rng.integers(0, 5, length).tolist()
    columns['valid_N'] += (rng.random(length) < 0.8).tolist()
  inputs = make_inputs(
      columns, tuple(f'room {state}' for state in range(states))
  )
  tokens_N = rng.integers(1, 9, len(inputs.step_N)).astype(np.int32)
  return dataclasses.replace(
      inputs, response_tokens_N=tokens_N, embed_texts=_embed
  )


def make_inputs(
    columns: dict[str, list[float]], texts: tuple[str, ...] = ()
) -> types.AdvantageInputs:
  """Columns as arrays of the right types."""
  arrays = {
      name: np.array(columns[name], kind) for name, kind in _COLUMNS.items()
  }
  return types.AdvantageInputs(**arrays, state_texts=texts)


def simple_inputs(outcomes: list[list[float]]) -> types.AdvantageInputs:
  """One trajectory of one step per number; a list of numbers per group."""
  flat = [x for group in outcomes for x in group]
  num = len(flat)
  group = [g for g, group in enumerate(outcomes) for _ in group]
  return make_inputs(
      {
          'reward_N': flat,
          'outcome_N': flat,
          'success_N': [x > 0 for x in flat],
          'group_N': group,
          'trajectory_N': list(range(num)),
          'step_N': [0] * num,
          'state_N': [0] * num,
          'next_state_N': [0] * num,
          'action_N': [0] * num,
          'valid_N': [True] * num,
      }
  )


def take(
    inputs: types.AdvantageInputs, rows: np.ndarray
) -> types.AdvantageInputs:
  """The rows, in that order."""
  return dataclasses.replace(
      inputs, **{name: getattr(inputs, name)[rows] for name in _names(inputs)}
  )


def join(
    first: types.AdvantageInputs, second: types.AdvantageInputs
) -> types.AdvantageInputs:
  """Both, as different groups and trajectories that share state ids."""
  columns = {
      name: np.concatenate([getattr(first, name), getattr(second, name)])
      for name in _names(first)
  }
  num = len(first.step_N)
  for name in ('group_N', 'trajectory_N'):
    columns[name][num:] += getattr(first, name).max() + 1
  return dataclasses.replace(first, **columns)


def reference(
    inputs: types.AdvantageInputs,
    kind: str,
    *,
    std: bool,
    penalty: float = 0.1,
    gamma: float = 0.95,
    weight: float = 1.0,
    levels: int = 3,
    alpha: float = 1.0,
    base: bool = False,
) -> np.ndarray:
  """Advantages in float64 with loops and tuples, from the definitions."""
  num = len(inputs.step_N)
  paths = {}
  for row in range(num):
    path = paths.setdefault(inputs.trajectory_N[row], {})
    path[int(inputs.step_N[row])] = row
  charge = penalty * (1.0 - inputs.valid_N.astype(np.float64))
  q = np.zeros(num)
  keys = [[None] * num for _ in range(levels)]
  for path in paths.values():
    running = 0.0
    for step in sorted(path, reverse=True):
      row = path[step]
      running = float(inputs.reward_N[row]) + gamma * running
      q[row] = running - charge[row]
      for k in range(1, min(levels, step + 1) + 1):
        last = [path[s] for s in range(step - k + 1, step + 1)]
        keys[k - 1][row] = (inputs.group_N[row], *inputs.state_N[last])
  score = inputs.outcome_N.astype(np.float64) - charge
  episode = normalise(score, inputs.group_N.tolist(), 1, std, raw=True)
  if kind == 'GRPO':
    return episode
  if kind == 'GiGPO':
    return episode + weight * normalise(q, keys[0], 1, std)
  items = [normalise(q, key, 0, std) for key in keys]
  weights = [(k + 2.0) ** alpha for k in range(levels)]
  if base:
    items, weights = [episode, *items], [1.0, *weights]
  items, weights = np.array(items), np.array(weights)[:, None]
  used = weights * (np.abs(items) > 1e-9)
  return (used * items).sum(0) / (used.sum(0) + 1e-6)


def normalise(
    x: np.ndarray, keys: list[object], ddof: int, std: bool, raw: bool = False
) -> np.ndarray:
  """(x - mean) [/ (std + 1e-6)] of each key, float64; None has no key."""
  result = np.zeros(len(x))
  for key in set(keys) - {None}:
    rows = [row for row, other in enumerate(keys) if other == key]
    part = x[rows]
    if len(rows) == 1:
      result[rows] = part / (1.0 + 1e-6 * std) if raw else 0.0
    elif np.ptp(part) > 1e-6 * max(1.0, np.abs(part).max()):
      scale = part.std(ddof=ddof) + 1e-6 if std else 1.0
      result[rows] = (part - part.mean()) / scale
  return result


def _embed(texts: Sequence[str]) -> np.ndarray:
  """A random vector for each text, always the same."""
  seeds = [zlib.crc32(text.encode()) for text in texts]
  drawn = [np.random.default_rng(seed).normal(size=2) for seed in seeds]
  return np.array(drawn).reshape(-1, 2)


def _names(inputs: types.AdvantageInputs) -> list[str]:
  return [
      name for name in (*_COLUMNS, _TOKENS) if getattr(inputs, name) is not None
  ]


_TOKENS = 'response_tokens_N'
_COLUMNS = {
    'reward_N': np.float32,
    'outcome_N': np.float32,
    'success_N': bool,
    'group_N': np.int32,
    'trajectory_N': np.int32,
    'step_N': np.int32,
    'state_N': np.int32,
    'next_state_N': np.int32,
    'action_N': np.int32,
    'valid_N': bool,
}
