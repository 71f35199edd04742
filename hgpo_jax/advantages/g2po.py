"""G2PO: steps compared by the values of the states they lead to."""

from __future__ import annotations

import dataclasses

import numpy as np

from hgpo_jax import config
from hgpo_jax import types
from hgpo_jax.advantages import episode
from hgpo_jax.advantages import grouping
from hgpo_jax.advantages import metrics
from hgpo_jax.advantages import segments


@config.configurable
@dataclasses.dataclass(frozen=True)
class G2PO:
  """Group-graph policy optimization.

  The episodes of a task share a graph whose nodes are its distinct states.
  V(x) is the mean over all visits of gamma^(T - t) R, with t the 0-based step
  and T the length of the visiting episode (so the last step counts gamma R);
  the end of an episode is worth success_value if it solved the task, else 0.
  With x' the node after the step,

    c1: V(x') - p (1 - v) against the other steps from the same node,
    c2: V(x') - V(x) against all steps of the task,
    A = E + w (c1 + c2),

  each centred [and divided by std + 1e-6, ddof 1]; E is GRPO's term over all
  steps. A node with one visit has c1 = 0, a task with one row c2 = 0. Nodes
  count a step once; E, c1 and c2 count every row.

  Attributes:
    gamma: discount a step of the outcome in node values, in [0, 1].
    mode: 'mean_std_norm' divides the three terms by their std, 'mean_norm'
      does not.
    step_advantage_weight: w above.
    success_value: value of having solved the task; the reward for it.
    invalid_action_penalty: what a malformed action costs in E; 0 for none.
    step_invalid_penalty: p above.
    shrinkage: k in (n V + k m) / (n + k), which replaces V: m is the mean
      over all visits of the task and n the number of different episodes that
      visit the node. 0 for none. A node seen by few episodes has a noisy
      value; k is how many episodes the task's mean stands for.
  """

  gamma: float = 0.95
  mode: str = 'mean_std_norm'
  step_advantage_weight: float = 1.0
  success_value: float = 10.0
  invalid_action_penalty: float = 0.1
  step_invalid_penalty: float = 0.1
  shrinkage: float = 0.0

  def __post_init__(self):
    episode.check_range('G2PO.gamma', self.gamma, 0.0, 1.0)
    episode.check_choice('G2PO.mode', self.mode, episode.MODES)
    for name in (
        'step_advantage_weight',
        'success_value',
        'invalid_action_penalty',
        'step_invalid_penalty',
        'shrinkage',
    ):
      episode.check_range(f'G2PO.{name}', getattr(self, name), 0.0)

  def __call__(
      self, inputs: types.AdvantageInputs
  ) -> tuple[np.ndarray, types.Metrics]:
    """Returns (float32 [N] advantages, metrics)."""
    episode.check_inputs(inputs)
    outcome = episode.normalise_scores(
        episode.scores(inputs, self.invalid_action_penalty),
        inputs.group_N,
        divide_by_std=self.mode == 'mean_std_norm',
    )
    table = grouping.index_steps(inputs)
    value_U = self.node_values(inputs, table)
    value_N = value_U[table.inverse_N]
    after_N = self._after(inputs, table, value_U)[table.inverse_N]
    malformed_N = ~inputs.valid_N.astype(bool)
    node = self._compare(
        after_N - self.step_invalid_penalty * malformed_N,
        grouping.pair_ids(inputs.group_N, inputs.state_N),
    )
    edge = self._compare(after_N - value_N, grouping.pair_ids(inputs.group_N))
    weight = np.float32(self.step_advantage_weight)
    advantage_N = outcome.value_N + weight * (node.value_N + edge.value_N)
    return advantage_N, {
        **metrics.level('episode', outcome),
        **metrics.level('node', node),
        **metrics.level('edge', edge),
        **metrics.overall(inputs, advantage_N),
    }

  def node_values(
      self, inputs: types.AdvantageInputs, table: grouping.StepTable
  ) -> np.ndarray:
    """V of the state that each distinct step starts from, float64 [U]."""
    group_U = grouping.pair_ids(inputs.group_N[table.row_U])
    node_U = grouping.pair_ids(group_U, inputs.state_N[table.row_U])
    left_U = np.bincount(table.trajectory_U)[table.trajectory_U] - table.step_U
    outcome_U = inputs.outcome_N[table.row_U].astype(np.float64)
    visit_U = self.gamma**left_U * outcome_U
    value_U = _mean_by(node_U, visit_U)
    if not self.shrinkage:
      return value_U
    visitors = np.unique(np.stack([node_U, table.trajectory_U]), axis=1)[0]
    count_U = np.bincount(visitors)[node_U]
    prior_U = _mean_by(group_U, visit_U)
    weight_U = count_U / (count_U + self.shrinkage)
    return weight_U * value_U + (1.0 - weight_U) * prior_U

  def _after(
      self,
      inputs: types.AdvantageInputs,
      table: grouping.StepTable,
      value_U: np.ndarray,
  ) -> np.ndarray:
    """Value of what each distinct step leads to: a node, or the end."""
    success_U = inputs.success_N[table.row_U].astype(bool)
    after_U = np.where(success_U, self.success_value, 0.0)
    goes_on_U = np.diff(table.trajectory_U) == 0
    after_U[:-1][goes_on_U] = value_U[1:][goes_on_U]
    return after_U

  def _compare(
      self, value_N: np.ndarray, segment_N: np.ndarray
  ) -> segments.Normalised:
    return segments.normalise(
        segments.above_lowest(value_N, segment_N),
        segment_N,
        ddof=1,
        divide_by_std=self.mode == 'mean_std_norm',
        keep_singletons=False,
    )


def _mean_by(segment_U: np.ndarray, value_U: np.ndarray) -> np.ndarray:
  """Mean of each row's group, float64."""
  total_S, count_S = np.bincount(segment_U, value_U), np.bincount(segment_U)
  return (total_S / np.maximum(count_S, 1))[segment_U]
