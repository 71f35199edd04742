"""Estimators as plain loops over rows and strings, to measure against.

Written in the style of the original implementations: columns of ids that are
strings, compared as strings, one row at a time, dictionaries of lists. They
read the same rows as the estimators of hgpo_jax/advantages and share nothing
with them. As there, a reward stands on the last token of its response in a
matrix of token rewards. There, every number is a tensor besides; here it is
not, so these are several times faster than the originals.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Sequence
import dataclasses
import heapq
import itertools

import numpy as np

from hgpo_jax import types

EPSILON = 1e-6
_GOAL = 'success'


@dataclasses.dataclass(frozen=True)
class Rows:
  """Columns with one entry a step; ids and observations are strings."""

  group: np.ndarray
  trajectory: np.ndarray
  obs: np.ndarray
  next_obs: np.ndarray
  reward: np.ndarray
  outcome: np.ndarray
  success: np.ndarray
  valid: np.ndarray
  mask: np.ndarray  # bool [rows, tokens], response tokens.
  action: np.ndarray | None = None  # For those that compare actions.


def from_trajectories(trajectories: Sequence[types.Trajectory]) -> Rows:
  """Rows of the trajectories, in order."""
  pairs = [(t, s) for t in trajectories for s in t.steps]
  strings = lambda values: np.array(list(values), dtype=object)
  lengths = np.array([len(s.response_ids) for _, s in pairs])
  return Rows(
      group=strings(f'task-{t.group}' for t, _ in pairs),
      trajectory=strings(f'episode-{t.trajectory}' for t, _ in pairs),
      obs=strings(s.state_key for _, s in pairs),
      next_obs=strings(s.next_state_key for _, s in pairs),
      reward=np.array([s.reward for _, s in pairs], np.float32),
      outcome=np.array([t.outcome for t, _ in pairs], np.float32),
      success=np.array([t.success for t, _ in pairs]),
      valid=np.array([s.action_valid for _, s in pairs]),
      mask=np.arange(lengths.max()) < lengths[:, None],
      action=strings(s.action for _, s in pairs),
  )


def grpo(
    rows: Rows, *, norm_by_std: bool = True, penalty: float = 0.1
) -> np.ndarray:
  """Episode term over all steps of a task."""
  score = _scores(rows, penalty)
  return normalise(score, rows.group, norm_by_std, raw=True)


def rloo(rows: Rows, *, penalty: float = 0.1) -> np.ndarray:
  """Leave-one-out over all steps of a task."""
  score = _scores(rows, penalty)
  lists = _lists(score, rows.group)
  mean = {group: np.mean(peers) for group, peers in lists.items()}
  result = np.zeros(len(score))
  for i in range(len(score)):
    num = len(lists[rows.group[i]])
    result[i] = score[i]
    if num > 1:
      result[i] = num / (num - 1) * (score[i] - mean[rows.group[i]])
  return result


def reinforce_pp(
    rows: Rows, *, baseline: bool = True, penalty: float = 0.1
) -> np.ndarray:
  """Scores, less the task's mean, whitened over tokens one by one."""
  x = _scores(rows, penalty)
  if baseline:
    x = normalise(x, rows.group, False, raw=True)
  tokens = [x[i] for i in range(len(x)) for _ in range(rows.mask[i].sum())]
  mean, std = np.mean(tokens), np.sqrt(np.var(tokens, ddof=1) + 1e-8)
  return np.array([(value - mean) / std for value in x])


def pass_at_k(
    rows: Rows, *, norm_by_std: bool = True, penalty: float = 0.1
) -> np.ndarray:
  """Lead of the best row of a task over the second best."""
  score = _scores(rows, penalty)
  members = collections.defaultdict(list)
  for i in range(len(score)):
    members[rows.group[i]].append(i)
  result = np.zeros(len(score))
  for here in members.values():
    peers = [score[i] for i in here]
    second, best = sorted(peers)[-2:]
    scale = np.std(peers, ddof=1) + EPSILON if norm_by_std else 1.0
    result[here[peers.index(best)]] = (best - second) / scale
  return result


def gigpo(
    rows: Rows,
    *,
    gamma: float = 0.95,
    norm_by_std: bool = True,
    weight: float = 1.0,
    penalty: float = 0.1,
) -> np.ndarray:
  """GRPO plus returns against the same observation."""
  q = _step_returns(rows, gamma) - _penalties(rows, penalty)
  keys = [(rows.group[i], rows.obs[i]) for i in range(len(q))]
  return grpo(
      rows, norm_by_std=norm_by_std, penalty=penalty
  ) + weight * normalise(q, keys, norm_by_std)


def hgpo(
    rows: Rows,
    *,
    history_length: int = 2,
    alpha: float = 1.0,
    base_group: bool = False,
    gamma: float = 0.95,
    norm_by_std: bool = True,
    penalty: float = 0.1,
) -> np.ndarray:
  """Returns against the same last k observations, k = 1..K+1."""
  q = _step_returns(rows, gamma) - _penalties(rows, penalty)
  levels = []
  if base_group:
    levels.append(grpo(rows, norm_by_std=norm_by_std, penalty=penalty))
  paths = collections.defaultdict(list)
  histories = []
  for i in range(len(q)):
    paths[rows.trajectory[i]].append(rows.obs[i])
    histories.append(list(paths[rows.trajectory[i]]))
  for k in range(1, history_length + 2):
    keys = [
        (rows.group[i], *past[-k:]) if len(past) >= k else None
        for i, past in enumerate(histories)
    ]
    levels.append(normalise(q, keys, norm_by_std, ddof=0))
  lowest = 1 if base_group else 2
  result = np.zeros(len(q))
  for i in range(len(q)):
    items = [
        (lowest + k, a[i]) for k, a in enumerate(levels) if abs(a[i]) > 1e-9
    ]
    total = sum(k**alpha for k, _ in items)
    result[i] = sum(k**alpha * a for k, a in items) / (total + EPSILON)
  return result


def g2po(
    rows: Rows,
    *,
    gamma: float = 0.95,
    norm_by_std: bool = True,
    weight: float = 1.0,
    penalty: float = 0.1,
) -> np.ndarray:
  """GRPO plus values of successors, by node and by edge."""
  num = len(rows.obs)
  value, following = np.zeros(num), np.zeros(num)
  for task in np.unique(rows.group):
    paths = []
    for name in np.unique(rows.trajectory[rows.group == task]):
      paths.append(np.where(rows.trajectory == name)[0])
    visits = collections.defaultdict(list)
    for path in paths:
      for step, i in enumerate(path):
        discounted = gamma ** (len(path) - step) * float(rows.outcome[i])
        visits[rows.obs[i]].append(discounted)
    worth = {obs: np.mean(seen) for obs, seen in visits.items()}
    for path in paths:
      for step, i in enumerate(path):
        value[i] = worth[rows.obs[i]]
        if step + 1 < len(path):
          following[i] = worth[rows.obs[path[step + 1]]]
        else:
          following[i] = 10.0 if rows.success[i] else 0.0
  keys = [(rows.group[i], rows.obs[i]) for i in range(num)]
  node = following - 0.1 * ~rows.valid
  step = normalise(node, keys, norm_by_std)
  step += normalise(following - value, rows.group, norm_by_std)
  episode = grpo(rows, norm_by_std=norm_by_std, penalty=penalty)
  return episode + weight * step


def graphgpo(
    rows: Rows,
    *,
    gamma: float = 0.1,
    norm_by_std: bool = True,
    normalize_distance: bool = False,
    step_weight: float = 1.0,
    episode_weight: float = 1.0,
    penalty: float = 0.1,
) -> np.ndarray:
  """GRPO plus distances to the goal against the same observation."""
  num = len(rows.obs)
  target = rows.next_obs.copy()
  for name in np.unique(rows.trajectory):
    last = np.where(rows.trajectory == name)[0][-1]
    if rows.outcome[last] > 0:
      target[last] = _GOAL
  distances = {}
  for task in np.unique(rows.group):
    inside = np.where(rows.group == task)[0]
    distances[task] = _distances(rows.obs[inside], target[inside])
  q = np.zeros(num, np.float32)
  for i, name in enumerate(rows.trajectory):
    here = np.where(rows.trajectory == name)[0]
    found, at = distances[rows.group[i]], here[np.where(here == i)[0][0]]
    left = found[target[at]]
    left += normalize_distance * (1 - found[rows.obs[at]])
    q[i] = 10.0 * gamma**left
  keys = [(rows.group[i], rows.obs[i]) for i in range(num)]
  step = normalise(q - _penalties(rows, penalty), keys, norm_by_std)
  episode = grpo(rows, norm_by_std=norm_by_std, penalty=penalty)
  return step_weight * step + episode_weight * episode


def _distances(source: np.ndarray, target: np.ndarray) -> dict[str, int]:
  """Steps to the goal from each node, by Dijkstra on reversed edges."""
  before = collections.defaultdict(set)
  for a, b in zip(source, target):
    before[b].add(a)
  found, queue = {}, [(0, _GOAL)]
  while queue:
    distance, node = heapq.heappop(queue)
    if node in found:
      continue
    found[node] = distance
    for other in before[node]:
      heapq.heappush(queue, (distance + 1, other))
  far = max(found.values()) + 1
  nodes = itertools.chain(source, target)
  return {node: found.get(node, far) for node in nodes}


def _penalties(rows: Rows, penalty: float) -> np.ndarray:
  result = np.zeros(len(rows.valid), np.float32)
  for i in range(len(result)):
    result[i] = penalty * (1.0 - float(rows.valid[i]))
  return result


def _scores(rows: Rows, penalty: float) -> np.ndarray:
  token_reward = np.zeros(rows.mask.shape, np.float32)
  for i in range(len(token_reward)):
    token_reward[i, int(rows.mask[i].sum()) - 1] = rows.outcome[i]
  for i, charge in enumerate(_penalties(rows, penalty)):
    token_reward[i, int(rows.mask[i].sum()) - 1] -= charge
  return token_reward.sum(-1)


def _step_returns(rows: Rows, gamma: float) -> np.ndarray:
  """Discounted returns, each row looked up among its trajectory's."""
  by_trajectory = {}
  for name in np.unique(rows.trajectory):
    running, returns = np.float32(0.0), []
    for reward in rows.reward[rows.trajectory == name][::-1]:
      running = np.float32(reward + np.float32(gamma) * running)
      returns.append(running)
    by_trajectory[name] = returns[::-1]
  result = np.zeros(len(rows.reward), np.float32)
  for i, name in enumerate(rows.trajectory):
    here = np.where(rows.trajectory == name)[0]
    result[i] = by_trajectory[name][np.where(here == i)[0][0]]
  return result


def _lists(x: np.ndarray, keys: Sequence[Hashable]) -> dict[Hashable, list]:
  result = collections.defaultdict(list)
  for i in range(len(x)):
    result[keys[i]].append(x[i])
  return result


def normalise(
    x: np.ndarray,
    keys: Sequence[Hashable],
    norm_by_std: bool,
    *,
    ddof: int = 1,
    raw: bool = False,
) -> np.ndarray:
  """(x - mean) [/ (std + eps)] of each row among those of the same key."""
  x = np.asarray(x, np.float64)
  mean, std = {}, {}
  for key, peers in _lists(x, keys).items():
    mean[key] = np.mean(peers)
    std[key] = np.std(peers, ddof=ddof) if len(peers) > ddof else 0.0
    if len(peers) == 1:
      mean[key], std[key] = (0.0 if raw else peers[0]), 1.0
    elif np.ptp(peers) <= 1e-6 * max(1.0, abs(peers[0])):
      mean[key], std[key] = None, 1.0
  result = np.zeros(len(x))
  for i in range(len(x)):
    if keys[i] is None or mean[keys[i]] is None:
      continue
    result[i] = x[i] - mean[keys[i]]
    if norm_by_std:
      result[i] = result[i] / (std[keys[i]] + EPSILON)
  return result
