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
from hgpo_jax.experiment import evaluate as evaluate_lib
from hgpo_jax.experiment import learn as learn_lib
from hgpo_jax.experiment import resample
from hgpo_jax.experiment import run_folder
from hgpo_jax.experiment import runtime as runtime_lib
from hgpo_jax.experiment import spec as spec_lib
from hgpo_jax.experiment import task_order
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
    with spec.logging.open(run_dir, first, spec.iterations) as writer:
      for iteration in range(first, spec.iterations):
        events = player.pool.metrics
        metrics = {}
        if _evaluation_due(spec, iteration):
          metrics |= _evaluate(
              spec, player, learner.policy(state), run_dir, iteration
          )
        state, trained = _iterate(
            spec, player, learner, state, run_dir, iteration
        )
        metrics |= trained | _pool_metrics(events, player.pool.metrics)
        writer.write(iteration, metrics)
        if _save_due(spec, iteration + 1):
          checkpoints.save(iteration + 1, state, counters)
      events = player.pool.metrics
      metrics = _evaluate(
          spec, player, learner.policy(state), run_dir, spec.iterations
      )
      metrics |= _pool_metrics(events, player.pool.metrics)
      writer.write(spec.iterations, metrics)
    checkpoints.close()


def _evaluation_due(spec: spec_lib.Experiment, iteration: int) -> bool:
  evaluation = spec.evaluation
  if iteration == 0:
    return evaluation.before_training
  return bool(evaluation.every and iteration % evaluation.every == 0)


def _save_due(spec: spec_lib.Experiment, done: int) -> bool:
  return done == spec.iterations or done % spec.save_every == 0


def _iterate(
    spec: spec_lib.Experiment,
    player: runtime_lib.Player,
    learner: runtime_lib.Learner,
    state: train_state.TrainState,
    run_dir: pathlib.Path,
    iteration: int,
) -> tuple[train_state.TrainState, types.Metrics]:
  """Plays one round of episodes and learns from them."""
  start = time.monotonic()
  played, synced = _play(spec, player, learner, state, iteration)
  collected = time.monotonic()
  player.pool.prefetch(_upcoming(spec, iteration + 1))
  every = spec.save_rollouts_every
  if every and iteration % every == 0:
    name = trajectories_io.file_name(iteration)
    trajectories_io.save(
        run_dir / 'rollouts' / name, played.every, player.tokenizer.decode
    )
  state, learned = learn_lib.learn(
      spec, player, learner, state, played.kept, iteration
  )
  metrics = {
      **rollout_metrics.rollout_metrics(played.every),
      **played.metrics,
      **synced,
      **learned,
      # Depends on when the process started, as times do.
      'time/sampler_compilations': float(player.sampler.compilations),
      'time/rollout_s': collected - start,
      'time/learn_s': time.monotonic() - collected,
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


def _play(
    spec: spec_lib.Experiment,
    player: runtime_lib.Player,
    learner: runtime_lib.Learner,
    state: train_state.TrainState,
    iteration: int,
) -> tuple[resample.Played, types.Metrics]:
  """Episodes of the state's policy; the sampler's weights end with this."""
  start = time.monotonic()
  weights, synced = learner.sync(learner.policy(state))
  synced['time/sync_s'] = time.monotonic() - start
  tasks = _tasks(spec, iteration)
  played = resample.play(spec, player.collector, weights, tasks, iteration)
  return played, synced


def _upcoming(spec: spec_lib.Experiment, iteration: int) -> list[types.Task]:
  """The tasks that are played first from `iteration` on."""
  if iteration < spec.iterations and not _evaluation_due(spec, iteration):
    return _tasks(spec, iteration)
  tasks = spec.env.split(spec.evaluation.split)
  count = min(spec.evaluation.games or len(tasks), spec.episodes)
  return [tasks[index] for index in range(count)]


def _tasks(spec: spec_lib.Experiment, iteration: int) -> list[types.Task]:
  return task_order.choose(
      spec.env.split(spec.split),
      spec.tasks_per_iteration,
      spec.seed,
      iteration,
  )


def _pool_metrics(before: types.Metrics, now: types.Metrics) -> types.Metrics:
  """Events of this iteration alone: a resumed run counts from 0 again."""
  return {
      name: value if name.startswith('memory/') else value - before.get(name, 0)
      for name, value in now.items()
  }


def _evaluate(
    spec: spec_lib.Experiment,
    player: runtime_lib.Player,
    params: models.Params,
    run_dir: pathlib.Path,
    iteration: int,
) -> types.Metrics:
  start = time.monotonic()
  split = spec.env.split(spec.evaluation.split)
  result = evaluate_lib.evaluate(
      spec.evaluation, split, player.collector, params
  )
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
  return {**result.metrics(), 'time/evaluate_s': time.monotonic() - start}
