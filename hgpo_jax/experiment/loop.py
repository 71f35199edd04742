"""Training, from top to bottom.

env -> rollout -> batch -> advantages -> loss -> update -> checkpoint, metrics
"""

from __future__ import annotations

import pathlib
import time

from absl import logging
import jax

from hgpo_jax import config
from hgpo_jax import types
from hgpo_jax.advantages import base as advantages
from hgpo_jax.envs import pool as pool_lib
from hgpo_jax.experiment import ahead
from hgpo_jax.experiment import evaluate as evaluate_lib
from hgpo_jax.experiment import learn as learn_lib
from hgpo_jax.experiment import run_folder
from hgpo_jax.experiment import runtime as runtime_lib
from hgpo_jax.experiment import schedule
from hgpo_jax.experiment import spec as spec_lib
from hgpo_jax.io import checkpoint
from hgpo_jax.io import trajectories as trajectories_io
from hgpo_jax.learner import train_state
from hgpo_jax.models import base as models
from hgpo_jax.rollout import metrics as rollout_metrics
from hgpo_jax.rollout import sampler as sampler_lib

# What an entry point tells in one line: the text says what to do. Any other
# error is ours, and shows where it came from.
FAILURES = (
    config.ConfigError,
    OSError,
    checkpoint.CheckpointError,
    pool_lib.EnvStartError,
    learn_lib.NothingToLearnError,
    advantages.EstimatorError,
    sampler_lib.AdmissibleError,
    sampler_lib.NotFiniteError,
)


def train(spec: spec_lib.Experiment, run_dir: pathlib.Path) -> None:
  """Runs the experiment, or goes on with it if `run_dir` holds a checkpoint.

  The run folder gets: config.gin, operative.gin, run.json, metrics.jsonl,
  tensorboard/, eval/, rollouts/, checkpoints/. Line i of the metrics holds
  what iteration i did, and what an evaluation of the policy before it found.
  A run that is finished is left as it is.

  Raises:
    One of `FAILURES`.
  """
  if config.check_resume(run_dir) and run_folder.finished(spec, run_dir):
    logging.info('%s is finished', run_dir)
    return
  run_folder.check_writable(run_dir)
  with (
      run_folder.claimed(run_dir),
      runtime_lib.open_player(spec) as player,
  ):
    learner = runtime_lib.make_learner(spec, player)
    checkpoints = checkpoint.Checkpoints(
        run_dir / 'checkpoints', keep=spec.keep_checkpoints
    )
    restored = checkpoints.restore(learner.state)
    state, first = learner.state, 0
    counters = runtime_lib.counters(spec, learner)
    if restored is not None:
      state, first = restored.state, restored.iteration
      run_folder.check_length(spec, first)
      runtime_lib.check_start(spec, restored, learner.rests_on)
      logging.info('going on with iteration %d', first)
    # Last, so that a start that fails does not bind the folder to its values.
    config.write(
        run_dir, seed=spec.seed, devices=[str(d) for d in jax.devices()]
    )
    with (
        ahead.Rollouts(spec, player, learner) as rollouts,
        spec.logging.open(run_dir, first, spec.iterations) as writer,
    ):
      for iteration in range(first, spec.iterations):
        metrics = {}
        if schedule.evaluation_due(spec, iteration):
          metrics = _evaluate(
              spec, player, rollouts, learner.policy(state), run_dir, iteration
          )
        state, trained = _iterate(
            spec, player, learner, rollouts, state, run_dir, iteration
        )
        writer.write(iteration, _merged(metrics, trained))
        if schedule.save_due(spec, iteration + 1):
          checkpoints.save(iteration + 1, state, counters)
      policy, last = learner.policy(state), spec.iterations
      metrics = _evaluate(spec, player, rollouts, policy, run_dir, last)
      writer.write(last, metrics)
    checkpoints.close()


def _iterate(
    spec: spec_lib.Experiment,
    player: runtime_lib.Player,
    learner: runtime_lib.Learner,
    rollouts: ahead.Rollouts,
    state: train_state.TrainState,
    run_dir: pathlib.Path,
    iteration: int,
) -> tuple[train_state.TrainState, types.Metrics]:
  """Plays one round of episodes, or has it already, and learns from them."""
  found = rollouts.take(iteration, state)
  start, played = time.monotonic(), found.played
  rollouts.begin(iteration + 1, state)
  every = spec.save_rollouts_every
  if every and iteration % every == 0:
    name = trajectories_io.file_name(iteration)
    trajectories_io.save(
        run_dir / 'rollouts' / name, played.every, player.tokenizer.decode
    )
  state, learned = learn_lib.learn(
      spec, player, learner, state, played.kept, iteration, found.lag
  )
  metrics = {
      **rollout_metrics.rollout_metrics(played.every),
      **played.metrics,
      **found.metrics,
      **learned,
      # Depends on when the process started, as times do.
      'time/sampler_compilations': float(player.sampler.compilations),
      'time/learn_s': time.monotonic() - start,
  }
  logging.info(
      'iteration %d: success %.2f, %d steps, rollout %.1f s, learn %.1f s',
      iteration,
      metrics['rollout/success_rate'],
      metrics['batch/steps'],
      metrics['time/rollout_s'],
      metrics['time/learn_s'],
  )
  return state, metrics


def _merged(first: types.Metrics, second: types.Metrics) -> types.Metrics:
  """Both; events of the pool that both have seen are added up."""
  added = {
      name: first[name] + second[name]
      for name in first.keys() & second.keys()
      if name.startswith(('pool/', 'env/'))
  }
  return first | second | added


def _evaluate(
    spec: spec_lib.Experiment,
    player: runtime_lib.Player,
    rollouts: ahead.Rollouts,
    params: models.Params,
    run_dir: pathlib.Path,
    iteration: int,
) -> types.Metrics:
  collector = rollouts.idle_collector()
  start, events = time.monotonic(), player.pool.metrics
  split = spec.env.split(spec.evaluation.split)
  result = evaluate_lib.evaluate(spec.evaluation, split, collector, params)
  path = run_dir / 'eval' / f'iteration_{iteration:06d}.json'
  evaluate_lib.save(path, result, iteration)
  logging.info(
      'evaluation before iteration %d: success %.3f (%.3f to %.3f) on %d games',
      iteration,
      result.overall.mean,
      result.overall.low,
      result.overall.high,
      result.overall.games,
  )
  return {
      **result.metrics(),
      **ahead.pool_events(events, player.pool.metrics),
      'time/evaluate_s': time.monotonic() - start,
  }
