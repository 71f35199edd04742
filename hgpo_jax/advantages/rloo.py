"""RLOO: the score of an episode against the mean of all the others."""

from __future__ import annotations

import dataclasses

import numpy as np

from hgpo_jax import config
from hgpo_jax import types
from hgpo_jax.advantages import episode
from hgpo_jax.advantages import metrics


@config.configurable
@dataclasses.dataclass(frozen=True)
class RLOO:
  """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv 2402.14740).

  A_i = s_i - mean of the n - 1 other scores = n / (n - 1) (s_i - mean), with
  s_i = R_i - c (1 - v_i) as in GRPO. A group whose scores are all the same
  gives exactly 0; a group of one keeps its raw score.

  Attributes:
    stats_over_steps: every step of the group is one of the n; if False only
      the first step of each episode is.
    invalid_action_penalty: c above; 0 for none.
    visit_order: which step of an episode is its first, as in GRPO.
  """

  stats_over_steps: bool = True
  invalid_action_penalty: float = 0.1
  visit_order: str = 'step'

  def __post_init__(self):
    episode.check_score_fields(self)

  def unread(self) -> dict[str, str]:
    """Fields without effect, each with the setting that leaves it so."""
    return {'visit_order': 'stats_over_steps'} if self.stats_over_steps else {}

  def __call__(
      self, inputs: types.AdvantageInputs
  ) -> tuple[np.ndarray, types.Metrics]:
    """Returns (float32 [N] advantages, metrics)."""
    episode.check_inputs(inputs)
    result = episode.normalise_scores(
        episode.scores(inputs, self.invalid_action_penalty),
        inputs.group_N,
        divide_by_std=False,
        counted_N=episode.counted_rows(
            inputs, self.stats_over_steps, self.visit_order
        ),
    )
    others_N = np.maximum(result.size_N - 1, 1).astype(np.float32)
    advantage_N = result.value_N * (result.size_N / others_N)
    advantage_N = advantage_N.astype(np.float32)
    return advantage_N, {
        **metrics.level('episode', result),
        **metrics.overall(inputs, advantage_N),
    }
