"""The training loss: clipped policy term, entropy bonus, KL to a reference."""

from __future__ import annotations

import dataclasses
import math

import jax

from hgpo_jax import config
from hgpo_jax.losses import aggregate
from hgpo_jax.losses import kl
from hgpo_jax.losses import policy

_RATIOS = ('token', 'sequence')


@config.configurable
@dataclasses.dataclass(frozen=True)
class PPOLoss:
  """agg(policy) - entropy_coef agg(entropy) + kl_coef agg(KL).

  With one update on the data it was sampled from, the policy term is about 0
  in value (advantages are centred, ratios are 1) while its gradient is not;
  look at the ratio, the clip fraction and the gradient norm instead.

  Attributes:
    clip_low: the ratio counts down to 1 - clip_low.
    clip_high: the ratio counts up to 1 + clip_high.
    dual_clip: bound on the ratio where the advantage is negative, above 1;
      0 for none.
    entropy_coef: weight of the entropy bonus.
    kl_coef: weight of the KL to the reference; 0 needs no reference.
    kl_kind: estimate of the KL, one of `kl.KINDS`.
    aggregation: from tokens to a number, one of `aggregate.MODES`.
    norm_length: tokens that 'seq-mean-token-sum-norm' divides by, such as
      the limit on new tokens; 0 with the other aggregations.
    ratio: 'token', or 'sequence' for GSPO.
    tis_clip: truncated importance sampling (Yao et al. 2025): the policy term
      of a token counts min(p_old / p_sampler, tis_clip) times, which corrects
      for a sampler that rounds, or whose policy is an iteration behind
      (Experiment.rollout_lag): then it is the decoupled objective (Hilton et
      al. 2021, arXiv 2110.00641) with a bounded weight. 0 for none, usual is
      2. Where the old log-probs are the sampler's it does nothing.
  """

  clip_low: float = 0.2
  clip_high: float = 0.2
  dual_clip: float = 3.0
  entropy_coef: float = 0.001
  kl_coef: float = 0.01
  kl_kind: str = 'k3'
  aggregation: str = aggregate.TOKEN_MEAN
  norm_length: int = 0
  ratio: str = 'token'
  tis_clip: float = 0.0

  def __post_init__(self):
    for name in (
        'clip_low',
        'clip_high',
        'entropy_coef',
        'kl_coef',
        'tis_clip',
    ):
      if not 0.0 <= getattr(self, name) < math.inf:
        raise ValueError(
            f'PPOLoss.{name} is {getattr(self, name)}, expected a finite'
            ' number of at least 0'
        )
    for name, choices in (
        ('kl_kind', kl.KINDS),
        ('aggregation', aggregate.MODES),
        ('ratio', _RATIOS),
    ):
      if getattr(self, name) not in choices:
        raise ValueError(
            f'PPOLoss.{name} is {getattr(self, name)!r}, expected one of'
            f' {choices}'
        )
    self._check_combinations()

  def _check_combinations(self) -> None:
    if self.clip_low > 1.0:
      raise ValueError(
          f'PPOLoss.clip_low is {self.clip_low}, expected at most 1: a ratio'
          ' is never below 0'
      )
    if 0.0 < self.tis_clip < 1.0:
      raise ValueError(
          f'PPOLoss.tis_clip is {self.tis_clip}, expected 0 for none or at least'
          ' 1: below 1 it weighs down tokens on which the two agree'
      )
    if self.dual_clip and not 1.0 + self.clip_high < self.dual_clip < math.inf:
      raise ValueError(
          f'PPOLoss.dual_clip is {self.dual_clip}, expected 0 for none or a'
          f' number above 1 + clip_high = {1.0 + self.clip_high}'
      )
    needs_length = self.aggregation == aggregate.SEQ_MEAN_TOKEN_SUM_NORM
    if needs_length != (self.norm_length > 0) or self.norm_length < 0:
      raise ValueError(
          f'PPOLoss.norm_length is {self.norm_length} with aggregation'
          f' {self.aggregation!r}: set it above 0 for'
          f' {aggregate.SEQ_MEAN_TOKEN_SUM_NORM!r}, leave it 0 otherwise'
      )
    if self.ratio == 'sequence' and (
        self.aggregation != aggregate.SEQ_MEAN_TOKEN_MEAN or self.dual_clip
    ):
      raise ValueError(
          "PPOLoss.ratio = 'sequence' is GSPO, which weighs sequences alike"
          f' and has no dual clip: got aggregation {self.aggregation!r} and'
          f' dual_clip {self.dual_clip}, set PPOLoss.aggregation ='
          f' {aggregate.SEQ_MEAN_TOKEN_MEAN!r} and PPOLoss.dual_clip = 0.0'
      )

  def denominators(
      self,
      mask_BR: jax.Array,
      row_weight_B: jax.Array,
      step_BR: jax.Array | None = None,
  ) -> aggregate.Denominators:
    """Counts a minibatch, or a part of it; the counts of parts add up."""
    length = max(self.norm_length, 1)
    return aggregate.count(mask_BR, row_weight_B, length, step_BR)

  def __call__(
      self,
      logprobs_BR: jax.Array,
      old_logprobs_BR: jax.Array,
      ref_logprobs_BR: jax.Array | None,
      entropy_BR: jax.Array,
      advantage_BR: jax.Array,
      mask_BR: jax.Array,
      row_weight_B: jax.Array,
      denominators: aggregate.Denominators,
      step_BR: jax.Array | None = None,
      sampler_logprobs_BR: jax.Array | None = None,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """A micro-batch's share of the minibatch's loss and metrics; add them up.

    Args:
      logprobs_BR: of the policy being trained; gets the gradient.
      old_logprobs_BR: of the policy before the minibatch updates.
      ref_logprobs_BR: of the reference; None only with kl_coef = 0.
      entropy_BR: entropies of the policy; gets the gradient.
      advantage_BR: each step's advantage, on its tokens.
      mask_BR: response tokens. Anything may stand where it is 0.
      row_weight_B: 1 for real rows, 0 for rows added as padding.
      denominators: `denominators` of the whole minibatch.
      step_BR: the step of each token; None where a row is one step.
      sampler_logprobs_BR: of the sampler; None only with tis_clip = 0.
    """
    if ref_logprobs_BR is None and self.kl_coef:
      raise ValueError(
          f'PPOLoss.kl_coef is {self.kl_coef} but there are no reference'
          ' log-probs: give the learner a reference policy, or set'
          ' PPOLoss.kl_coef = 0.0'
      )
    share = (mask_BR, row_weight_B, denominators)
    total = lambda x_BR: aggregate.aggregate(
        self.aggregation, x_BR, *share, step_BR
    )
    log_ratio_BR = policy.token_log_ratio(logprobs_BR, old_logprobs_BR, mask_BR)
    terms = self._policy(log_ratio_BR, advantage_BR, mask_BR, step_BR)
    metrics = {}
    policy_BR = terms.loss_BR
    if self.tis_clip:
      weight_BR, cut_BR = self._correction(
          old_logprobs_BR, sampler_logprobs_BR, mask_BR
      )
      policy_BR = weight_BR * policy_BR
      metrics['policy/tis_weight'] = aggregate.token_mean(weight_BR, *share)
      metrics['policy/tis_cut_frac'] = aggregate.token_mean(cut_BR, *share)
    loss = total(policy_BR)
    metrics |= {
        'loss/policy': loss,
        'policy/clip_frac': aggregate.token_mean(terms.clipped_BR, *share),
        'policy/clip_frac_lower': aggregate.token_mean(
            terms.clipped_low_BR, *share
        ),
        'policy/ppo_kl': aggregate.token_mean(-log_ratio_BR, *share),
        'policy/ratio': aggregate.token_mean(terms.ratio_BR, *share),
        'policy/entropy': aggregate.token_mean(entropy_BR, *share),
    }
    if self.entropy_coef:
      loss -= self.entropy_coef * total(entropy_BR)
    if ref_logprobs_BR is not None:
      kl_BR = kl.kl(
          self.kl_kind,
          aggregate.masked(logprobs_BR, mask_BR),
          aggregate.masked(ref_logprobs_BR, mask_BR),
      )
      metrics['policy/ref_kl'] = aggregate.token_mean(kl_BR, *share)
      loss += self.kl_coef * total(kl_BR)
    metrics['loss/total'] = loss
    return loss, metrics

  def _correction(
      self,
      old_logprobs_BR: jax.Array,
      sampler_logprobs_BR: jax.Array | None,
      mask_BR: jax.Array,
  ) -> tuple[jax.Array, jax.Array]:
    if sampler_logprobs_BR is None:
      raise ValueError(
          f'PPOLoss.tis_clip is {self.tis_clip} but there are no log-probs of'
          ' the sampler: give the loss those, or set PPOLoss.tis_clip = 0.0'
      )
    return policy.truncated_weight(
        policy.token_log_ratio(old_logprobs_BR, sampler_logprobs_BR, mask_BR),
        self.tis_clip,
    )

  def _policy(
      self,
      log_ratio_BR: jax.Array,
      advantage_BR: jax.Array,
      mask_BR: jax.Array,
      step_BR: jax.Array | None,
  ) -> policy.PolicyTerms:
    if self.ratio == 'sequence':
      log_ratio_BR = policy.sequence_log_ratio(log_ratio_BR, mask_BR, step_BR)
    return policy.ppo_clip(
        log_ratio_BR,
        aggregate.masked(advantage_BR, mask_BR),
        self.clip_low,
        self.clip_high,
        self.dual_clip,
    )
