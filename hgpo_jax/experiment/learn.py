"""What an iteration learns from the episodes it played."""

from __future__ import annotations

import collections
from collections.abc import Sequence
import dataclasses
import functools

import jax
import numpy as np

from hgpo_jax import sharding
from hgpo_jax import types
from hgpo_jax.advantages import base as advantages
from hgpo_jax.batch import advantage_inputs
from hgpo_jax.batch import minibatch
from hgpo_jax.batch import pack
from hgpo_jax.experiment import runtime as runtime_lib
from hgpo_jax.experiment import spec as spec_lib
from hgpo_jax.experiment import text_vectors
from hgpo_jax.io import metrics as metrics_io
from hgpo_jax.learner import train_state


class NothingToLearnError(RuntimeError):
  """The environments left no step of a whole iteration to train on."""


def learn(
    spec: spec_lib.Experiment,
    player: runtime_lib.Player,
    learner: runtime_lib.Learner,
    state: train_state.TrainState,
    trajectories: Sequence[types.Trajectory],
    iteration: int,
    lag: int = 0,
) -> tuple[train_state.TrainState, types.Metrics]:
  """Turns the episodes of an iteration into advantages, log-probs, updates.

  `lag` is how many iterations the policy that played them is behind.

  Raises:
    NothingToLearnError: no episode has a step to train on.
    EstimatorError: the estimator returned no advantages.
  """
  _refuse_all_aborted(trajectories)
  inputs, steps = advantage_inputs.build(trajectories)
  inputs = dataclasses.replace(
      inputs,
      embed_texts=functools.partial(
          text_vectors.embed,
          player.model.embeddings(learner.policy(state)),
          player.tokenizer.encode,
      ),
  )
  advantage_N, advantage_metrics = _estimate(spec.estimator, inputs)
  trained_N = spec.minibatches.trained(advantage_N)
  state, update_metrics = _update(
      spec,
      player,
      learner,
      state,
      [steps[i] for i in trained_N],
      advantage_N[trained_N],
      iteration,
      lag,
  )
  return state, {
      **advantage_inputs.counts(trajectories),
      **advantage_metrics,
      **update_metrics,
      'batch/trained_steps': float(len(trained_N)),
  }


def _estimate(
    estimator: advantages.Estimator, inputs: types.AdvantageInputs
) -> tuple[np.ndarray, types.Metrics]:
  advantage_N, metrics = advantages.estimate(estimator, inputs)
  try:
    for name in metrics:
      metrics_io.check_name(name)
  except ValueError as error:
    name = type(estimator).__name__
    raise advantages.EstimatorError(f'{name}: {error}') from error
  return advantage_N, metrics


def _update(
    spec: spec_lib.Experiment,
    player: runtime_lib.Player,
    learner: runtime_lib.Learner,
    state: train_state.TrainState,
    steps: Sequence[types.Step],
    advantage_N: np.ndarray,
    iteration: int,
    lag: int,
) -> tuple[train_state.TrainState, types.Metrics]:
  """Log-probs and updates; no step, no update."""
  if not steps:
    return state, {'update/count': 0.0}
  batch, gap = _batch(spec, player, learner, state, steps, advantage_N, lag)
  seen = []
  for epoch in range(spec.minibatches.epochs):
    for part in minibatch.split(
        batch,
        spec.minibatches,
        seed=spec.seed,
        iteration=iteration,
        epoch=epoch,
        rows=_pass_rows(spec, player),
    ):
      state, metrics = learner.update(state, part)
      seen.append(metrics)
  return state, {
      **gap,
      **_mean(jax.device_get(seen)),
      'update/count': float(len(seen)),
  }


def _batch(
    spec: spec_lib.Experiment,
    player: runtime_lib.Player,
    learner: runtime_lib.Learner,
    state: train_state.TrainState,
    steps: Sequence[types.Step],
    advantage_N: np.ndarray,
    lag: int,
) -> tuple[types.PolicyBatch, types.Metrics]:
  """The steps as rows with what the loss needs; how the two models differ."""
  rows = _pass_rows(spec, player)
  rollout = pack.pad_steps(
      steps,
      length_buckets=spec.minibatches.length_buckets,
      response_buckets=spec.minibatches.response_buckets,
  )

  passes = lambda: minibatch.by_length(rollout, spec.minibatches, rows)

  def score(params, parts):
    shape = rollout.action_mask_BR.shape
    return learner.scorer.score_parts(params, parts, shape)[0]

  policy, reference = learner.policy(state), learner.reference
  old_BR, gap = spec.old_logprobs.choose(
      rollout, passes(), lambda parts: score(policy, parts), lag
  )
  reference_BR = None if reference is None else score(reference, passes())
  return (
      minibatch.policy_batch(rollout, advantage_N, old_BR, reference_BR),
      gap,
  )


def _pass_rows(spec: spec_lib.Experiment, player: runtime_lib.Player) -> int:
  return spec.minibatches.micro_batch_rows(sharding.ways(player.mesh, 'batch'))


def _mean(seen: Sequence[types.Metrics]) -> types.Metrics:
  """The mean over updates of each metric."""
  return {
      name: float(np.mean([metrics[name] for metrics in seen]))
      for name in seen[0]
  }


def _refuse_all_aborted(trajectories: Sequence[types.Trajectory]) -> None:
  if all(t.aborted or not t.steps for t in trajectories):
    errors = sorted({t.error for t in trajectories if t.error})
    ends = collections.Counter(t.end_reason for t in trajectories)
    knob = 'the environment'
    if ends[types.CONTEXT]:
      knob = 'Collector.max_prompt_tokens, which prompts exceed,'
    raise NothingToLearnError(
        f'none of the {len(trajectories)} episodes of the iteration has a step'
        f' to train on; the environments said: {errors[:3] or "nothing"}.'
        f' Episodes ended as {dict(ends)}.'
        f' Correct {knob} and run the same command again'
    )
