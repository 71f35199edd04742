"""GRPO: the score of an episode against the other episodes of its task."""

from __future__ import annotations

import dataclasses

import numpy as np

from hgpo_jax import config
from hgpo_jax import types
from hgpo_jax.advantages import episode
from hgpo_jax.advantages import metrics


@config.configurable
@dataclasses.dataclass(frozen=True)
class GRPO:
  """Group relative policy optimization (Shao et al. 2024, eq. 3) by steps.

  s_i = R_i - c (1 - v_i);  A_i = (s_i - mean) [/ (std + 1e-6)], where R is
  the undiscounted sum of the episode's rewards, v says that the row's action
  was well formed, and mean and std (ddof 1) run over the task's group. A
  group whose scores are all the same gives exactly 0; a group of one row
  keeps its raw score.

  Attributes:
    norm_by_std: divide by the std; False is Dr. GRPO's choice.
    stats_over_steps: every step of the group enters mean and std, so long
      episodes weigh more; if False only the first step of each episode does.
    invalid_action_penalty: c above; 0 for none.
    visit_order: which step of an episode is its first: 'step', the one with
      the lowest index, or 'row', the one whose row comes first (as in code
      that shuffles rows before this point). Only without stats_over_steps.
    divide_flat: where the first steps of a task have the same score, divide
      what other steps differ from it by 1e-6, as the original does: -1e5 for
      a malformed action. Only with norm_by_std and without stats_over_steps.
  """

  norm_by_std: bool = True
  stats_over_steps: bool = True
  invalid_action_penalty: float = 0.1
  visit_order: str = 'step'
  divide_flat: bool = False

  def __post_init__(self):
    episode.check_score_fields(self)

  def unread(self) -> dict[str, str]:
    """Fields without effect, each with the setting that leaves it so."""
    if self.stats_over_steps:
      return dict.fromkeys(('visit_order', 'divide_flat'), 'stats_over_steps')
    return {} if self.norm_by_std else {'divide_flat': 'norm_by_std'}

  def __call__(
      self, inputs: types.AdvantageInputs
  ) -> tuple[np.ndarray, types.Metrics]:
    """Returns (float32 [N] advantages, metrics)."""
    episode.check_inputs(inputs)
    counted_N = episode.counted_rows(
        inputs, self.stats_over_steps, self.visit_order
    )
    score_N = episode.scores(inputs, self.invalid_action_penalty)
    result = episode.normalise_scores(
        score_N,
        inputs.group_N,
        divide_by_std=self.norm_by_std,
        counted_N=counted_N,
        divide_flat=self.divide_flat,
    )
    return result.value_N, {
        **metrics.level('episode', result),
        **metrics.overall(inputs, result.value_N),
    }
