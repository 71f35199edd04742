"""The live parts of a run, made from its spec in the order that is safe."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
from typing import Any

from absl import logging
import jax

from hgpo_jax import config
from hgpo_jax import sharding
from hgpo_jax.envs import pool as pool_lib
from hgpo_jax.envs import ray_pool
from hgpo_jax.experiment import spec as spec_lib
from hgpo_jax.experiment import sync as sync_lib
from hgpo_jax.io import checkpoint
from hgpo_jax.learner import scorer as scorer_lib
from hgpo_jax.learner import train_state
from hgpo_jax.learner import update as update_lib
from hgpo_jax.models import base as models
from hgpo_jax.models import lora
from hgpo_jax.models import qwen2
from hgpo_jax.rollout import collector as collector_lib
from hgpo_jax.rollout import sampler as sampler_lib
from hgpo_jax.rollout import tokenizer as tokenizer_lib


@dataclasses.dataclass(frozen=True)
class Player:
  """What evaluation needs: a policy's functions, and games to play.

  Attributes:
    model: functions of the model.
    tokenizer: of the policy's folder.
    mesh: the mesh that the learner computes on.
    pool: environments.
    sampler: samples responses, on its own mesh of the same devices.
    collector: plays episodes.
  """

  model: qwen2.Qwen2
  tokenizer: tokenizer_lib.ChatTokenizer
  mesh: jax.sharding.Mesh
  pool: pool_lib.EnvPool | ray_pool.RayPool
  sampler: sampler_lib.BoundSampler
  collector: collector_lib.BoundCollector

  def put(self, params: models.Params) -> models.Params:
    """Places host parameters on the mesh."""
    axes = self.model.logical_axes()
    return sharding.put(params, sharding.param_shardings(self.mesh, axes))


@dataclasses.dataclass(frozen=True)
class Learner:
  """What training needs besides.

  Attributes:
    scorer: log-probs of the trainer, at the training temperature.
    update: one optimizer update from one minibatch.
    sync: hands the policy's weights to the sampler.
    reference: parameters that the KL is taken to; None without a KL.
    state: where training starts.
    frozen: what the parameters of a state are an adapter to; None where they
      are the whole policy.
  """

  scorer: scorer_lib.Scorer
  update: update_lib.Update
  sync: sync_lib.Sync
  reference: models.Params | None
  state: train_state.TrainState
  frozen: lora.Frozen | None = None

  @property
  def rests_on(self) -> models.Params | None:
    """Weights of the policy's folder that training goes on using."""
    return self.frozen.params if self.frozen else self.reference

  def policy(self, state: train_state.TrainState) -> models.Params:
    """Parameters of the policy, an adapter attached to its base."""
    return self.frozen.attach(state.params) if self.frozen else state.params


@contextlib.contextmanager
def starting() -> Iterator[None]:
  """A value refused before the first step is a mistake in what was given."""
  try:
    yield
  except ValueError as error:
    raise config.ConfigError(str(error)) from error


def counters(spec: spec_lib.Experiment, learner: Learner) -> dict[str, Any]:
  """What a checkpoint keeps beside the state."""
  found = {'seed': spec.seed}
  if learner.rests_on is not None:
    found['rests_on'] = checkpoint.digest(learner.rests_on)
  return found


def check_start(
    spec: spec_lib.Experiment,
    restored: checkpoint.Restored[train_state.TrainState],
    start: models.Params | None,
) -> None:
  """Refuses a checkpoint whose adapter, or KL, belongs to other weights."""
  was = restored.counters.get('rests_on')
  if start is None or was is None:
    return
  now = checkpoint.digest(start)
  if was != now:
    raise config.ConfigError(
        f'the weights in PolicySource.folder = {spec.policy.folder!r} (digest'
        f' {now}) are not those that the run began with ({was}), which its'
        ' adapter or its KL refers to; name the folder with those, or give'
        ' another --run_dir'
    )


@contextlib.contextmanager
def open_player(spec: spec_lib.Experiment) -> Iterator[Player]:
  """Starts environments, then the model; stops the environments at the end."""
  with starting():
    model, tokenizer = spec.policy.check()
    spec.policy.check_weights()
    spec.sampler.bind(model, tokenizer.stop_ids)  # Refused here if at all.
  logging.info('starting %d environment processes', spec.workers.processes)
  with spec.workers.open(spec.env, spec.episodes) as pool:
    with starting():
      mesh = spec.mesh.make_mesh()
      rollout = sharding.rollout_mesh(mesh, spec.rollout_mesh)
      sampler = spec.sampler.bind(model, tokenizer.stop_ids, rollout)
      collector = spec.collector.bind(pool, tokenizer, sampler)
    with jax.set_mesh(mesh):
      yield Player(model, tokenizer, mesh, pool, sampler, collector)


def make_state(
    spec: spec_lib.Experiment, model: qwen2.Qwen2, mesh: jax.sharding.Mesh
) -> tuple[models.Params, lora.Frozen | None, train_state.TrainState]:
  """(the policy's weights, what is frozen of them, where training starts)."""
  logging.info('loading weights from %s', spec.policy.path)
  with starting():
    weights = spec.policy.load(model)
  axes, adapter = model.logical_axes(), spec.lora
  if adapter is not None:
    weights = jax.tree.map(lambda x: x.astype(adapter.base_dtype), weights)
  start = sharding.put(weights, sharding.param_shardings(mesh, axes))
  trained, frozen = start, None
  if adapter is not None:
    where = sharding.param_shardings(mesh, adapter.logical_axes(axes))
    init = lambda key: adapter.init(weights, key)
    trained = jax.jit(init, out_shardings=where)(jax.random.key(spec.seed))
    frozen = lora.Frozen(adapter, start)
  count = lambda tree: sum(x.size for x in jax.tree.leaves(tree)) / 1e6
  what = 'all of them trained'
  if frozen is not None:
    what = f'frozen; {count(trained):.1f} M of adapters are trained'
  logging.info('policy of %.1f M parameters, %s', count(start), what)
  with starting():
    state = train_state.create(
        trained, spec.optimizer.make(), spec.optimizer.moments_on
    )
  return start, frozen, state


def make_learner(spec: spec_lib.Experiment, player: Player) -> Learner:
  """Loads the policy's weights and makes the training functions."""
  model, mesh = player.model, player.mesh
  start, frozen, state = make_state(spec, model, mesh)
  chunk = spec.minibatches.logits_tokens * sharding.ways(mesh, 'batch')
  update = update_lib.Update(
      model,
      spec.optimizer,
      spec.loss,
      temperature=spec.temperature,
      mesh=mesh,
      frozen=frozen,
      chunk_tokens=chunk,
  )
  scorer = scorer_lib.Scorer(model, spec.temperature, mesh, chunk)
  sync = sync_lib.Sync(spec.sync_probe, model, player.sampler, mesh)
  reference = start if spec.loss.kl_coef else None
  return Learner(scorer, update, sync, reference, state, frozen)
