"""Drawing tokens: filters, frequencies, log-probs."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from hgpo_jax.rollout import draw as draw_lib

_LOGITS = np.array([2.0, -1.0, 0.5, 1.5, 0.4, -3.0, 1.4, 0.0, -0.5, 0.3])
_draw = jax.jit(draw_lib.draw)


def _rules(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
  return draw_lib.Rules(
      np.full(rows, temperature, np.float32),
      np.full(rows, top_k, np.int32),
      np.full(rows, top_p, np.float32),
      np.full(rows, min_p, np.float32),
  )


def _kept(temperature, top_k, top_p, min_p):
  """Probabilities after the filters, in float64, one token at a time."""
  scaled = _LOGITS / temperature
  share = np.exp(scaled) / np.exp(scaled).sum()
  order = np.argsort(-scaled)
  if top_k:
    order = order[:top_k]
  share_of = {i: share[i] / share[order].sum() for i in order}
  kept, before = [], 0.0
  for i in order:
    if before < top_p and share_of[i] >= min_p * share_of[order[0]]:
      kept.append(i)
    before += share_of[i]
  result = np.zeros_like(share)
  result[kept] = share[kept] / share[kept].sum()
  return result


@pytest.mark.parametrize(
    'rules',
    [
        dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
        dict(temperature=0.6, top_k=3, top_p=1.0, min_p=0.0),
        dict(temperature=1.0, top_k=0, top_p=0.7, min_p=0.0),
        dict(temperature=1.3, top_k=0, top_p=1.0, min_p=0.3),
        dict(temperature=0.8, top_k=6, top_p=0.8, min_p=0.2),
        dict(temperature=1.0, top_k=0, top_p=1e-6, min_p=0.0),
    ],
)
def test_drawn_by_stretches_of_the_cumulative_distribution(rules):
  """Evenly spaced numbers give each token its share of them, exactly."""
  rows = 2000
  uniform_B = (np.arange(rows, dtype=np.float32) + 0.5) / rows
  logits_BV = np.tile(_LOGITS.astype(np.float32), (rows, 1))
  drawn = _draw(logits_BV, uniform_B, _rules(rows, **rules))
  expected = _kept(**rules)
  share = np.bincount(drawn.token_B, minlength=10) / rows
  np.testing.assert_allclose(share, expected, atol=1.1 / rows)
  assert not share[expected == 0].any()
  np.testing.assert_allclose(
      drawn.logprob_B, np.log(expected[drawn.token_B]), atol=1e-5
  )
  model = _LOGITS - np.log(np.exp(_LOGITS).sum())
  np.testing.assert_allclose(
      drawn.model_logprob_B, model[drawn.token_B], atol=1e-5
  )


def test_rows_have_their_own_rules():
  rules = draw_lib.Rules(
      np.array([0.0, 1.0, 1.0], np.float32),
      np.array([0, 1, 0], np.int32),
      np.ones(3, np.float32),
      np.zeros(3, np.float32),
  )
  logits_BV = np.tile(_LOGITS.astype(np.float32), (3, 1))
  last = np.nextafter(np.float32(1), np.float32(0))
  drawn = _draw(logits_BV, np.full(3, last), rules)
  # The likeliest, the only one, and the last of all.
  assert drawn.token_B.tolist() == [0, 0, 9]
  assert drawn.logprob_B[1] == 0.0 and drawn.logprob_B[0] < -0.1


@pytest.mark.parametrize('uniform', [0.0, 0.3, 1 - 2**-24])
def test_never_a_token_without_weight(uniform):
  rng = np.random.default_rng(0)
  logits_BV = rng.normal(size=(64, 1000)).astype(np.float32) * 8
  allowed_BV = rng.random((64, 1000)) < 0.02
  allowed_BV[:, 0] |= ~allowed_BV.any(axis=1)
  drawn = _draw(
      logits_BV, np.full(64, uniform, np.float32), _rules(64), allowed_BV
  )
  assert allowed_BV[np.arange(64), drawn.token_B].all()
  assert np.isfinite(drawn.logprob_B).all()
  allowed = np.where(allowed_BV, logits_BV.astype(np.float64), -np.inf)
  total = np.log(np.exp(allowed).sum(axis=1))
  expected = allowed[np.arange(64), drawn.token_B] - total
  np.testing.assert_allclose(drawn.logprob_B, expected, atol=2e-5)
