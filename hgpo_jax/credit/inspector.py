"""Everything that the inspector's page shows, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import traceback
from typing import Any

import numpy as np

from hgpo_jax import types
from hgpo_jax.advantages import base
from hgpo_jax.advantages import g2po
from hgpo_jax.credit import agreement
from hgpo_jax.credit import levels as levels_lib
from hgpo_jax.credit import state_graph

_SIZES = (1, 2, 3, 5, 9, 17)  # Where the bars of group sizes begin.
_FULL_COLOUR = 0.95  # Quantile of |value| that gets the full colour.


def data(
    trajectories: Sequence[types.Trajectory],
    estimators: Mapping[str, base.Estimator],
) -> dict[str, Any]:
  """The same episodes under every estimator, ready for JSON.

  Columns over steps ('steps', and the values of estimators) have an entry a
  row. States and observations are places in the list 'texts', actions in the
  list 'actions'. Aborted episodes are left out.

  Raises:
    ValueError: nothing to compare is left, or an estimator refuses what is;
      says why.
    EstimatorError: an estimator returned no advantages.
  """
  check(trajectories)
  inputs, steps = levels_lib.in_order(trajectories)
  credits = {
      name: _measure(name, estimator, inputs)
      for name, estimator in estimators.items()
  }
  # Those with one comparison first, what builds upon them later.
  names = sorted(credits, key=lambda name: len(credits[name].levels))
  return {
      'aborted': sum(t.aborted for t in trajectories),
      'steps': _columns(inputs, steps),
      'tasks': _tasks(trajectories, inputs, steps),
      'estimators': [
          _estimator(name, estimators[name], credits[name]) for name in names
      ],
      'agreement': _agreement({n: credits[n].advantage_N for n in names}),
  }


def _measure(
    name: str, estimator: base.Estimator, inputs: types.AdvantageInputs
) -> levels_lib.Credit:
  """What it gives each step; its errors say whose they are, and from where."""
  try:
    return levels_lib.measure(estimator, inputs)
  except base.EstimatorError as error:
    raise base.EstimatorError(f'{name}: {error}') from error
  except ValueError as error:
    place = traceback.extract_tb(error.__traceback__)[-1]
    raise ValueError(
        f'{name}: {error} ({place.filename}:{place.lineno})'
    ) from error


def check(trajectories: Sequence[types.Trajectory]) -> None:
  """Raises ValueError, saying why, if there is nothing to compare."""
  if not trajectories:
    raise ValueError('there is no episode in it; expected at least two')
  played = [t for t in trajectories if t.steps and not t.aborted]
  if not played:
    raise ValueError(
        f'none of its {len(trajectories)} episodes has a step that can be'
        ' looked at: all are aborted or empty. Look at their `error` fields'
    )
  groups = [t.group for t in played]
  if len(set(groups)) == len(groups):
    raise ValueError(
        f'its {len(groups)} episodes are all of different groups; expected'
        ' groups of at least two, since estimators compare within a group.'
        ' Episodes of an evaluation have no groups: take those of a training'
        ' run, with Experiment.group_size of 2 or more'
    )


def _columns(
    inputs: types.AdvantageInputs, steps: Sequence[types.Step]
) -> dict[str, Any]:
  actions = {}
  texts = {text: state for state, text in enumerate(inputs.state_texts)}
  return {
      'task': inputs.group_N.tolist(),
      'episode': inputs.trajectory_N.tolist(),
      'step': inputs.step_N.tolist(),
      'state': inputs.state_N.tolist(),
      'next': inputs.next_state_N.tolist(),
      'action': [actions.setdefault(s.action, len(actions)) for s in steps],
      'observation': [
          texts.setdefault(s.observation, len(texts)) for s in steps
      ],
      'valid': [int(s.action_valid) for s in steps],
      'admissible': [int(s.action_admissible) for s in steps],
      'reward': [_short(s.reward) for s in steps],
      'actions': list(actions),
      'texts': list(texts),
  }


def _tasks(
    trajectories: Sequence[types.Trajectory],
    inputs: types.AdvantageInputs,
    steps: Sequence[types.Step],
) -> list[dict[str, Any]]:
  """Tasks in the order of their ids in `inputs`, each with its episodes."""
  first_J = np.flatnonzero(inputs.step_N == 0)
  count_J = np.bincount(inputs.trajectory_N)
  by_id = {t.trajectory: t for t in trajectories}
  estimator = g2po.G2PO()
  credit = levels_lib.measure(estimator, inputs).levels
  credit = {name: credit[name].value_N for name in ('edge', 'node')}
  actions = [step.action for step in steps]
  tasks = []
  for group in range(int(inputs.group_N.max()) + 1):
    episodes = []
    for row in first_J[inputs.group_N[first_J] == group]:
      record = by_id[steps[row].trajectory]
      episodes.append(
          {
              'id': record.trajectory,
              'first': int(row),
              'steps': int(count_J[inputs.trajectory_N[row]]),
              'success': record.success,
              'outcome': _short(record.outcome),
              'end': record.end_reason,
          }
      )
    graph = state_graph.build(inputs, group, actions, credit, estimator)
    tasks.append(
        {
            'id': record.task.task_id,
            'group': record.group,
            'kind': record.task.kind,
            'episodes': episodes,
            'graph': _graph(graph),
        }
    )
  return tasks


def _graph(graph: state_graph.Graph) -> dict[str, Any]:
  return {
      'nodes': [
          {
              **dataclasses.asdict(node),
              'value': _short(node.value),
              'solved': _short(node.solved),
          }
          for node in graph.nodes
      ],
      'edges': [
          {
              'source': edge.source,
              'target': edge.target,
              'rows': edge.rows,
              'credit': {k: _short(v) for k, v in edge.credit.items()},
          }
          for edge in graph.edges
      ],
  }


def _estimator(
    name: str, estimator: base.Estimator, credit: levels_lib.Credit
) -> dict[str, Any]:
  return {
      'name': name,
      'doc': (type(estimator).__doc__ or '').strip().split('\n')[0],
      'fields': {
          field.name: repr(getattr(estimator, field.name))
          for field in dataclasses.fields(estimator)
      },
      'value': _values(credit.advantage_N),
      'scale': _scale(credit.advantage_N),
      'silent': _short((credit.advantage_N == 0.0).mean()),
      'levels': [
          {
              'name': level_name,
              'value': _values(level.value_N),
              'size': level.size_N.tolist(),
              'scale': _scale(level.value_N),
              **_sizes(level),
          }
          for level_name, level in credit.levels.items()
      ],
  }


def _sizes(level: levels_lib.Level) -> dict[str, Any]:
  """Shares of all steps: by size of their group, and without signal."""
  place_N = np.searchsorted(_SIZES, level.size_N, side='right')
  share = np.bincount(place_N, minlength=len(_SIZES) + 1) / len(place_N)
  alone_N = level.size_N == 1
  return {
      'bars': [_short(x) for x in share],  # Not taking part comes first.
      'alone': _short(alone_N.mean()),
      'degenerate': _short((level.degenerate_N & ~alone_N).mean()),
      'silent': _short((level.value_N == 0.0).mean()),
  }


def _agreement(advantages: Mapping[str, np.ndarray]) -> dict[str, Any]:
  found = agreement.compare(advantages)
  table = lambda x_EE: [[_short(x) for x in x_E] for x_E in x_EE]
  return {
      'rank': table(found.rank_EE),
      'opposed': table(found.opposed_EE),
      'silent': table(found.one_silent_EE),
  }


def _scale(value_N: np.ndarray) -> float:
  """|value| from which on a colour is full; 0 if all values are 0."""
  size_N = np.abs(value_N[value_N != 0.0])
  return _short(np.quantile(size_N, _FULL_COLOUR)) if len(size_N) else 0.0


def _values(value_N: np.ndarray) -> list[float]:
  return [_short(x) for x in value_N]


def _short(value: float) -> float:
  """Four digits; never 0 unless it was."""
  return float(f'{float(value):.4g}')
