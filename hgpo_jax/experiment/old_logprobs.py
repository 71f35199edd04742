"""Where the probabilities that the ratio is taken to come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
import dataclasses
import math
from typing import Literal

from absl import logging
import numpy as np

from hgpo_jax import config
from hgpo_jax import types
from hgpo_jax.learner import scorer as scorer_lib

Parts = Iterable[tuple[np.ndarray, types.RolloutBatch]]
# From passes over rows to log-probs [B, R], 0 where no pass was.
Score = Callable[[Parts], np.ndarray]

_DIFFERING = (
    'the episodes are not those of the policy that is trained. Look at'
    ' PolicySource.compute_dtype, or weigh them with PPOLoss.tis_clip'
)
_LAGGING = (
    'an iteration moves the policy so far that episodes of the one before say'
    ' little of it. Lower AdamW.learning_rate, or set Experiment.rollout_lag ='
    ' 0; if logprob_gap/mean is as large where rollout/lag is 0, look at'
    ' PolicySource.compute_dtype'
)


@config.configurable
@dataclasses.dataclass(frozen=True)
class OldLogprobs:
  """Old log-probs: the learner's own, or those the sampler gave.

  Both are at `Experiment.temperature`. They differ where the sampler rounds
  (bfloat16, other kernels): about 0.01 a token, in the mean, for 0.5B in
  bfloat16, and 1e-6 in float32.

  With `Experiment.rollout_lag` the sampler may be an iteration behind, and the
  gap holds how far the policy moved since: `rollout/lag` tells which lines of
  the metrics that is so in. 'sampler' then takes the ratio to the policy that
  played, 'trainer' to the newest one, and PPOLoss.tis_clip weighs by the ratio
  of the two: the decoupled objective (Hilton et al. 2021, arXiv 2110.00641; for
  language models Fu et al. 2025, AReaL, arXiv 2505.24298). 'auto' is refused:
  it would change from one to the other.

  Attributes:
    source: 'trainer': scored by the learner, a forward pass over all tokens.
      'sampler': as sampled, without that pass. 'auto': the first pass is
      scored; where its mean |gap| is within `allowed_gap` the sampler's are
      taken, else all are scored.
    allowed_gap: mean |log p of the trainer - of the sampler| a token that
      'auto' accepts.
    alarm_gap: from this mean on every iteration warns: a weight or a prompt
      reached one of the two and not the other; or, of an iteration that was
      played ahead, that the policy moves too far in an iteration for the
      episodes of the one before. The first kind of mistake is told apart in
      the iterations behind checkpoints, which have no lag. 0 never warns.
  """

  source: Literal['trainer', 'sampler', 'auto'] = 'trainer'
  allowed_gap: float = 1e-3
  alarm_gap: float = 0.1

  def __post_init__(self) -> None:
    for name in ('allowed_gap', 'alarm_gap'):
      if not 0.0 <= getattr(self, name) < math.inf:
        raise ValueError(
            f'OldLogprobs.{name} is {getattr(self, name)}; expected a finite'
            ' number of at least 0'
        )

  def unread(self) -> dict[str, str]:
    """Fields without effect, each with the setting that leaves it so."""
    return {} if self.source == 'auto' else {'allowed_gap': 'source'}

  def choose(
      self,
      rollout: types.RolloutBatch,
      parts: Parts,
      score: Score,
      lag: int = 0,
  ) -> tuple[np.ndarray, types.Metrics]:
    """Old log-probs [B, R] and the gap between the two, as far as it is known.

    Args:
      rollout: the rows, a step each, with the sampler's log-probs.
      parts: the passes that cover them.
      score: the learner's own log-probs in some passes.
      lag: iterations that the sampler's policy is behind the learner's.
    """
    passes = list(parts)
    first = passes if self.source == 'trainer' else passes[:1]
    scored_BR = score(first)
    gap = _gap(rollout, first, scored_BR)
    self._alarm(gap, lag)
    sampled = self.source != 'trainer' and (
        self.source == 'sampler' or _mean(gap) <= self.allowed_gap
    )
    if self.source == 'auto' and not sampled and len(passes) > 1:
      scored_BR = scored_BR + score(passes[1:])
      gap = _gap(rollout, passes, scored_BR)
    metrics = {**gap, 'logprob_gap/old_from_sampler': float(sampled)}
    return rollout.sampler_logprobs_BR if sampled else scored_BR, metrics

  def _alarm(self, gap: types.Metrics, lag: int) -> None:
    if self.alarm_gap and not _mean(gap) < self.alarm_gap:
      logging.warning(
          'the sampler and the trainer differ by %.3g a token in the mean log'
          ' probability, at least OldLogprobs.alarm_gap = %g: %s',
          *(_mean(gap), self.alarm_gap, _LAGGING if lag else _DIFFERING),
      )


def _mean(gap: types.Metrics) -> float:
  return gap.get('logprob_gap/mean', 0.0)


def _gap(
    rollout: types.RolloutBatch,
    parts: list[tuple[np.ndarray, types.RolloutBatch]],
    scored_BR: np.ndarray,
) -> types.Metrics:
  """`logprob_gap` of the rows that `parts` hold."""
  weight_B = np.zeros_like(rollout.row_weight_B)
  for rows, _ in parts:
    weight_B[rows] = rollout.row_weight_B[rows]
  held = dataclasses.replace(rollout, row_weight_B=weight_B)
  return scorer_lib.logprob_gap(held, scored_BR)
