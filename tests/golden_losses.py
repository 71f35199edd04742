"""Checks the losses against one golden LOSS case, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax.losses import aggregate
from hgpo_jax.losses import kl
from hgpo_jax.losses import policy
from hgpo_jax.losses import ppo
from hgpo_jax.losses import token_logprobs
from hgpo_jax.losses import value

TOLERANCE = 1e-5  # Absolute, and relative to the golden value.
_MEAN = aggregate.SEQ_MEAN_TOKEN_MEAN


class _Case:
  """The inputs of a case as arrays, and what was found wrong.

  Arrays are padded to a common shape by masked tokens and rows of weight 0,
  which must change nothing; then nearly all cases share their compilations.
  """

  def __init__(self, case: dict[str, Any]):
    self.rows, self.width = np.shape(case['inputs']['mask'])
    extra = ((0, -self.rows % 8), (0, -self.width % 16))
    for name, matrix in case['inputs'].items():
      matrix = np.asarray(matrix, np.float32)
      padding = extra + ((0, 0),) * (matrix.ndim - 2)
      setattr(self, name, jnp.asarray(np.pad(matrix, padding)))
    self.hyper = case['hyper']
    self.expected = case['expected']
    self.weight_B = jnp.pad(jnp.ones(self.rows), extra[0])
    self.denominators = aggregate.count(self.mask, self.weight_B, self.width)
    self.wrong: list[str] = []

  def compare(self, name: str, got: Any, want: Any) -> None:
    """Notes a difference; the shapes must agree."""
    got, want = np.asarray(got), np.asarray(want, np.float64)
    if got.ndim == 2:
      got = got[: self.rows, : self.width]
    if got.shape != want.shape:
      self.wrong.append(f'{name}: shape {got.shape}, expected {want.shape}')
      return
    error = np.abs(got - want) / (1.0 + np.abs(want))
    if not (error <= TOLERANCE).all():
      flat = np.argmax(np.nan_to_num(error, nan=np.inf))
      worst = np.unravel_index(flat, error.shape)
      self.wrong.append(
          f'{name}{list(map(int, worst)) or ""}: {got[worst]:.8g}, expected'
          f' {want[worst]:.8g}'
      )

  def refuse_unknown(self, name: str, known: tuple[str, ...]) -> None:
    """Notes values that would not be compared."""
    for key in self.expected[name].keys() - set(known):
      self.wrong.append(f'{name} {key}: nothing here computes it')

  def total(self, mode: str, x_BR: jax.Array) -> jax.Array:
    """Aggregates the whole case."""
    return aggregate.aggregate(
        mode, x_BR, self.mask, self.weight_B, self.denominators
    )

  def compare_total(self, name: str, mode: str, x_BR: Any, want: Any) -> None:
    """An aggregate; where the original divides 0 by 0, the guarded one.

    There, the mean over rows is that of the rows with tokens, times their
    share of the rows.
    """
    got = self.total(mode, x_BR)
    if want is None:
      rows = np.flatnonzero(np.asarray(self.mask).sum(1))
      mask, kept = np.asarray(self.mask)[rows], np.asarray(x_BR)[rows]
      means = (mask * kept).sum(1) / mask.sum(1)
      want = means.sum() / self.rows
    self.compare(name, got, want)


def check(case: dict[str, Any]) -> list[str]:
  """What is wrong on a LOSS case; [] if nothing."""
  if not case['expected']:
    return ['nothing to compare']
  golden = _Case(case)
  for name in golden.expected:
    if name.startswith('ppo/'):
      _check_policy(golden, name, name.removeprefix('ppo/'), _ppo)
    elif name == 'gspo':
      _check_policy(golden, name, _MEAN, _gspo)
    elif name.startswith('kl/'):
      _check_kl(golden, name)
    elif name == 'entropy':
      _check_entropy(golden)
    elif name.startswith('total/'):
      _check_total(golden, name)
    elif name == 'value':
      _check_value(golden)
    elif name == 'masked_whiten_of_log_prob':
      got = value.masked_whiten(golden.log_prob, golden.mask)
      golden.compare(name, got, golden.expected[name])
    else:
      golden.wrong.append(f'{name}: nothing here computes it')
  return golden.wrong


def _ppo(golden: _Case, logprobs_BR: jax.Array) -> policy.PolicyTerms:
  log_ratio_BR = policy.token_log_ratio(
      logprobs_BR, golden.old_log_prob, golden.mask
  )
  return policy.ppo_clip(
      log_ratio_BR,
      golden.advantage,
      golden.hyper['clip_low'],
      golden.hyper['clip_high'],
      golden.hyper['dual_clip_c'],
  )


def _gspo(golden: _Case, logprobs_BR: jax.Array) -> policy.PolicyTerms:
  log_ratio_BR = policy.token_log_ratio(
      logprobs_BR, golden.old_log_prob, golden.mask
  )
  return policy.ppo_clip(
      policy.sequence_log_ratio(log_ratio_BR, golden.mask),
      golden.advantage,
      golden.hyper['clip_low'],
      golden.hyper['clip_high'],
  )


def _check_policy(
    golden: _Case,
    name: str,
    mode: str,
    terms_of: Callable[[_Case, jax.Array], policy.PolicyTerms],
) -> None:
  expected = golden.expected[name]
  golden.refuse_unknown(
      name,
      ('loss', 'clip_frac', 'clip_frac_lower', 'ppo_kl', 'grad_log_prob'),
  )
  terms = terms_of(golden, golden.log_prob)
  golden.compare_total(f'{name} loss', mode, terms.loss_BR, expected['loss'])
  mean = aggregate.TOKEN_MEAN
  for key, matrix in (
      ('clip_frac', terms.clipped_BR),
      ('clip_frac_lower', terms.clipped_low_BR),
      ('ppo_kl', golden.old_log_prob - golden.log_prob),
  ):
    if key in expected:
      got = golden.total(mean, matrix)
      golden.compare(f'{name} {key}', got, expected[key])
  gradient = jax.grad(
      lambda x: golden.total(mode, terms_of(golden, x).loss_BR)
  )(golden.log_prob)
  if 'grad_log_prob' in expected:
    golden.compare(f'{name} gradient', gradient, expected['grad_log_prob'])
  elif not np.isfinite(gradient).all():
    golden.wrong.append(f'{name} gradient: not finite')


def _check_kl(golden: _Case, name: str) -> None:
  kind, expected = name.removeprefix('kl/'), golden.expected[name]
  golden.refuse_unknown(
      name, ('matrix', 'grad_log_prob_of_sum', *aggregate.MODES)
  )
  kl_BR = kl.kl(kind, golden.log_prob, golden.ref_log_prob)
  golden.compare(f'{name} matrix', kl_BR, expected['matrix'])
  for mode in aggregate.MODES:
    if mode in expected:
      golden.compare_total(f'{name} {mode}', mode, kl_BR, expected[mode])
  gradient = jax.grad(lambda x: kl.kl(kind, x, golden.ref_log_prob).sum())(
      golden.log_prob
  )
  golden.compare(f'{name} gradient', gradient, expected['grad_log_prob_of_sum'])


def _entropy(golden: _Case) -> jax.Array:
  tokens_BR = jnp.zeros(golden.mask.shape, int)
  return token_logprobs.token_logprobs(
      golden.logits, tokens_BR, lambda logits: logits, 1.0, chunk_tokens=4
  )[1]


def _check_entropy(golden: _Case) -> None:
  entropy_BR, expected = _entropy(golden), golden.expected['entropy']
  golden.compare('entropy matrix', entropy_BR, expected['matrix'])
  got = golden.total(aggregate.TOKEN_MEAN, entropy_BR)
  golden.compare('entropy mean', got, expected['token_mean'])


def _check_total(golden: _Case, name: str) -> None:
  hyper, mode = golden.hyper, name.removeprefix('total/')
  by_length = mode == aggregate.SEQ_MEAN_TOKEN_SUM_NORM
  loss = ppo.PPOLoss(
      clip_low=hyper['clip_low'],
      clip_high=hyper['clip_high'],
      dual_clip=hyper['dual_clip_c'],
      entropy_coef=hyper['entropy_coef'],
      kl_coef=hyper['kl_coef'],
      aggregation=mode,
      norm_length=golden.width if by_length else 0,
  )
  got, _ = loss(
      golden.log_prob,
      golden.old_log_prob,
      golden.ref_log_prob,
      _entropy(golden),
      golden.advantage,
      golden.mask,
      golden.weight_B,
      loss.denominators(golden.mask, golden.weight_B),
  )
  golden.compare(name, got, golden.expected[name])


def _check_value(golden: _Case) -> None:
  expected = golden.expected['value']
  loss_BR, clipped_BR = value.value_loss(
      golden.value_pred,
      golden.value_old,
      golden.value_return,
      golden.hyper['value_clip'],
  )
  mean = aggregate.TOKEN_MEAN
  golden.compare('value loss', golden.total(mean, loss_BR), expected['loss'])
  got = golden.total(mean, clipped_BR)
  golden.compare('value clip_frac', got, expected['clip_frac'])
