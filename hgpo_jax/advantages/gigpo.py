"""GiGPO: GRPO, plus a comparison of steps taken from the same state."""

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
class GiGPO:
  """Group-in-group policy optimization (Feng et al. 2025, eqs. 3-8).

  A_i = E_i + w S_i. E is GRPO's term over all steps of the task. S is
  (q_i - mean) [/ (std + 1e-6)] over the steps of the task that start from
  the same state, with q_t = r_t + gamma q_{t+1} of the rewards, less
  c (1 - v_i) at the row itself; std has ddof 1. A state met once gives
  S = 0; a state whose returns are all the same gives exactly 0. Rows that
  repeat a step count each time they appear.

  Attributes:
    gamma: discount a step of the rewards, in [0, 1].
    mode: 'mean_std_norm' divides both terms by their std, 'mean_norm' does
      not.
    step_advantage_weight: w above.
    enable_similarity: states are the same when their texts are similar
      (`grouping.similar_states`), not only when equal. Much slower.
    similarity_threshold: smallest difflib ratio of similar texts, in (0, 1].
    invalid_action_penalty: c above; 0 for none.
    visit_order: the order in which similar states form clusters: 'step', by
      step index and text, or 'row', as the rows come.
  """

  gamma: float = 0.95
  mode: str = 'mean_std_norm'
  step_advantage_weight: float = 1.0
  enable_similarity: bool = False
  similarity_threshold: float = 0.95
  invalid_action_penalty: float = 0.1
  visit_order: str = 'step'

  def __post_init__(self):
    episode.check_range('GiGPO.gamma', self.gamma, 0.0, 1.0)
    episode.check_choice('GiGPO.mode', self.mode, episode.MODES)
    episode.check_range(
        'GiGPO.step_advantage_weight', self.step_advantage_weight, 0.0
    )
    episode.check_range(
        'GiGPO.similarity_threshold', self.similarity_threshold, 1e-6, 1.0
    )
    episode.check_range(
        'GiGPO.invalid_action_penalty', self.invalid_action_penalty, 0.0
    )
    episode.check_choice(
        'GiGPO.visit_order', self.visit_order, episode.VISIT_ORDERS
    )

  def unread(self) -> dict[str, str]:
    """Fields without effect, each with the setting that leaves it so."""
    if self.enable_similarity:
      return {}
    fields = 'similarity_threshold', 'visit_order'
    return dict.fromkeys(fields, 'enable_similarity')

  def __call__(
      self, inputs: types.AdvantageInputs
  ) -> tuple[np.ndarray, types.Metrics]:
    """Returns (float32 [N] advantages, metrics)."""
    episode.check_inputs(inputs)
    penalty_N = episode.penalty(inputs, self.invalid_action_penalty)
    divide_by_std = self.mode == 'mean_std_norm'
    outcome = episode.normalise_scores(
        inputs.outcome_N - penalty_N,
        inputs.group_N,
        divide_by_std=divide_by_std,
    )
    table = grouping.index_steps(inputs)
    return_N, size_N = (
        of_steps(inputs, table, self.gamma)[table.inverse_N]
        for of_steps in (episode.step_returns, episode.return_sizes)
    )
    step = segments.normalise(
        return_N - penalty_N,
        grouping.pair_ids(inputs.group_N, self._states(inputs)),
        ddof=1,
        divide_by_std=divide_by_std,
        keep_singletons=False,
        scale_N=size_N + penalty_N,
    )
    weight = np.float32(self.step_advantage_weight)
    advantage_N = outcome.value_N + weight * step.value_N
    return advantage_N, {
        **metrics.level('episode', outcome),
        **metrics.level('step', step),
        **metrics.overall(inputs, advantage_N),
    }

  def _states(self, inputs: types.AdvantageInputs) -> np.ndarray:
    """The state of each row, similar states made one when asked."""
    if not self.enable_similarity:
      return inputs.state_N
    return grouping.similar_states(
        inputs.group_N,
        inputs.state_N,
        episode.visit_order(inputs, self.visit_order),
        inputs.state_texts,
        self.similarity_threshold,
    )
