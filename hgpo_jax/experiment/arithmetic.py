"""The arithmetic of a run, checked and printed before anything heavy starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import math
import os
from typing import Any

import jax

from hgpo_jax import sharding
from hgpo_jax.envs import base as envs
from hgpo_jax.experiment import spec as spec_lib


def check(spec: spec_lib.Experiment) -> str:
  """Checks everything that can be checked without weights or environments.

  Returns the arithmetic of the batch, for people.

  Raises:
    ValueError, FileNotFoundError, ImportError, KeyError: naming the knob.
  """
  *_, (model, tokenizer) = _results(
      spec.env.check, spec.workers.check, spec.logging.check, spec.policy.check
  )
  train = _split(spec.env, 'Experiment.split', spec.split)
  heldout = _split(spec.env, 'Evaluation.split', spec.evaluation.split)
  _check_split(spec, len(train), len(heldout))
  spec.sampler.bind(model, tokenizer.stop_ids)
  spec.collector.check(spec.sampler)
  shape = spec.mesh.shape(_devices())
  shares = shape[0] * shape[1]
  mesh = spec.mesh.make_mesh()
  sharding.check_divides(mesh, model.axis_sizes())
  spec.minibatches.check(
      shares, spec.collector.max_prompt_tokens, spec.sampler.max_new_tokens
  )
  _check_rollout(spec, mesh, model.axis_sizes())
  return _describe(spec, len(train), len(heldout), shape)


def _results(*checks: Callable[[], Any]) -> list[Any]:
  """What independent checks return; what is wrong with several is one error.

  On a new machine games and weights are both missing, as a rule.
  """
  results, errors = [], []
  for check_part in checks:
    try:
      results.append(check_part())
    except (ValueError, OSError, ImportError) as error:
      errors.append(error)
  if len(errors) > 1:
    raise ValueError('\n       '.join(map(str, errors)))
  if errors:
    raise errors[0]
  return results


def _devices() -> int:
  try:
    return jax.device_count()
  except (RuntimeError, AssertionError) as error:  # Of jax, which has none.
    reason = str(error).split('\n')[0] or 'its platform cannot be used here'
    raise ValueError(
        f'jax has no devices ({reason}); JAX_PLATFORMS is'
        f' {os.environ.get("JAX_PLATFORMS", "")!r}, expected a platform that'
        " is installed here, such as 'cpu', or none"
    ) from error


def _split(env: envs.EnvSpec, knob: str, name: str) -> envs.Split:
  try:
    split = env.split(name)
  except KeyError as error:
    raise ValueError(f'{knob}: {error.args[0]}') from error
  if not len(split):
    raise ValueError(
        f'{knob} is {name!r}, a split of 0 tasks; expected at least one: make'
        ' the split larger, or name another'
    )
  return split


def _check_split(spec: spec_lib.Experiment, train: int, heldout: int) -> None:
  if spec.tasks_per_iteration > train:
    raise ValueError(
        f'Experiment.tasks_per_iteration is {spec.tasks_per_iteration}, but'
        f' the split {spec.split!r} has {train} tasks'
    )
  if spec.resample_rounds and spec.tasks_per_iteration == train:
    raise ValueError(
        f'Experiment.resample_rounds is {spec.resample_rounds}, but an'
        f' iteration plays all {train} tasks of the split {spec.split!r}; set'
        ' it to 0, or Experiment.tasks_per_iteration to fewer'
    )
  if spec.evaluation.games > heldout:
    raise ValueError(
        f'Evaluation.games is {spec.evaluation.games}, but the split'
        f' {spec.evaluation.split!r} has {heldout} tasks'
    )
  if spec.evaluation.split == spec.split:
    raise ValueError(
        f'Evaluation.split and Experiment.split are both {spec.split!r};'
        ' evaluate on tasks that no training uses'
    )


def _check_rollout(
    spec: spec_lib.Experiment,
    mesh: jax.sharding.Mesh,
    sizes: Mapping[str, int],
) -> None:
  """Of the mesh of sampling: whether it divides the model and the rows."""
  name = (spec.rollout_mesh or spec.mesh).name
  there = sharding.rollout_mesh(mesh, spec.rollout_mesh)
  sharding.check_divides(there, sizes, name)
  shares = sharding.ways(there, 'batch')
  for rows in spec.sampler.row_buckets:
    if rows % shares:
      raise ValueError(
          f'Sampler.row_buckets has {rows}, which the {shares} data-parallel'
          f' shares of the mesh ({name}.data x {name}.fsdp) do not divide; use'
          f' multiples of {shares}'
      )


def _games(spec: spec_lib.Experiment, games: int) -> str:
  draws = spec.evaluation.draws
  return f'{draws} draws of {games} games' if draws else f'{games} games'


def _resampling(spec: spec_lib.Experiment) -> list[str]:
  if not spec.resample_rounds:
    return []
  episodes = spec.episodes * (1 + spec.resample_rounds)
  return [
      f'resampling   at most {spec.resample_rounds} more rounds for groups that'
      f' ended alike = at most {episodes} episodes'
  ]


def _ahead(spec: spec_lib.Experiment) -> list[str]:
  if not spec.rollout_lag:
    return []
  # All but those behind the start and behind a checkpoint.
  kept = spec.iterations - math.ceil(spec.iterations / spec.save_every)
  return [
      f'ahead        {kept} of {spec.iterations} iterations are played while'
      ' the one before is learned from, by the policy before that'
  ]


def _trained(spec: spec_lib.Experiment) -> str:
  if spec.lora is None:
    return 'all weights'
  return (
      f'adapters of rank {spec.lora.rank} on {", ".join(spec.lora.projections)}'
  )


def _axes(shape: tuple[int, int, int]) -> str:
  named = zip(sharding.MESH_AXES, shape)
  return ' '.join(f'{axis}={size}' for axis, size in named)


def _sampling(spec: spec_lib.Experiment, shape: tuple[int, int, int]) -> str:
  there = sharding.rollout_shape(shape, spec.rollout_mesh)
  said = '' if there == shape else f', sampling on {_axes(there)}'
  return said + (', weights gathered in every step' if there[1] > 1 else '')


def _describe(
    spec: spec_lib.Experiment,
    train: int,
    heldout: int,
    shape: tuple[int, int, int],
) -> str:
  steps = spec.episodes * spec.env.max_steps
  batches = spec.minibatches
  games = spec.evaluation.games or heldout
  rows = batches.micro_batch_rows(shape[0] * shape[1])
  longest = spec.collector.max_prompt_tokens + spec.sampler.max_new_tokens
  per_row = 'one step' if batches.packing == 'none' else 'whole steps'
  lines = [
      f'policy       {spec.policy.folder}, trained: {_trained(spec)}',
      f'estimator    {spec.estimator}',
      f'tasks        {train} in {spec.split!r}, {heldout} in'
      f' {spec.evaluation.split!r}',
      f'iteration    {spec.tasks_per_iteration} tasks x {spec.group_size}'
      f' members = {spec.episodes} episodes of at most'
      f' {spec.env.max_steps} steps = at most {steps} steps',
      *_resampling(spec),
      *_ahead(spec),
      f'tokens       at most {spec.collector.max_prompt_tokens} prompt +'
      f' {spec.sampler.max_new_tokens} response = {longest} a step',
      f'sampling     at temperature {spec.temperature:g}',
      f'updates      {batches.minibatch_steps} steps each: at most'
      f' {batches.count(steps)} x {batches.epochs} epochs ='
      f' {batches.count(steps) * batches.epochs} an iteration, in passes of'
      f' {rows} rows, {per_row} each',
      f'learning     rate {spec.optimizer.learning_rate:g},'
      f' {spec.optimizer.schedule}',
      f'mesh         {_axes(shape)}{_sampling(spec, shape)}',
      f'evaluation   {_games(spec, games)} x {len(spec.evaluation.seeds)} seeds at'
      f' temperature {spec.evaluation.temperature:g}',
      f'run          {spec.iterations} iterations, seed {spec.seed}, a checkpoint'
      f' every {spec.save_every}',
  ]
  return '\n'.join(lines)
