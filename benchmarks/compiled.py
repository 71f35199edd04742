"""Bytes that compiled programs need, from shapes alone: nothing is allocated.

XLA's buffer assignment for CPU, read by `memory_analysis()`; for as many devices
as the mesh has, which may be virtual ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax import sharding
from hgpo_jax import types
from hgpo_jax.learner import optimizer as optimizer_lib
from hgpo_jax.learner import train_state
from hgpo_jax.learner import update as update_lib
from hgpo_jax.losses import ppo
from hgpo_jax.models import base
from hgpo_jax.models import qwen2
from hgpo_jax.planning import workload
from hgpo_jax.rollout import programs
from hgpo_jax.rollout import requests

# Machine code is made without optimizations, which buffers do not depend on.
_QUICKLY = {
    'xla_backend_optimization_level': 0,
    'xla_llvm_disable_expensive_passes': True,
}
_STEPS = 8  # Of a chunk of decoding; buffers hardly depend on it.


def model_of(work: workload.Workload) -> qwen2.Qwen2:
  """The model as a workload says that it computes."""
  return qwen2.Qwen2(
      work.model,
      remat=work.remat,
      compute_dtype=work.compute_dtype,
      keep_attention=work.keep_attention,
      mlp_parts=work.mlp_parts,
      int8_rollout=work.int8_rollout,
  )


def state_shapes(
    model: qwen2.Qwen2, mesh: jax.sharding.Mesh
) -> train_state.TrainState:
  """Shapes, dtypes and places of the state that `train_state.create` makes."""
  where = sharding.param_shardings(mesh, model.logical_axes())
  params = jax.eval_shape(model.init, jax.random.key(0))
  placed = jax.tree.map(_placed, params, where)
  transform = optimizer_lib.AdamW().make()
  init = lambda p: train_state.TrainState(
      p, transform.init(p), jnp.zeros((), jnp.int32)
  )
  treedef = jax.tree.structure(params)
  mirrors = lambda x: jax.tree.structure(x) == treedef
  whole = jax.sharding.NamedSharding(mesh, sharding.spec(()))
  return jax.tree.map(
      lambda x: jax.tree.map(_placed, x, where)
      if mirrors(x)
      else _placed(x, whole),
      jax.eval_shape(init, placed),
      is_leaf=mirrors,
  )


def _placed(x: Any, where: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def batch_shapes(
    work: workload.Workload, mesh: jax.sharding.Mesh
) -> types.PolicyBatch:
  """Shapes and places of a micro-batch with a reference policy."""
  rows = work.rows * work.shares
  place = sharding.batch_sharding(mesh)
  of = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
  whole, scored = (rows, work.length), (rows, work.response)
  rollout = types.RolloutBatch(
      tokens_BT=of(whole, jnp.int32),
      positions_BT=of(whole, jnp.int32),
      segment_ids_BT=of(whole, jnp.int32),
      target_BR=of(scored, jnp.int32),
      action_mask_BR=of(scored, bool),
      step_BR=of(scored, jnp.int32),
      sampler_logprobs_BR=of(scored, jnp.float32),
      row_weight_B=of((rows,), jnp.float32),
  )
  per_token = of(scored, jnp.float32)
  return types.PolicyBatch(rollout, per_token, per_token, per_token)


def gradient_alone_bytes(work: workload.Workload) -> int:
  """Temporary bytes of loss and gradient on one device, nothing added up.

  The gradient is what comes out, so it is no temporary.
  """
  mesh = sharding.Mesh(1, 1, 1).make_mesh(jax.devices()[:1])
  model = model_of(work)
  params = state_shapes(model, mesh).params
  batch, loss = batch_shapes(work, mesh), ppo.PPOLoss()
  counted = jax.eval_shape(
      loss.denominators,
      batch.rollout.action_mask_BR,
      batch.rollout.row_weight_B,
  )
  share = functools.partial(
      update_lib.micro_batch_loss,
      *(model, loss, 1.0),
      chunk_tokens=work.logits_tokens,
  )
  step = jax.jit(jax.value_and_grad(share, has_aux=True))
  compiled = step.lower(params, batch, counted).compile(
      compiler_options=_QUICKLY
  )
  return compiled.memory_analysis().temp_size_in_bytes


def update_bytes(work: workload.Workload) -> dict[str, float]:
  """Bytes of a device: arguments and temporaries of both programs."""
  shape = work.mesh
  mesh = sharding.Mesh(*shape).make_mesh(
      jax.devices()[: shape[0] * shape[1] * shape[2]]
  )
  model = model_of(work)
  state, batch = state_shapes(model, mesh), batch_shapes(work, mesh)
  loss = ppo.PPOLoss()
  counted = jax.eval_shape(
      loss.denominators,
      batch.rollout.action_mask_BR,
      batch.rollout.row_weight_B,
  )
  update = update_lib.Update(
      model,
      optimizer_lib.AdamW(),
      loss,
      temperature=1.0,
      mesh=mesh,
      chunk_tokens=work.logits_tokens * work.shares,
  )
  with jax.set_mesh(mesh):
    programs = update.programs(state, batch, counted)
    grads, metrics = jax.eval_shape(programs.zeros)
    where = jax.tree.map(lambda x: x.sharding, state.params)
    sums = jax.tree.map(_placed, grads, where), metrics
    add = programs.add.lower(state.params, sums, None, batch, counted)
    step = programs.apply.lower(state, *sums)
    return _used({'gradient': add, 'step': step})


def _used(lowered: Mapping[str, jax.stages.Lowered]) -> dict[str, float]:
  """Bytes of each program, arguments included, and of its temporaries."""
  found = {}
  for name, program in lowered.items():
    used = program.compile(compiler_options=_QUICKLY).memory_analysis()
    found[name] = used.argument_size_in_bytes + used.temp_size_in_bytes
    found[f'{name} temporary'] = used.temp_size_in_bytes
  return found


def sync_bytes(work: workload.Workload) -> int:
  """Bytes that laying weights out makes, and needs meanwhile, on a device."""
  lowered, _ = _lay_out(work)
  used = lowered.compile(compiler_options=_QUICKLY).memory_analysis()
  return used.output_size_in_bytes + used.temp_size_in_bytes


def _lay_out(work: workload.Workload) -> tuple[jax.stages.Lowered, base.Params]:
  """The program as `rollout.compiled` makes it, and what it makes."""
  count = work.mesh[0] * work.mesh[1] * work.mesh[2]
  learner = sharding.Mesh(*work.mesh).make_mesh(jax.devices()[:count])
  mesh = sharding.rollout_mesh(learner, sharding.Mesh(*work.sampled_on))
  model = model_of(work)
  where = sharding.param_shardings(mesh, model.decode_axes())
  state = state_shapes(model, learner).params
  made = jax.eval_shape(model.decode_params, state)
  lay_out = jax.jit(model.decode_params, out_shardings=where)
  return lay_out.lower(state), jax.tree.map(_placed, made, where)


def rollout_bytes(work: workload.Workload) -> dict[str, float]:
  """Bytes of a device: arguments and temporaries of the sampler's programs.

  Each uses up the cache that it is given: the one that it returns is no more.
  """
  _, params = _lay_out(work)
  mesh = params['embed']['embedding'].sharding.mesh
  with jax.set_mesh(mesh):
    return _used(sampler_programs(model_of(work), work, params))


def sampler_programs(
    model: qwen2.Qwen2, work: workload.Workload, params: base.Params
) -> dict[str, jax.stages.Lowered]:
  """'prefill' and 'decode' as `rollout.compiled` makes them, at their largest.

  Args:
    model: functions of the model.
    work: what is asked for.
    params: shapes of the weights that are decoded with, and their places.
  """
  cache = _outputs(lambda: model.init_cache(work.sampler_rows, work.entries))
  count, of = work.prefill_blocks, jax.ShapeDtypeStruct
  tokens_NC = of((count, work.prefill_block), jnp.int32)
  which_N = of((count,), jnp.int32)
  prefill = functools.partial(programs.prefill, model)
  rows = requests.empty_rows(work.sampler_rows)
  decode = functools.partial(
      programs.decode, model, stop_ids=np.asarray([0], np.int32), steps=_STEPS
  )
  lower = lambda function, *args: jax.jit(function, donate_argnums=1).lower(
      params, cache, *args
  )
  return {
      'prefill': lower(prefill, tokens_NC, which_N, which_N),
      'decode': lower(decode, rows),
  }


def _outputs(function: Callable[..., Any], *args: Any) -> Any:
  """Shapes of what a function returns, where the compiler puts it."""
  compiled = jax.jit(function).lower(*args).compile(compiler_options=_QUICKLY)
  shapes = jax.eval_shape(function, *args)
  return jax.tree.map(_placed, shapes, compiled.output_shardings)
