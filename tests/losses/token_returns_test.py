"""Token-level returns against loops; the golden files check them too."""

from __future__ import annotations

import numpy as np

from hgpo_jax.losses import token_returns
from hgpo_jax.losses import value

MASK = np.float32([[1, 1, 1, 0], [1, 0, 1, 1]])
REWARD = np.float32([[0, 1, 2, 0], [3, 0, -1, 5]])


def test_reinforce_pp_starts_anew_behind_a_gap():
  got, returns = token_returns.reinforce_pp(REWARD, MASK, 0.5)
  want = [[1.0, 2.0, 2.0, 0.0], [3.0, 0.75, 1.5, 5.0]]
  np.testing.assert_allclose(returns, want)
  assert (np.asarray(got)[MASK == 0] == 0.0).all()
  inside = np.asarray(got)[MASK == 1]
  np.testing.assert_allclose(inside.mean(), 0.0, atol=1e-6)
  np.testing.assert_allclose(inside.var(ddof=1), 1.0, rtol=1e-5)


def test_gae_is_a_sum_of_errors():
  value_BR = np.float32([[1, 2, 3, 0], [0.5, 0, 1, 2]])
  gamma, lam = 0.9, 0.8
  got, returns = token_returns.gae(REWARD, value_BR, MASK, gamma, lam)
  error = REWARD + gamma * np.pad(value_BR[:, 1:], ((0, 0), (0, 1))) - value_BR
  want = np.zeros((2, 4))
  for token in range(4):
    for later in range(token, 4):
      want[:, token] += (gamma * lam) ** (later - token) * error[:, later]
  np.testing.assert_allclose(returns, want + value_BR, rtol=1e-5)
  np.testing.assert_allclose(
      got, value.masked_whiten(want.astype(np.float32), MASK), atol=1e-5
  )


def test_gae_without_bootstrapping_is_the_return_less_the_value():
  value_BR = np.float32([[1, 2, 3, 0], [0.5, 0, 1, 2]])
  _, returns = token_returns.gae(REWARD, value_BR, MASK, 1.0, 1.0)
  want = np.cumsum(REWARD[:, ::-1], 1)[:, ::-1]
  np.testing.assert_allclose(returns, want, rtol=1e-6)


def test_remax_takes_the_greedy_reward_off():
  got, returns = token_returns.remax(REWARD, np.float32([1, 2]), MASK)
  np.testing.assert_allclose(returns, [[3, 3, 2, 0], [7, 4, 4, 5]])
  np.testing.assert_allclose(got, [[2, 2, 1, 0], [5, 4, 2, 3]])
