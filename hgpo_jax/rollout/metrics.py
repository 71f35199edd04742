"""Metrics of episodes, computed from their records and nothing else."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

import numpy as np

from hgpo_jax import types


def rollout_metrics(
    trajectories: Iterable[types.Trajectory],
) -> types.Metrics:
  """What happened in the episodes, by cause; shares lie in [0, 1].

  The success rate is a share of all episodes, those among them that the
  environment broke off. A response without the required format counts under
  'invalid_cut' if the limit on new tokens cut it, else under 'invalid'.
  """
  trajectories = list(trajectories)
  steps = [step for t in trajectories for step in t.steps]
  kinds = collections.defaultdict(list)
  for trajectory in trajectories:
    kinds[trajectory.task.kind].append(trajectory.success)
  cut = [step.finish_reason == types.LENGTH for step in steps]
  invalid = [not step.action_valid for step in steps]
  named = {
      'trajectories': float(len(trajectories)),
      'steps': float(len(steps)),
      'success_rate': _mean([t.success for t in trajectories]),
      'score': _mean([t.score for t in trajectories]),
      'outcome': _mean([t.outcome for t in trajectories]),
      'steps_per_trajectory': _mean([len(t.steps) for t in trajectories]),
      'invalid': _mean([i and not c for i, c in zip(invalid, cut)]),
      'invalid_cut': _mean([i and c for i, c in zip(invalid, cut)]),
      'inadmissible': _mean([not step.action_admissible for step in steps]),
      'frac_truncated': _mean(cut),
      'dropped_history': _mean([step.dropped_history for step in steps]),
      'prompt_tokens': _mean([step.prompt_ids.size for step in steps]),
      'response_tokens': _mean([step.response_ids.size for step in steps]),
      'prompt_tokens_max': max(
          (float(step.prompt_ids.size) for step in steps), default=0.0
      ),
  }
  for reason in types.END_REASONS:
    ended = [t.end_reason == reason for t in trajectories]
    named[f'end_{reason}'] = _mean(ended)
  for kind, successes in sorted(kinds.items()):
    named[f'success_rate_{kind}'] = _mean(successes)
  return {f'rollout/{name}': value for name, value in named.items()}


def _mean(values: Sequence[float]) -> float:
  return float(np.mean(values)) if len(values) else 0.0
