"""HGPO with levels weighed by the inverse variance of their means."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from hgpo_jax.advantages import hgpo
from tests.advantages import rows

HGPO = hgpo.HGPO
some = hypothesis.settings(max_examples=25, deadline=None, derandomize=True)


def _reference(inputs, levels, std):
  """In float64, from the definition; a level is a list of keys."""
  num = len(inputs.step_N)
  path = {}
  for row in range(num):
    path[inputs.trajectory_N[row], inputs.step_N[row]] = row
  q, keys = np.zeros(num), [[None] * num for _ in range(levels)]
  for row in np.argsort(-inputs.step_N, kind='stable'):
    place = inputs.trajectory_N[row], inputs.step_N[row] + 1
    later = q[path[place]] if place in path else 0.0
    q[row] = float(inputs.reward_N[row]) + 0.95 * later
  for (trajectory, step), row in path.items():
    past = [path[trajectory, t] for t in range(step + 1)]
    for k in range(1, min(levels, step + 1) + 1):
      keys[k - 1][row] = (inputs.group_N[row], *inputs.state_N[past[-k:]])
  q -= 0.1 * ~inputs.valid_N
  result = np.zeros(num)
  for row in range(num):
    prior = q[inputs.group_N == inputs.group_N[row]].var(ddof=1)
    before, items = None, []
    for key in keys:
      peers = [r for r in range(num) if key[r] == key[row] and key[row]]
      n, values = len(peers), q[peers]
      centred = q[row] - values.mean() if n else 0.0
      if n > 1 and abs(centred) > 1e-6 * np.ptp(values) and peers != before:
        if np.ptp(values) > 1e-6 * max(1.0, abs(values).max()):
          scatter = (n - 1) * values.var(ddof=1) + prior
          scale = values.std() + 1e-6 if std else 1.0
          items.append((n**2 / scatter, centred / scale))
      before = peers
    total = sum(weight for weight, _ in items)
    result[row] = sum(w * x for w, x in items) / total if items else 0.0
  return result


@some
@hypothesis.given(
    seed=st.integers(0, 10_000), std=st.booleans(), history=st.integers(0, 3)
)
def test_float64_reference(seed, std, history):
  inputs = rows.random_inputs(seed)
  mode = 'mean_std_norm' if std else 'mean_norm'
  got, _ = HGPO(history, mode=mode, weighting='inverse_variance')(inputs)
  want = _reference(inputs, history + 1, std)
  np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_one_level_needs_no_weights():
  inputs = rows.random_inputs(5)
  np.testing.assert_allclose(
      HGPO(0, weighting='inverse_variance')(inputs)[0],
      HGPO(0)(inputs)[0],
      rtol=1e-5,
  )


def test_the_order_of_rows_changes_nothing():
  inputs = rows.random_inputs(6)
  estimator = HGPO(base_group=True, weighting='inverse_variance')
  order = np.random.default_rng(0).permutation(len(inputs.step_N))
  np.testing.assert_array_equal(
      estimator(rows.take(inputs, order))[0], estimator(inputs)[0][order]
  )


def test_no_rows():
  empty = rows.take(rows.random_inputs(0), np.zeros(0, int))
  assert HGPO(weighting='inverse_variance')(empty)[0].shape == (0,)


def test_bad_weighting_is_refused():
  with pytest.raises(ValueError, match="HGPO.weighting is 'k', expected one"):
    HGPO(weighting='k')


def test_weight_entropy_says_how_many_levels_are_listened_to():
  inputs = rows.random_inputs(3)
  entropy = lambda **fields: HGPO(**fields)(inputs)[1][
      'advantage/weight_entropy'
  ]
  assert entropy(history_length=0) == 0.0
  alike = entropy(history_length=2, alpha=0.0)
  assert 0.0 < alike <= np.log(3)
  assert entropy(history_length=2, alpha=40.0) < 1e-3 * alike
