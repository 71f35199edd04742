"""What an estimator returns is checked before it is trained on."""

from __future__ import annotations

import numpy as np
import pytest

from hgpo_jax.advantages import base
from hgpo_jax.advantages import grpo
from hgpo_jax.losses import ppo
from tests.advantages import rows


class Mine:
  """Returns what it is told to."""

  def __init__(self, found):
    self._found = found

  def __call__(self, inputs):
    return self._found(len(inputs.outcome_N))


@pytest.mark.parametrize(
    ('found', 'text'),
    [
        (lambda n: np.zeros(n), 'returned ndarray; expected a pair'),
        (lambda n: (np.zeros(n), 1.0), 'returned float; expected metrics'),
        (lambda n: ([0.0] * n, {}), 'returned list; expected advantages as'),
        (lambda n: (np.zeros(n - 3), {}), 'expected advantages as a float'),
        (lambda n: (np.zeros((n, 1)), {}), 'expected advantages as a float'),
        (lambda n: (np.zeros(n, int), {}), 'returned int64'),
        (
            lambda n: (np.where(np.arange(n) == 2, np.nan, 0.0), {}),
            'returned nan in row 2, and 1 such rows in all; expected finite',
        ),
        (
            lambda n: (np.zeros(n), {'advantage/x': 'much'}),
            "returned 'much' as metric 'advantage/x'; expected numbers",
        ),
        (lambda n: (np.zeros(n), {'x': np.ones(2)}), 'expected numbers as'),
        # Finite in float64, which is not what is trained on.
        (lambda n: (np.full(n, 1e300), {}), 'returned inf in row 0'),
    ],
)
def test_other_results_are_refused_by_name(found, text):
  with pytest.raises(base.EstimatorError, match='Mine returned') as error:
    base.estimate(Mine(found), rows.random_inputs(0))
  assert text in str(error.value)


def test_what_cannot_be_called_is_no_estimator():
  with pytest.raises(base.EstimatorError, match='int is no estimator'):
    base.estimate(3, rows.random_inputs(0))


def test_what_takes_more_than_the_inputs_is_no_estimator():
  base.check(grpo.GRPO(), 'x')
  base.check(Mine(None), 'x')
  for wrong in (ppo.PPOLoss(), 3, lambda: 0):
    with pytest.raises(ValueError, match='Experiment.estimator is @.*no estim'):
      base.check(wrong, 'Experiment.estimator')


def test_one_finite_number_a_step_passes():
  found, metrics = base.estimate(
      Mine(lambda n: (np.arange(n) / 2, {'advantage/x': 1.0})),
      rows.random_inputs(0),
  )
  assert found.dtype == np.float32 and metrics == {'advantage/x': 1.0}
  np.testing.assert_array_equal(found, np.arange(len(found)) / 2)
