"""How faithful estimates are to the truth: figures with intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import math

import numpy as np

from hgpo_jax.advantages import base
from hgpo_jax.credit import agreement
from hgpo_jax.credit import probes as probes_lib
from hgpo_jax.credit import truth as truth_lib

# An advantage that is this many standard errors from 0 has a sure sign.
_SURE = 1.96
_LEVELS = (2.5, 97.5)
# What no estimator can beat with this truth: a second measurement of it.
CEILING = 'second measurement'


@dataclasses.dataclass(frozen=True)
class Figures:
  """Of R replicates of estimates x of P advantages A, in their best unit.

  The unit c is that of least squares, c = sum x A / sum x^2: estimators
  differ in units, and the step size absorbs them. With m and A' the means over
  replicates of c x and of A, bias and variance are over the mean of A'^2:

  Attributes:
    bias: mean over probes of (m - A')^2: what more groups do not cure; 1 for
      an estimate that is always 0. The noise of the truth is in it. NaN where
      every true advantage is 0.
    variance: mean over probes of the variance of c x over replicates. NaN too.
    rank: Spearman's rho over probes, mean over replicates.
    sign: of the probes whose A has a sure sign, the share that gets it; an
      estimate of exactly 0 gets half. NaN where no sign is sure.
    cosine: of the policy gradients sum_p x_p g_p and sum_p A_p g_p, with g_p
      the gradient of the log-probability of the response; mean over
      replicates. 0 where an estimate has no direction.
  """

  bias: float
  variance: float
  rank: float
  sign: float
  cosine: float


NAMES = tuple(field.name for field in dataclasses.fields(Figures))


@dataclasses.dataclass(frozen=True)
class Interval:
  """A figure with the 95 % interval of a bootstrap over tasks."""

  value: float
  low: float
  high: float


def figures(
    estimate_RP: np.ndarray,
    truth_RP: np.ndarray,
    sure_RP: np.ndarray,
    gram_PP: np.ndarray,
) -> Figures:
  """Compares estimates with the truth, see `Figures`.

  Args:
    estimate_RP: x; replicates are rows.
    truth_RP: A, as measured for each replicate.
    sure_RP: where its sign is sure.
    gram_PP: inner products of the gradients g_p.
  """
  square = (truth_RP.mean(0) ** 2).mean()
  size = (estimate_RP**2).sum()
  scale = (estimate_RP * truth_RP).sum() / size if size > 0.0 else 0.0
  scaled_RP = scale * estimate_RP
  miss_P = scaled_RP.mean(0) - truth_RP.mean(0)
  right_RP = 0.5 + 0.5 * np.sign(estimate_RP) * np.sign(truth_RP)
  return Figures(
      bias=truth_lib.share((miss_P**2).mean(), square),
      variance=truth_lib.share(scaled_RP.var(0).mean(), square),
      rank=float(
          np.mean(
              [
                  agreement.rank_correlation(x_P, a_P)
                  for x_P, a_P in zip(estimate_RP, truth_RP)
              ]
          )
      ),
      sign=float(right_RP[sure_RP].mean()) if sure_RP.any() else math.nan,
      cosine=float(_cosines(estimate_RP, truth_RP, gram_PP).mean()),
  )


# Figures by estimator, group size and name.
Table = Mapping[str, Mapping[int, Mapping[str, Interval]]]


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Estimators beside the truth, and beside one of them.

  Attributes:
    figures: of each estimator, and of `CEILING` (at size 0).
    gaps: the figures minus those of the baseline in the same groups, with
      intervals of the difference: estimators share tasks, probes and chance,
      so these tell more than two intervals side by side. Empty where the
      baseline is not compared.
  """

  figures: Table
  gaps: Table


def bootstrap(
    estimate_RP: np.ndarray,
    truth_RP: np.ndarray,
    sure_RP: np.ndarray,
    gram_PP: np.ndarray,
    task_P: np.ndarray,
    draws: int,
    seed: int = 0,
) -> np.ndarray:
  """The figures [1 + draws, len(NAMES)]: of all tasks, then of each draw.

  Tasks are drawn with replacement, with all of their probes: probes of one
  task are not independent. The same seed draws the same tasks.
  """
  rng = np.random.default_rng(seed)
  members = [np.flatnonzero(task_P == task) for task in np.unique(task_P)]
  drawn = [
      np.concatenate([members[k] for k in some])
      for some in rng.integers(len(members), size=(draws, len(members)))
  ]
  return np.array(
      [
          dataclasses.astuple(
              figures(
                  estimate_RP[:, i],
                  truth_RP[:, i],
                  sure_RP[:, i],
                  gram_PP[i][:, i],
              )
          )
          for i in [np.arange(len(task_P)), *drawn]
      ]
  )


def intervals(values_DF: np.ndarray) -> dict[str, Interval]:
  """The figures by name, or differences of them, from `bootstrap`."""
  found = {}
  for name, values_D in zip(NAMES, values_DF.T):
    drawn = values_D[1:][~np.isnan(values_D[1:])]
    low, high = np.percentile(drawn if drawn.size else [math.nan], _LEVELS)
    found[name] = Interval(float(values_D[0]), float(low), float(high))
  return found


@dataclasses.dataclass(frozen=True)
class Study:
  """How the figures are made from a sample.

  Attributes:
    group_sizes: G, episodes of a group.
    replicates: R, groups made around each probe; even.
    draws: of the bootstrap, at least 1.
    seed: of groups and draws.
    baseline: the estimator that the others are compared with.
  """

  group_sizes: tuple[int, ...] = (4, 8, 16)
  replicates: int = 16
  draws: int = 400
  seed: int = 0
  baseline: str = 'grpo'

  def __post_init__(self):
    if self.replicates < 2 or self.replicates % 2:
      raise ValueError(
          f'replicates is {self.replicates}; expected an even number of at'
          ' least 2: they take the two halves of the continuations in turn'
      )
    if self.draws < 1 or min(self.group_sizes, default=0) < 2:
      raise ValueError(f'{self}: expected draws >= 1 and groups of 2 or more')


def compare(
    study: Study,
    sample: probes_lib.Sample,
    estimators: Mapping[str, base.Estimator],
    gram_PP: np.ndarray,
    report: Callable[[str], None] = lambda text: None,
) -> Comparison:
  """Figures of all estimators in the same groups, and of `CEILING`.

  Of the latter, bias and variance say nothing: see `Truth.noise`.
  """
  truth = truth_lib.measure(sample)
  task_P = np.array([probe.task for probe in sample.probes])
  half_R = np.arange(study.replicates) % 2
  truth_RP = truth.other_HP[half_R]
  sure_RP = (np.abs(truth.other_HP) > _SURE * truth.error_HP)[half_R]
  rest = gram_PP, task_P, study.draws, study.seed
  table = {name: {} for name in estimators}
  gaps = {}
  if study.baseline in estimators:
    gaps = {name: {} for name in estimators if name != study.baseline}
  for size in study.group_sizes:
    found = truth_lib.estimates(
        sample, dict(estimators), size, study.replicates, study.seed
    )
    drawn = {
        name: bootstrap(estimate_RP, truth_RP, sure_RP, *rest)
        for name, estimate_RP in found.items()
    }
    for name, values_DF in drawn.items():
      table[name][size] = intervals(values_DF)
    for name in gaps:
      gaps[name][size] = intervals(drawn[name] - drawn[study.baseline])
    report(f'groups of {size}: {len(found)} estimators compared')
  ceiling_DF = bootstrap(truth.half_HP, truth.half_HP[::-1], sure_RP[:2], *rest)
  table[CEILING] = {0: intervals(ceiling_DF)}
  return Comparison(table, gaps)


def _cosines(
    x_RP: np.ndarray, y_RP: np.ndarray, gram_PP: np.ndarray
) -> np.ndarray:
  inner = lambda a, b: np.einsum('rp,rp->r', a @ gram_PP, b)
  size_R = np.sqrt(np.maximum(inner(x_RP, x_RP) * inner(y_RP, y_RP), 0.0))
  return np.where(
      size_R > 0.0, inner(x_RP, y_RP) / np.where(size_R > 0.0, size_R, 1.0), 0.0
  )
