"""AdamW with a global-norm clip; a gradient that is not finite is skipped."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from hgpo_jax import config


@config.configurable
@dataclasses.dataclass(frozen=True)
class AdamW:
  """AdamW (Loshchilov and Hutter, 2019) with decoupled weight decay.

  Attributes:
    learning_rate: after the warm-up, before any decay.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    weight_decay: times the learning rate, the fraction of every parameter
      that each update takes away; of norms and biases too, as published.
    max_grad_norm: the gradient is scaled down to this global norm.
    warmup_steps: updates in which the learning rate rises linearly; the
      first one already has 1 / (warmup_steps + 1) of it.
    schedule: what the learning rate does after the warm-up.
    decay_steps: updates after which 'linear' and 'cosine' have reached
      `final_fraction`, the warm-up included; 0 for 'constant'.
    final_fraction: of the learning rate, at the end of the decay; 0 for
      'constant'.
    first_moment_dtype: how the first moment is kept; 'bfloat16' takes 2 bytes
      a parameter less. The second stays in float32: with b2 near 1 its steps
      would be rounded away.
  """

  learning_rate: float = 1e-6
  b1: float = 0.9
  b2: float = 0.999
  eps: float = 1e-8
  weight_decay: float = 0.01
  max_grad_norm: float = 1.0
  warmup_steps: int = 0
  schedule: Literal['constant', 'linear', 'cosine'] = 'constant'
  decay_steps: int = 0
  final_fraction: float = 0.0
  first_moment_dtype: Literal['float32', 'bfloat16'] = 'float32'

  def __post_init__(self):
    for name in ('learning_rate', 'eps', 'max_grad_norm'):
      _require(self, name, getattr(self, name) > 0, 'greater than 0')
    # 1e6 for 1e-6; every parameter moves by about so much in an update.
    _require(self, 'learning_rate', self.learning_rate <= 1, 'at most 1')
    for name in ('b1', 'b2'):
      _require(self, name, 0 <= getattr(self, name) < 1, 'in [0, 1)')
    for name in ('weight_decay', 'warmup_steps'):
      _require(self, name, getattr(self, name) >= 0, 'at least 0')
    _require(
        self,
        'weight_decay',
        self.weight_decay * self.learning_rate < 1,
        f'less than 1 / learning_rate = {1 / self.learning_rate:g}: the product'
        ' is the share of a parameter that an update takes away',
    )
    _require(self, 'final_fraction', 0 <= self.final_fraction <= 1, 'in [0, 1]')
    for name in ('decay_steps', 'final_fraction'):
      _require(
          self,
          name,
          self.schedule != 'constant' or not getattr(self, name),
          "0 with schedule='constant', which does not decay",
      )
    _require(
        self,
        'decay_steps',
        self.schedule == 'constant' or self.decay_steps > self.warmup_steps,
        f'greater than warmup_steps={self.warmup_steps} for '
        f"schedule='{self.schedule}'",
    )

  def learning_rate_at(self, count: jax.Array | int) -> jax.Array:
    """Learning rate of the update after `count` applied ones.

    A function of the optimizer's own count alone: nothing else can restart
    the warm-up when a run is resumed.
    """
    count = jnp.asarray(count, jnp.float32)
    warm = jnp.minimum(1.0, (count + 1) / (self.warmup_steps + 1))
    if self.schedule == 'constant':
      return jnp.float32(self.learning_rate) * warm
    span = self.decay_steps - self.warmup_steps
    done = jnp.clip((count - self.warmup_steps) / span, 0.0, 1.0)
    if self.schedule == 'cosine':
      done = 0.5 * (1 - jnp.cos(math.pi * done))
    decayed = 1 - (1 - self.final_fraction) * done
    return jnp.float32(self.learning_rate) * warm * decayed

  def make(self) -> optax.GradientTransformation:
    """The optax transformation; its state is a `GuardState`."""
    return _guarded(
        optax.chain(
            optax.clip_by_global_norm(self.max_grad_norm),
            optax.adamw(
                self.learning_rate_at,
                b1=self.b1,
                b2=self.b2,
                eps=self.eps,
                weight_decay=self.weight_decay,
                mu_dtype=self.first_moment_dtype,
            ),
        )
    )


class GuardState(NamedTuple):
  """The guarded optimizer's state and what the guard has seen.

  Attributes:
    inner: state of the optimizer proper.
    skipped: int32, updates skipped since the gradient was not finite.
  """

  inner: Any
  skipped: jax.Array


def _guarded(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """`inner`, with an update of 0 and no change for a non-finite gradient."""

  def init(params):
    return GuardState(inner.init(params), jnp.zeros((), jnp.int32))

  def update(grads, state, params=None):
    finite = jnp.isfinite(optax.global_norm(grads))
    # Zeros in place of the broken gradient: 0 * inf would be nan in `inner`.
    safe = jax.tree.map(lambda g: jnp.where(finite, g, 0.0), grads)
    updates, stepped = inner.update(safe, state.inner, params)
    keep = lambda new, old: jnp.where(finite, new, old)
    return (
        jax.tree.map(lambda u: keep(u, jnp.zeros_like(u)), updates),
        GuardState(
            jax.tree.map(keep, stepped, state.inner),
            state.skipped + ~finite,
        ),
    )

  return optax.GradientTransformation(init, update)


def _require(spec: AdamW, name: str, holds: bool, expected: str) -> None:
  if not holds:
    raise ValueError(
        f'AdamW.{name}={getattr(spec, name)!r}; expected {expected}.'
    )
