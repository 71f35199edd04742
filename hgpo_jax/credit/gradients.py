"""Policy gradients of single steps, as their inner products."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from hgpo_jax import types
from hgpo_jax.batch import minibatch
from hgpo_jax.batch import pack
from hgpo_jax.learner import arrays
from hgpo_jax.learner import scorer
from hgpo_jax.models import base


def gram(
    model: base.LanguageModel,
    params: base.Params,
    steps: Sequence[types.Step],
    temperature: float,
    spec: minibatch.Minibatches,
    rows: int = 16,
) -> np.ndarray:
  """<g_i, g_j> for all pairs of steps, float64 [P, P].

  g_i is the gradient of log pi(response | prompt), summed over the tokens of
  the response. With it the cosine of any two weighted sums of the g_i takes
  no further pass. Holds all P gradients in memory: for small models.

  Args:
    model: functions of the policy.
    params: its parameters.
    steps: the steps.
    temperature: that responses were sampled at.
    spec: for the lengths that rows are padded to.
    rows: gradients made side by side.
  """
  batch = pack.pad_steps(
      steps,
      length_buckets=spec.length_buckets,
      response_buckets=spec.response_buckets,
  )

  def log_prob(params, row):
    one = jax.tree.map(lambda x: x[None], row)
    return scorer.response_logprobs(model, params, one, temperature)[0].sum()

  gradients = jax.jit(jax.vmap(jax.grad(log_prob), (None, 0)))
  parts = []
  for start in range(0, len(steps), rows):
    place = np.minimum(np.arange(start, start + rows), len(steps) - 1)
    some = arrays.put(jax.tree.map(lambda x, i=place: x[i], batch), None)
    found = jax.device_get(gradients(params, some))
    flat = [np.reshape(x, (rows, -1)) for x in jax.tree.leaves(found)]
    parts.append(np.concatenate(flat, 1)[: len(steps) - start])
  whole_PD = np.concatenate(parts)
  return np.asarray(whole_PD @ whole_PD.T, np.float64)
