"""The toy environment as gin sees it. Workers import it: no jax here."""

from __future__ import annotations

import dataclasses

from hgpo_jax import config
from tests.envs import toy


@config.configurable
@dataclasses.dataclass(frozen=True)
class Boxes(toy.ToySpec):
  """`toy.ToySpec`, configurable."""
