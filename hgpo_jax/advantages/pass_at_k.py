"""Pass@k: only the best episode of a task gets credit."""

from __future__ import annotations

import dataclasses

import numpy as np

from hgpo_jax import config
from hgpo_jax import types
from hgpo_jax.advantages import episode
from hgpo_jax.advantages import grouping
from hgpo_jax.advantages import metrics
from hgpo_jax.advantages import segments

_COMPARED = ('episode', 'first_row', 'row')


@config.configurable
@dataclasses.dataclass(frozen=True)
class PassAtK:
  """Policy gradient of the best of k (Tang et al. 2025, arXiv 2503.19595).

  The best episode of a task gets s_best - s_second [/ (std + 1e-6)], every
  other episode 0, with std (ddof 1) over the task's episodes and s an
  episode's mean of R - c (1 - v) over its steps. A tie for the best place
  and a task with one episode give exactly 0.

  Attributes:
    norm_by_std: divide by the std.
    compared: 'episode' as above. Two readings of step-wise code, in which
      only the single best row gets credit: 'first_row' compares the first row
      of each episode, 'row' all rows, so that two rows of one episode tie.
    invalid_action_penalty: c above; 0 for none.
    visit_order: which row of an episode is its first, as in GRPO; only with
      'first_row'.
  """

  norm_by_std: bool = True
  compared: str = 'episode'
  invalid_action_penalty: float = 0.1
  visit_order: str = 'step'

  def __post_init__(self):
    episode.check_choice('PassAtK.compared', self.compared, _COMPARED)
    episode.check_score_fields(self)

  def unread(self) -> dict[str, str]:
    """Fields without effect, each with the setting that leaves it so."""
    return {} if self.compared == 'first_row' else {'visit_order': 'compared'}

  def __call__(
      self, inputs: types.AdvantageInputs
  ) -> tuple[np.ndarray, types.Metrics]:
    """Returns (float32 [N] advantages, metrics)."""
    episode.check_inputs(inputs)
    row_C, owner_N = self._candidates(inputs)
    group_C = grouping.pair_ids(inputs.group_N[row_C])
    score_C = self._scores(inputs, row_C, owner_N)
    result = segments.normalise(
        score_C,
        group_C,
        ddof=1,
        divide_by_std=False,
        keep_singletons=False,
    )
    value_C = _lead_of_best(score_C, group_C)
    value_C[result.degenerate_N] = 0.0
    if self.norm_by_std:
      value_C /= np.sqrt(result.variance_N) + segments.EPSILON
    value_C = np.append(value_C, np.float32(0.0))  # For rows not compared.
    advantage_N = value_C[owner_N]
    return advantage_N, {
        **metrics.level('episode', result),
        **metrics.overall(inputs, advantage_N),
    }

  def _candidates(
      self, inputs: types.AdvantageInputs
  ) -> tuple[np.ndarray, np.ndarray]:
    """Row of each of the C candidates; candidate of each row, -1 for none."""
    num = len(inputs.step_N)
    if self.compared == 'row':
      return np.arange(num), np.arange(num)
    if self.compared == 'episode':
      pairs = grouping.pair_ids(inputs.group_N, inputs.trajectory_N)
      return np.unique(pairs, return_index=True)[1], pairs
    visit_N = episode.visit_order(inputs, self.visit_order)
    row_C = np.flatnonzero(episode.first_rows(inputs, visit_N))
    owner_N = np.full(num, -1)
    owner_N[row_C] = np.arange(len(row_C))
    return row_C, owner_N

  def _scores(
      self,
      inputs: types.AdvantageInputs,
      row_C: np.ndarray,
      owner_N: np.ndarray,
  ) -> np.ndarray:
    penalty_N = episode.penalty(inputs, self.invalid_action_penalty)
    if self.compared != 'episode':
      return (inputs.outcome_N - penalty_N)[row_C]
    penalty_C = np.bincount(owner_N, penalty_N) / np.bincount(owner_N)
    return (inputs.outcome_N[row_C] - penalty_C).astype(np.float32)


def _lead_of_best(score_C: np.ndarray, group_C: np.ndarray) -> np.ndarray:
  """Best less second best at the best of each group, 0 elsewhere; float32."""
  order = np.lexsort((score_C, group_C))
  best = np.ones(len(order), bool)
  best[:-1] = np.diff(group_C[order]) != 0
  best[1:] &= np.diff(group_C[order]) == 0  # Not in a group of one.
  best[:1] = False
  place = np.flatnonzero(best)
  result_C = np.zeros(len(score_C), np.float32)
  result_C[order[place]] = score_C[order[place]] - score_C[order[place - 1]]
  return result_C
