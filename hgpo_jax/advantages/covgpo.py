"""CovGPO: where a whole group failed, credit for exploring; wraps any base."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from hgpo_jax import config
from hgpo_jax import types
from hgpo_jax.advantages import base as base_lib
from hgpo_jax.advantages import coverage
from hgpo_jax.advantages import episode
from hgpo_jax.advantages import gigpo
from hgpo_jax.advantages import grouping
from hgpo_jax.advantages import hgpo
from hgpo_jax.advantages import metrics

LEVELS = ('traj', 'step', 'step_anchor', 'both')
GATES = ('success', 'score')

# Bases whose step term is a function of the rewards alone, by state.
_ANCHORED = (gigpo.GiGPO, hgpo.HGPO)


@config.configurable
@dataclasses.dataclass(frozen=True)
class CovGPO:
  """Coverage-based group policy optimization (arXiv 2607.22724) over a base.

  A step explores, b = 1, if its action led to a state that its own episode
  had not seen. A group fires if it has two episodes or more and all failed;
  its advantages become A_base + A_cov. Every other group keeps those of the
  base, bit for bit. With l = lambda q, q the share of failed groups in the
  update, and population statistics (ddof 0):

    'traj': l (P - mean P) / (std P + eps) on all steps of an episode, with
      P = sum b / T, over the group's episodes. The published term.
    'step': l (b - mean b) / (std b + eps) over all steps of the group. Ours;
      for bases that tell steps apart.
    'step_anchor': l times what the base makes of b in place of its returns,
      so b is compared with those of the steps at the same state. Ours.
    'both': the mean of 'traj' and 'step'.

  Where the spread of P (of b) is below smallest_std the term is 0.

  Attributes:
    base: the estimator to add to.
    level: which term, see above.
    coverage_weight: lambda.
    fixed: l = lambda, whatever the share of failed groups.
    gate: a failed episode is one without 'success', or one whose 'score', the
      sum of its rewards, is below score_threshold (tasks with partial credit).
    score_threshold: see gate.
    smallest_std: see above.
    visited: 'trajectory', or 'group_timestep': states that any episode of the
      group had reached in fewer steps count as seen. An ablation.
    epsilon: added to the std.
  """

  base: base_lib.Estimator = config.REQUIRED
  level: str = 'traj'
  coverage_weight: float = 0.3
  fixed: bool = False
  gate: str = 'success'
  score_threshold: float = 1e-3
  smallest_std: float = 1e-4
  visited: str = 'trajectory'
  epsilon: float = 1e-6

  def __post_init__(self):
    base_lib.check(self.base, 'CovGPO.base')
    episode.check_choice('CovGPO.level', self.level, LEVELS)
    episode.check_choice('CovGPO.gate', self.gate, GATES)
    episode.check_choice('CovGPO.visited', self.visited, coverage.VISITED)
    for name, low in (
        ('coverage_weight', 0.0),
        ('score_threshold', -math.inf),
        ('smallest_std', 1e-9),  # A spread below is rounding noise.
        ('epsilon', 0.0),
    ):
      episode.check_range(f'CovGPO.{name}', getattr(self, name), low)
    if self.level == 'step_anchor' and not isinstance(self.base, _ANCHORED):
      names = ', '.join(kind.__name__ for kind in _ANCHORED)
      raise ValueError(
          f"CovGPO.level is 'step_anchor' with {type(self.base).__name__} as"
          f' base, expected one of {names}: they compare returns by state;'
          " set CovGPO.level = 'step'"
      )

  def unread(self) -> dict[str, str]:
    """Fields without effect, each with the setting that leaves it so."""
    fields = {}
    if self.gate != 'score':
      fields['score_threshold'] = 'gate'
    if self.level == 'step_anchor':
      fields['epsilon'] = 'level'
    return fields

  def __call__(
      self, inputs: types.AdvantageInputs
  ) -> tuple[np.ndarray, types.Metrics]:
    """Returns (float32 [N] advantages, metrics)."""
    episode.check_inputs(inputs)
    base_N, report = base_lib.estimate(self.base, inputs)
    table = grouping.index_steps(inputs)
    group_U = grouping.pair_ids(inputs.group_N[table.row_U])
    found = coverage.measure(inputs, table, group_U, self.visited)
    failed_S = self._failed(inputs, table, group_U)
    weight = self.coverage_weight
    if not self.fixed:
      weight *= metrics.mean(failed_S)
    term_U, spread_S = self._term(inputs, table, group_U, found)
    fired_S = failed_S & (spread_S >= self.smallest_std)
    added_N = (weight * term_U).astype(np.float32)[table.inverse_N]
    fired_N = fired_S[group_U][table.inverse_N]
    advantage_N = np.where(fired_N, base_N + added_N, base_N)
    return advantage_N, {
        **report,
        **metrics.overall(inputs, advantage_N),
        'advantage/coverage_gated_share': metrics.mean(failed_S),
        'advantage/coverage_fired_share': metrics.mean(fired_S),
        'advantage/coverage_flat_share': metrics.mean(~fired_S[failed_S]),
        'advantage/coverage_weight': weight,
        'advantage/coverage_mean': metrics.mean(found.share_J),
        'advantage/coverage_mean_abs': metrics.mean(np.abs(added_N[fired_N])),
        'advantage/coverage_length_rank_corr': coverage.rank_correlation(
            found.share_J, found.length_J
        ),
    }

  def _failed(
      self,
      inputs: types.AdvantageInputs,
      table: grouping.StepTable,
      group_U: np.ndarray,
  ) -> np.ndarray:
    """bool [S]: two episodes or more, and none did anything right."""
    good_U = inputs.success_N[table.row_U]
    if self.gate == 'score':
      good_U = inputs.outcome_N[table.row_U] >= self.score_threshold
    episodes_S = np.bincount(group_U, table.step_U == 0)
    return (episodes_S >= 2) & (np.bincount(group_U, good_U) == 0)

  def _term(
      self,
      inputs: types.AdvantageInputs,
      table: grouping.StepTable,
      group_U: np.ndarray,
      found: coverage.Coverage,
  ) -> tuple[np.ndarray, np.ndarray]:
    """(the term [U] before its weight, the spread [S] it was divided by)."""
    group_J = group_U[table.step_U == 0]
    share, share_S = coverage.standardise(
        found.share_J, group_J, self.smallest_std, self.epsilon
    )
    share_U = share[table.trajectory_U]
    new_U, new_S = coverage.standardise(
        found.new_U, group_U, self.smallest_std, self.epsilon
    )
    if self.level == 'traj':
      return share_U, share_S
    if self.level == 'both':
      return 0.5 * (share_U + new_U), np.maximum(share_S, new_S)
    if self.level == 'step_anchor':
      new_U = self._by_state(inputs, table, found.new_U)
    return new_U, new_S

  def _by_state(
      self,
      inputs: types.AdvantageInputs,
      table: grouping.StepTable,
      new_U: np.ndarray,
  ) -> np.ndarray:
    """What the base makes of steps whose return is b, and nothing else."""
    later_U = np.where(np.roll(table.step_U, -1) > 0, np.roll(new_U, -1), 0.0)
    reward_U = (new_U - self.base.gamma * later_U).astype(np.float32)
    advantage_N, _ = base_lib.estimate(
        self.base,
        dataclasses.replace(
            inputs,
            reward_N=reward_U[table.inverse_N],
            outcome_N=np.zeros_like(inputs.outcome_N),
            valid_N=np.ones_like(inputs.valid_N),
        ),
    )
    return advantage_N[table.row_U].astype(np.float64)
