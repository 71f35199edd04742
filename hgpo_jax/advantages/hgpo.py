"""HGPO: steps compared at the same state under ever longer histories."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from hgpo_jax import config
from hgpo_jax import types
from hgpo_jax.advantages import episode
from hgpo_jax.advantages import grouping
from hgpo_jax.advantages import metrics
from hgpo_jax.advantages import segments

WEIGHTINGS = ('length', 'inverse_variance')


@config.configurable
@dataclasses.dataclass(frozen=True)
class HGPO:
  """Hierarchy-of-groups policy optimization.

  Level k = 1..K+1 compares the steps of a task whose last k states are the
  same (states only, not actions; a step with fewer than k - 1 predecessors
  takes no part): a^k = (q - mean) [/ (std + 1e-6)], std with ddof 0, where
  q_t = r_t + gamma q_{t+1}, less c (1 - v) at the row itself. Level 0, if
  asked for, is GRPO's term (ddof 1, over steps). Then

    A = sum_k w_k a^k / (sum_k w_k + 1e-6),  w_k = (k + 1)^alpha

  or, our addition, w_k ~ the inverse variance of the level's mean,

    1 / w_k ~ ((n - 1) s^2 + s_0^2) / n^2,

  n and s^2 (ddof 1) of the step's group: few and scattered returns make a
  poor baseline. s_0^2, the variance in the whole task, counts as one member
  more, so that small groups are not taken to be without noise. A level whose
  group is that of the level before says nothing new and takes no weight.

  The sum runs over the levels with a signal. A level has none, and takes no
  weight, where the step is alone, where the group is degenerate, and where
  the step sits on the group's mean. No level with a signal: A = 0. A step
  stands once in the statistics, however many rows repeat it.

  Attributes:
    history_length: K above; 0 compares by the current state alone.
    weighting: 'length' or 'inverse_variance', the two w_k above.
    alpha: how much longer histories weigh; 0 weighs all levels alike. Only
      with 'length'.
    base_group: adds level 0.
    mode: 'mean_std_norm' divides each level by its std, 'mean_norm' does not.
    gamma: discount a step of the rewards, in [0, 1].
    invalid_action_penalty: c above; 0 for none.
    mean_tolerance: a step this near to its group's mean, as a share of the
      group's spread, sits on it. 0 leaves it to rounding, as the original
      does, whether 0.2 sits on the mean of 0.1, 0.2 and 0.3.
  """

  history_length: int = 2
  alpha: float = 1.0
  base_group: bool = False
  mode: str = 'mean_std_norm'
  gamma: float = 0.95
  invalid_action_penalty: float = 0.1
  weighting: str = 'length'
  mean_tolerance: float = segments.SPREAD_TOLERANCE

  def __post_init__(self):
    episode.check_range(
        'HGPO.history_length',
        self.history_length,
        0,
        grouping.LONGEST_HISTORY,
    )
    episode.check_choice('HGPO.weighting', self.weighting, WEIGHTINGS)
    # Of the largest weight; beyond, float32 has none, or the mean's epsilon
    # drowns it.
    digits = math.log10(self.history_length + 2.0)
    episode.check_range(
        'HGPO.alpha', self.alpha, round(-3 / digits, 1), round(30 / digits, 1)
    )
    episode.check_choice('HGPO.mode', self.mode, episode.MODES)
    episode.check_range('HGPO.gamma', self.gamma, 0.0, 1.0)
    episode.check_range(
        'HGPO.invalid_action_penalty', self.invalid_action_penalty, 0.0
    )
    episode.check_range('HGPO.mean_tolerance', self.mean_tolerance, 0.0, 0.1)

  def unread(self) -> dict[str, str]:
    """Fields without effect, each with the setting that leaves it so."""
    return {} if self.weighting == 'length' else {'alpha': 'weighting'}

  def __call__(
      self, inputs: types.AdvantageInputs
  ) -> tuple[np.ndarray, types.Metrics]:
    """Returns (float32 [N] advantages, metrics)."""
    episode.check_inputs(inputs)
    table = grouping.index_steps(inputs)
    penalty_N = episode.penalty(inputs, self.invalid_action_penalty)
    return_U = episode.step_returns(inputs, table, self.gamma)
    return_U -= penalty_N[table.row_U]
    size_U = episode.return_sizes(inputs, table, self.gamma)
    size_U += penalty_N[table.row_U]
    levels = self._levels(inputs, table, return_U, size_U)
    if self.weighting == 'length':
      lowest = 1.0 if self.base_group else 2.0
      weights = (lowest + np.arange(len(levels)))[:, None] ** self.alpha
    else:
      weights = _inverse_variances(
          levels, return_U, inputs.group_N[table.row_U]
      )
    value_KU = np.stack([result.value_N for result in levels.values()])
    advantage_U = segments.weighted_mean(value_KU, weights)
    advantage_N = advantage_U[table.inverse_N]
    entropy = metrics.weight_entropy(weights * (value_KU != 0.0))
    report = metrics.overall(inputs, advantage_N)
    report['advantage/weight_entropy'] = entropy
    for name, result in levels.items():
      report |= metrics.level(name, result)
    return advantage_N, report

  def _levels(
      self,
      inputs: types.AdvantageInputs,
      table: grouping.StepTable,
      return_U: np.ndarray,
      size_U: np.ndarray,
  ) -> dict[str, segments.Normalised]:
    """Each level's normalised values over the distinct steps, by name."""
    group_U = inputs.group_N[table.row_U]
    divide_by_std = self.mode == 'mean_std_norm'
    levels = {}
    if self.base_group:
      score_N = episode.scores(inputs, self.invalid_action_penalty)
      levels['episode'] = episode.normalise_scores(
          score_N[table.row_U],
          group_U,
          divide_by_std=divide_by_std,
          mean_tolerance=self.mean_tolerance,
      )
    keys = grouping.history_ids(
        group_U,
        inputs.state_N[table.row_U],
        table.step_U,
        self.history_length + 1,
    )
    for k, key_U in enumerate(keys, start=1):
      levels[f'level{k}'] = segments.normalise(
          return_U,
          key_U,
          ddof=0,
          divide_by_std=divide_by_std,
          keep_singletons=False,
          scale_N=size_U,
          mean_tolerance=self.mean_tolerance,
      )
    return levels


def _inverse_variances(
    levels: dict[str, segments.Normalised],
    return_U: np.ndarray,
    group_U: np.ndarray,
) -> np.ndarray:
  """w_k of each level and step, at most 1 a step; float64 [K, U]."""
  task = segments.normalise(
      return_U,
      grouping.pair_ids(group_U),
      ddof=1,
      divide_by_std=False,
      keep_singletons=False,
  )
  weights, size_before_U = [], np.zeros_like(task.size_N)
  for name, level in levels.items():
    # Of episodes the variance has ddof 1, of histories ddof 0.
    ddof, prior_U = 0, task.variance_N
    if name == 'episode':
      ddof, prior_U = 1, level.variance_N
    scatter_U = (level.size_N - ddof) * level.variance_N + prior_U
    # Groups are nested: equal sizes mean equal groups.
    fresh_U = level.size_N != size_before_U
    weights.append(fresh_U * level.size_N**2 / np.maximum(scatter_U, 1e-30))
    if name != 'episode':
      size_before_U = level.size_N
  weights = np.stack(weights)
  return weights / np.maximum(weights.max(0), 1e-30)
