"""A tiny model and random steps for the learner's tests."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np

from hgpo_jax import types
from hgpo_jax.batch import minibatch
from hgpo_jax.batch import pack
from hgpo_jax.learner import scorer
from hgpo_jax.models import base
from hgpo_jax.models import qwen2

CONFIG = base.ModelConfig(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    tie_word_embeddings=True,
)
MODEL = qwen2.Qwen2(CONFIG, remat=False)
SPEC = minibatch.Minibatches(
    minibatch_steps=8,
    micro_batch_steps=8,
    length_buckets=(16, 24, 32),
    response_buckets=(8,),
)

SCORER = scorer.Scorer(MODEL, 1.0)


@functools.cache
def params(seed: int = 0) -> base.Params:
  """Parameters large enough that tokens differ in probability."""
  drawn = jax.jit(MODEL.init)(jax.random.key(seed))
  return jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, drawn)


def step(index: int, prompt: int, response: int, seed: int = 0) -> types.Step:
  """A step of random tokens."""
  rng = np.random.default_rng([seed, index])
  return types.Step(
      group=index // 2,
      trajectory=index,
      step=0,
      prompt_ids=rng.integers(1, 64, prompt).astype(np.int32),
      response_ids=rng.integers(1, 64, response).astype(np.int32),
      sampler_logprobs=-rng.exponential(size=response).astype(np.float32),
      finish_reason=types.STOP,
      action='look',
      action_valid=True,
      action_admissible=True,
      observation='o',
      state_key='s',
      next_state_key='s',
      reward=0.0,
  )


def steps(count: int, seed: int = 0, longest: int = 24) -> list[types.Step]:
  """Steps of random lengths."""
  rng = np.random.default_rng(seed)
  sizes = zip(rng.integers(1, longest - 7, count), rng.integers(1, 9, count))
  return [step(i, int(p), int(r), seed) for i, (p, r) in enumerate(sizes)]


def policy_batch(
    count: int, seed: int = 0, longest: int = 24
) -> types.PolicyBatch:
  """A batch whose old and reference policies are near the one of `params`."""
  rollout = pack.pad_steps(
      steps(count, seed, longest),
      length_buckets=SPEC.length_buckets,
      response_buckets=SPEC.response_buckets,
  )
  rng = np.random.default_rng(seed + 1)
  logprobs_BR = logprobs(rollout)
  near = lambda: logprobs_BR + rng.normal(
      scale=0.2, size=logprobs_BR.shape
  ).astype(np.float32)
  return minibatch.policy_batch(
      rollout, rng.normal(size=count).astype(np.float32), near(), near()
  )


def logprobs(rollout: types.RolloutBatch) -> np.ndarray:
  """Of the response tokens, by `params`; in one shape, to compile once."""
  shape = rollout.target_BR.shape
  one_length = dataclasses.replace(SPEC, length_buckets=(32,))
  parts = minibatch.by_length(rollout, one_length, 8)
  return SCORER.score_parts(params(), parts, shape)[0]
