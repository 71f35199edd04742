"""How far two sets of advantages agree: by order and by sign."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses

import numpy as np

from hgpo_jax.advantages import coverage

rank_correlation = coverage.rank_correlation


@dataclasses.dataclass(frozen=True)
class Agreement:
  """Every pair of E sets of advantages over the same steps.

  Attributes:
    names: of the sets.
    rank_EE: Spearman's rho over all steps.
    opposed_EE: share of all steps that get opposite signs.
    one_silent_EE: share of all steps where exactly one of the two is 0.
  """

  names: tuple[str, ...]
  rank_EE: np.ndarray
  opposed_EE: np.ndarray
  one_silent_EE: np.ndarray


def compare(advantages: Mapping[str, np.ndarray]) -> Agreement:
  """Compares all pairs; each set is [N] and in any unit.

  Raises:
    ValueError: there is no step to compare on.
  """
  values = list(advantages.values())
  if not values or not len(values[0]):
    raise ValueError('no advantages to compare; expected at least one step')
  sign_EN = np.sign(np.stack(values))
  pairs = sign_EN[:, None] * sign_EN[None]
  silent_EN = sign_EN == 0.0
  return Agreement(
      names=tuple(advantages),
      rank_EE=np.array(
          [[rank_correlation(x, y) for y in values] for x in values]
      ),
      opposed_EE=(pairs < 0.0).mean(-1),
      one_silent_EE=(silent_EN[:, None] ^ silent_EN[None]).mean(-1),
  )
