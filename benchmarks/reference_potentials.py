"""ProGPO and CovGPO as plain loops over rows and strings.

In the style of reference_advantages.py, and like it sharing nothing with the
estimators of hgpo_jax/advantages: dictionaries of strings, one row at a time.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
import re
import unicodedata

import numpy as np

from benchmarks import reference_advantages as reference

EPSILON = 1e-6
_FLAT = 1e-6  # A spread of returns below is none.


def progpo(
    rows: reference.Rows,
    *,
    history_length: int = 2,
    gamma: float = 0.95,
    norm_by_std: bool = True,
    shrinkage: float = 1.0,
    variance_floor: float = 1e-4,
    max_return: float = 10.0,
    penalty: float = 0.1,
) -> np.ndarray:
  """Peers after the same past, progress of potentials for all other steps."""
  g, credit = np.zeros(len(rows.obs)), np.zeros(len(rows.obs))
  for path in paths(rows):
    for t, i in enumerate(path):
      share = float(rows.outcome[i]) / max_return
      g[i] = gamma ** (len(path) - 1 - t) * share
  value = _potentials(rows, g, history_length, shrinkage, variance_floor)
  for path in paths(rows):
    for i, after in zip(path, [*path[1:], None]):
      credit[i] = -value[i]
      if after is None:
        credit[i] += float(rows.outcome[i]) / max_return
      else:
        credit[i] += gamma * value[after]
  unit = 1.0 if norm_by_std else max_return
  keys = _prefixes(rows)
  peer = reference.normalise(unit * g, keys, norm_by_std, ddof=0)
  step = reference.normalise(unit * credit, _pooled(rows), norm_by_std, ddof=0)
  has_peer = _has_peer(rows, g, keys)
  result = reference.grpo(rows, norm_by_std=norm_by_std, penalty=penalty)
  for i in range(len(result)):
    result[i] += peer[i] if has_peer[i] else step[i]
  return result


def covgpo(
    rows: reference.Rows,
    *,
    base: Callable[[reference.Rows], np.ndarray] = reference.grpo,
    level: str = 'traj',
    weight: float = 0.3,
    smallest_std: float = 1e-4,
) -> np.ndarray:
  """The base, and where a whole task failed a term for new observations."""
  result = base(rows).copy()
  new, owners = np.zeros(len(rows.obs)), collections.defaultdict(list)
  for path in paths(rows):
    seen = {rows.obs[path[0]]}
    for i in path:
      new[i] = rows.next_obs[i] not in seen
      seen.add(rows.next_obs[i])
    owners[rows.group[path[0]]].append(path)
  failed = [
      task
      for task, own in owners.items()
      if len(own) > 1 and not any(rows.success[i] for path in own for i in path)
  ]
  for task in failed:
    own = owners[task]
    share = [np.mean([new[i] for i in path]) for path in own]
    rated = share if level == 'traj' else [new[i] for p in own for i in p]
    mean, std = np.mean(rated), np.std(rated)
    if std < smallest_std:
      continue
    scale = weight * len(failed) / len(owners) / (std + EPSILON)
    for path, p in zip(own, share):
      for i in path:
        result[i] += scale * ((p if level == 'traj' else new[i]) - mean)
  return result


def paths(rows: reference.Rows) -> list[list[int]]:
  """The rows of each trajectory, in order."""
  result = collections.defaultdict(list)
  for i, name in enumerate(rows.trajectory):
    result[name].append(i)
  return list(result.values())


def canonical(text: str) -> str:
  """The text in lower case, without step counters, its list sorted."""
  text = unicodedata.normalize('NFKC', text).lower()
  number = r'[\[(]?\bstep\s*[:#]?\s*\d+(\s*(of|/)\s*\d+)?\b[\])]?\s*[:.,]?'
  text = re.sub(r'\s+', ' ', re.sub(number, ' ', text)).strip()
  before, see, rest = text.partition('you see ')
  if see:
    end = re.search(r'[.:;!?]|$', rest).start()
    items = re.split(r',\s*(?:and\s+)?|\s+and\s+', rest[:end].strip())
    rest = ', '.join(sorted(x for x in items if x)) + rest[end:]
  return (before + see + rest).rstrip(' .,;:!?…')


def _prefixes(rows: reference.Rows) -> list[tuple[str, ...]]:
  """Task, and every observation and action up to the row's observation."""
  keys: list[tuple[str, ...]] = [()] * len(rows.obs)
  for path in paths(rows):
    past = [rows.group[path[0]]]
    for i in path:
      past.append(rows.obs[i])
      keys[i] = tuple(past)
      past.append(rows.action[i])
  return keys


def _has_peer(
    rows: reference.Rows, g: np.ndarray, keys: list[tuple[str, ...]]
) -> list[bool]:
  actions, returns = collections.defaultdict(set), collections.defaultdict(list)
  for i, key in enumerate(keys):
    actions[key].add(rows.action[i])
    returns[key].append(g[i])
  good = {
      key: len(actions[key]) > 1 and np.ptp(found) > _FLAT
      for key, found in returns.items()
  }
  return [good[key] for key in keys]


def _pooled(rows: reference.Rows) -> list[str | None]:
  """The task of each row; None in a task of one trajectory."""
  members = collections.defaultdict(set)
  for group, name in zip(rows.group, rows.trajectory):
    members[group].add(name)
  return [group if len(members[group]) > 1 else None for group in rows.group]


def _potentials(
    rows: reference.Rows,
    g: np.ndarray,
    depth: int,
    shrinkage: float,
    floor: float,
) -> np.ndarray:
  """Means of returns by the last observations, fused over depths 0..depth."""
  texts, returns = {}, collections.defaultdict(list)
  for i, obs in enumerate(rows.obs):
    if obs not in texts:
      texts[obs] = canonical(obs)
    returns[rows.group[i]].append(g[i])
  spread = {
      group: np.var(found, ddof=1) if len(found) > 1 else 0.0
      for group, found in returns.items()
  }
  total, mass = np.zeros(len(g)), np.zeros(len(g))
  above = np.zeros(len(g), int)
  for k in range(depth + 1):
    pools = collections.defaultdict(lambda: collections.defaultdict(list))
    keys = {}
    for path in paths(rows):
      names = [texts[rows.obs[i]] for i in path]
      for t, i in enumerate(path):
        if t >= k:
          keys[i] = (rows.group[i], *names[t - k : t + 1])
          pools[keys[i]][rows.trajectory[i]].append(g[i])
    pooled = {}
    for key, visits in pools.items():
      y, s02 = [np.mean(v) for v in visits.values()], spread[key[0]]
      n, v = len(y), s02
      if n > 1:
        v = ((n - 1) * np.var(y, ddof=1) + shrinkage * s02) / (
            n - 1 + shrinkage
        )
        v /= n
      pooled[key] = (
          np.mean(y),
          1.0 / (v + floor),
          sum(map(len, visits.values())),
      )
    for i, key in keys.items():
      mu, weight, size = pooled[key]
      if size != above[i]:  # Else the depth above pools the same rows.
        total[i] += weight * mu
        mass[i] += weight
      above[i] = size
  return total / mass
