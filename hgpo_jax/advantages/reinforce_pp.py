"""REINFORCE++: scores whitened over the tokens of the whole batch."""

from __future__ import annotations

import dataclasses

import numpy as np

from hgpo_jax import config
from hgpo_jax import types
from hgpo_jax.advantages import episode
from hgpo_jax.advantages import metrics
from hgpo_jax.advantages import segments

_WHITENING_EPSILON = 1e-8  # Added to the variance.


@config.configurable
@dataclasses.dataclass(frozen=True)
class ReinforcePlusPlus:
  """REINFORCE++ and its baseline form (Hu 2025, arXiv 2501.03262).

  x_i = s_i = R_i - c (1 - v_i), or with the baseline s_i - mean of the
  task's scores (a group of one keeps its score). Then

    A_i = (x_i - m) / sqrt(var + 1e-8),

  m and var (over M - 1) of x over all M response tokens of the batch: a step
  counts once a token. Every token of a response gets the step's value, that
  is, nothing is discounted inside a response. A batch whose x are all the
  same, or with fewer than two tokens, gives exactly 0.

  Needs `response_tokens_N`. Unlike the other estimators, one task's scores
  move the advantages of all tasks.

  Attributes:
    baseline: take the task's mean off first.
    stats_over_steps: every step of the group enters that mean; if False only
      the first step of each episode does.
    invalid_action_penalty: c above; 0 for none.
    visit_order: which step of an episode is its first, as in GRPO.
  """

  baseline: bool = False
  stats_over_steps: bool = True
  invalid_action_penalty: float = 0.1
  visit_order: str = 'step'

  def __post_init__(self):
    episode.check_score_fields(self)

  def unread(self) -> dict[str, str]:
    """Fields without effect, each with the setting that leaves it so."""
    if not self.baseline:
      return dict.fromkeys(('stats_over_steps', 'visit_order'), 'baseline')
    return {'visit_order': 'stats_over_steps'} if self.stats_over_steps else {}

  def __call__(
      self, inputs: types.AdvantageInputs
  ) -> tuple[np.ndarray, types.Metrics]:
    """Returns (float32 [N] advantages, metrics)."""
    episode.check_inputs(inputs)
    _check_tokens(inputs)
    score_N = episode.scores(inputs, self.invalid_action_penalty)
    over_steps = self.stats_over_steps or not self.baseline
    centred = episode.normalise_scores(
        score_N,
        inputs.group_N,
        divide_by_std=False,
        counted_N=episode.counted_rows(inputs, over_steps, self.visit_order),
    )
    advantage_N = _whiten(
        centred.value_N if self.baseline else score_N, inputs.response_tokens_N
    )
    return advantage_N, {
        **metrics.level('episode', centred),
        **metrics.overall(inputs, advantage_N),
    }


def _whiten(x_N: np.ndarray, tokens_N: np.ndarray) -> np.ndarray:
  """Zero mean and unit variance over tokens, float32."""
  x_N = x_N.astype(np.float64)
  # Sums in an order of their own: that of the rows must not show.
  order = np.lexsort((tokens_N, x_N))
  weight_N = tokens_N[order]
  total = tokens_N.sum()
  high, low = x_N.max(initial=-np.inf), x_N.min(initial=np.inf)
  scale = max(1.0, abs(high), abs(low))
  if total < 2 or high - low <= segments.SPREAD_TOLERANCE * scale:
    return np.zeros(len(x_N), np.float32)
  centred_N = x_N - (x_N[order] * weight_N).sum() / total
  variance = (centred_N[order] ** 2 * weight_N).sum() / (total - 1)
  return (centred_N / np.sqrt(variance + _WHITENING_EPSILON)).astype(np.float32)


def _check_tokens(inputs: types.AdvantageInputs) -> None:
  if inputs.response_tokens_N is None:
    raise ValueError(
        'response_tokens_N is None, expected the number of response tokens of'
        ' each step, which ReinforcePlusPlus weighs steps by: make the inputs'
        ' with batch.advantage_inputs.build, or choose RLOO'
    )
