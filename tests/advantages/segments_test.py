"""Segment kernels: exact zeros, float64 agreement, few compilations."""

from __future__ import annotations

import numpy as np
import pytest

from hgpo_jax.advantages import segments


def _normalise(values, ids, **kwargs):
  options = {'ddof': 1, 'divide_by_std': True, 'keep_singletons': False}
  return segments.normalise(
      np.array(values, np.float32), np.array(ids), **(options | kwargs)
  )


@pytest.mark.parametrize('size', [2, 3, 7, 39, 500])
def test_equal_values_are_exactly_zero(size):
  # The float32 mean of equal values is often off by an ulp.
  for value in (10.0 * 0.95**13, 0.1, -0.1, 1e6 / 3.0):
    result = _normalise([value] * size, [0] * size)
    assert (result.value_N == 0.0).all()
    assert result.degenerate_N.all()


def test_rounding_noise_is_not_signal():
  noise = float(np.float32(0.1)) - 0.1
  assert (_normalise([0.0, noise], [0, 0]).value_N == 0.0).all()
  assert (_normalise([0.0, 0.01], [0, 0]).value_N != 0.0).all()


def test_noise_is_told_by_what_the_values_were_made_of():
  # A win from 24 steps away at gamma = 0.5; or what 0.1 - 0.1 left over.
  tiny = 10.0 * 0.5**24
  want = 0.5 * tiny / (tiny / 2**0.5 + 1e-6)
  for size, expected in ((tiny, want), (0.2, want), (1.0, 0.0)):
    scale = np.array([0.0, size], np.float32)
    got = _normalise([0.0, tiny], [0, 0], scale_N=scale).value_N
    np.testing.assert_allclose(got, [-expected, expected], rtol=1e-5)


def test_near_the_mean_and_on_it():
  near, on = [0.1, 0.2, 0.3], [0.0, 5.0, 10.0]
  assert _normalise(near, [0] * 3).value_N[1] == 0.0
  exactly = {'mean_tolerance': 0.0}
  assert 0.0 < abs(_normalise(near, [0] * 3, **exactly).value_N[1]) < 1e-6
  assert _normalise(on, [0] * 3, **exactly).value_N[1] == 0.0


@pytest.mark.parametrize('ddof', [0, 1])
@pytest.mark.parametrize('divide_by_std', [True, False])
@pytest.mark.parametrize('offset', [0.0, 1000.0])
def test_agrees_with_float64(ddof, divide_by_std, offset):
  rng = np.random.default_rng(0)
  ids = rng.integers(0, 9, 60)
  values = (rng.normal(size=60) + offset).astype(np.float32)
  result = _normalise(values, ids, ddof=ddof, divide_by_std=divide_by_std)
  for segment in set(ids.tolist()):
    part = values[ids == segment].astype(np.float64)
    want = part - part.mean()
    if divide_by_std:
      want /= part.std(ddof=ddof) + 1e-6
    np.testing.assert_allclose(
        result.value_N[ids == segment], want, rtol=1e-5, atol=1e-5
    )


def test_two_members():
  np.testing.assert_allclose(
      _normalise([0.0, 10.0], [1, 1]).value_N,
      [-(0.5**0.5), 0.5**0.5],
      rtol=1e-6,
  )
  np.testing.assert_allclose(
      _normalise([0.0, 10.0], [1, 1], ddof=0).value_N, [-1.0, 1.0], rtol=1e-6
  )


def test_group_of_one():
  assert _normalise([7.0], [0]).value_N == 0.0
  kept = _normalise([7.0], [0], keep_singletons=True)
  np.testing.assert_allclose(kept.value_N, 7.0, rtol=2e-6)
  assert not kept.degenerate_N.any()


def test_rows_outside_any_group():
  result = _normalise([3.0, 1.0, 5.0], [-1, 0, 0])
  assert result.value_N[0] == 0.0 and result.size_N.tolist() == [0, 2, 2]
  np.testing.assert_array_equal(
      result.value_N[1:], _normalise([1.0, 5.0], [0, 0]).value_N
  )


def test_rows_that_do_not_count_are_still_normalised():
  result = _normalise(
      [0.0, 2.0, 4.0], [0, 0, 0], counted_N=np.array([True, True, False])
  )
  np.testing.assert_allclose(
      result.value_N, np.array([-1.0, 1.0, 3.0]) / 2**0.5, rtol=1e-5
  )


def test_a_flat_sample_is_no_scale():
  # Dividing 0.1 by the epsilon alone would give an advantage of -1e5.
  result = _normalise(
      [1.0, 1.0, 0.9], [0, 0, 0], counted_N=np.array([True, True, False])
  )
  np.testing.assert_allclose(result.value_N, [0.0, 0.0, -0.1], atol=1e-6)
  result = _normalise(
      [1.0, 1.0, 0.9],
      [0, 0, 0],
      counted_N=np.array([True, True, False]),
      divide_flat=True,
  )
  np.testing.assert_allclose(result.value_N, [0.0, 0.0, -1e5], rtol=1e-6)


def test_order_of_rows_changes_no_bit():
  rng = np.random.default_rng(1)
  values, ids = rng.normal(size=50), rng.integers(0, 6, 50)
  result = _normalise(values, ids).value_N
  order = rng.permutation(50)
  np.testing.assert_array_equal(
      _normalise(values[order], ids[order]).value_N, result[order]
  )


def test_returns_agree_with_the_recurrence():
  rng = np.random.default_rng(2)
  reward_JT = rng.normal(size=(5, 8)).astype(np.float32)
  trajectory, step = np.divmod(rng.permutation(40), 8)
  want_JT = np.zeros((5, 8))
  for t in reversed(range(8)):
    later = want_JT[:, t + 1] if t < 7 else 0.0
    want_JT[:, t] = reward_JT[:, t] + 0.9 * later
  got = segments.discounted_returns(
      reward_JT[trajectory, step], trajectory, step, 0.9
  )
  np.testing.assert_allclose(got, want_JT[trajectory, step], rtol=1e-5)


def test_equal_trajectories_have_equal_returns_to_the_bit():
  trajectory, step = np.divmod(np.arange(300), 30)
  reward = np.random.default_rng(3).normal(size=30).astype(np.float32)
  got = segments.discounted_returns(np.tile(reward, 10), trajectory, step, 0.95)
  assert (got.reshape(10, 30) == got[:30]).all()


def test_weighted_mean_leaves_out_exact_zeros():
  values = np.array([[1.0, 0.0, 0.0], [2.0, 4.0, 0.0]], np.float32)
  got = segments.weighted_mean(values, np.array([1.0, 3.0]))
  np.testing.assert_allclose(got, [7.0 / 4.0, 4.0, 0.0], rtol=1e-6)


def test_few_compilations():
  kernel = segments._normalise  # pylint: disable=protected-access
  _normalise(np.arange(3.0), [0, 0, 0])
  before = kernel._cache_size()
  for size in range(1, 65):
    _normalise(np.arange(float(size)), [0] * size)
  assert kernel._cache_size() == before
  assert [segments.bucket(n) for n in (0, 64, 65, 1000)] == [64, 64, 128, 1024]


def test_no_rows():
  assert _normalise([], np.zeros(0, int)).value_N.shape == (0,)
