"""What an update needs by the compiler's account, beside what the plan says.

  python -m benchmarks.memory

compiles the two programs of an update (a pass with its gradient, and the
optimizer's step) for virtual CPU devices, from shapes alone: no weight is made.
XLA's buffer assignment says what each device would hold. It is compared with
`hgpo_jax.planning.memory`. Layers are scanned, so all of them are compiled, and
a deep model takes no longer than a shallow one.

The programs compute in float32, as CPU does bfloat16 by way of float32. Each
row is a process of its own, since the number of virtual devices is fixed when
jax starts.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import functools
import json
import os
import subprocess
import sys
import time
from typing import Any

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax import sharding
from hgpo_jax import types
from hgpo_jax.learner import optimizer as optimizer_lib
from hgpo_jax.learner import train_state
from hgpo_jax.learner import update as update_lib
from hgpo_jax.losses import ppo
from hgpo_jax.models import configs
from hgpo_jax.models import qwen2
from hgpo_jax.planning import memory
from hgpo_jax.planning import workload
from hgpo_jax.rollout import decode

# Model, and the sizes of data, fsdp and tensor.
CASES = (
    ('0.5b', (1, 1, 1)),
    *(
        (model, mesh)
        for model in ('1.5b', '3b', '7b')
        for mesh in (
            (1, 8, 1),
            (1, 4, 2),
            (1, 16, 1),
            (1, 8, 2),
            (1, 64, 1),
            (2, 16, 2),
        )
    ),
)
# The sampler's programs write layers out, so a few stand for all.
SAMPLED = (
    ('1.5b', (1, 8, 1), 2),
    ('1.5b', (1, 8, 1), 4),
    ('1.5b', (1, 4, 2), 2),
    ('1.5b', (8, 1, 1), 2),
)
# Machine code is made without optimizations, which buffers do not depend on.
_QUICKLY = {
    'xla_backend_optimization_level': 0,
    'xla_llvm_disable_expensive_passes': True,
}


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
  model = qwen2.Qwen2(work.model, work.remat, work.compute_dtype)
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


def compiled_bytes(work: workload.Workload) -> dict[str, float]:
  """Bytes of a device: arguments and temporaries of both programs."""
  shape = work.mesh
  mesh = sharding.Mesh(*shape).make_mesh(
      jax.devices()[: shape[0] * shape[1] * shape[2]]
  )
  model = qwen2.Qwen2(work.model, work.remat, work.compute_dtype)
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
    made = {'gradient': add, 'step': step}
    found = {}
    for name, lowered in made.items():
      used = lowered.compile(compiler_options=_QUICKLY).memory_analysis()
      found[name] = used.argument_size_in_bytes + used.temp_size_in_bytes
      found[f'{name} temporary'] = used.temp_size_in_bytes
  return found


def rollout_bytes(work: workload.Workload) -> dict[str, float]:
  """Bytes of a device: what the sampler's program holds, and by the plan."""
  data, fsdp, tensor = work.mesh
  mesh = sharding.Mesh(data, fsdp, tensor).make_mesh()
  model = qwen2.Qwen2(work.model, work.remat, work.compute_dtype)
  params = state_shapes(model, mesh).params
  rows, of = work.sampler_rows, jax.ShapeDtypeStruct
  batch = (
      of((rows, work.prompt), jnp.int32),
      of((rows,), jnp.int32),
      of((rows, 5), jnp.uint32),
      of((rows,), jnp.float32),
  )
  stop_ids = np.asarray([0], np.int32)
  sample = lambda params, *batch: decode.sample(
      *(model, params, *batch, stop_ids, work.new_tokens)
  )
  with jax.set_mesh(mesh):
    prepare = jax.jit(model.decode_params).lower(params)
    where = prepare.compile(compiler_options=_QUICKLY).output_shardings
    shapes = jax.eval_shape(model.decode_params, params)
    placed = jax.tree.map(_placed, shapes, where)
    lowered = jax.jit(sample).lower(placed, *batch)
    used = lowered.compile(compiler_options=_QUICKLY).memory_analysis()
  parts = memory.need(work, 'cpu')['rollout'].parts
  state = ('weights', 'moments', 'reference')
  return {
      'compiled': used.argument_size_in_bytes + used.temp_size_in_bytes,
      'planned': sum(s for part, s in parts.items() if part not in state),
  }


def planned_bytes(work: workload.Workload) -> dict[str, float]:
  """The same by the plan."""
  needs = memory.need(work, 'cpu')
  # Moments are no argument of a pass.
  without = {'gradient': ('moments', 'reference'), 'step': ('reference',)}
  found = {}
  for name, absent in without.items():
    parts = needs[name].parts
    found[name] = sum(s for part, s in parts.items() if part not in absent)
    found[f'{name} temporary'] = needs[name].temporary
  return found


def work_of(
    name: str, mesh: Sequence[int], layers: int = 0
) -> workload.Workload:
  """What is measured of a model: the published shape, or fewer layers."""
  model = configs.CONFIGS[name]
  if layers:
    model = dataclasses.replace(model, num_layers=layers)
  small = name == '0.5b'
  return workload.Workload(
      model=model,
      mesh=tuple(mesh),
      compute_dtype='float32',
      rows=32 if small else 1,
      length=320 if small else 2560,
      response=320 if small else 512,
  )


def measure_rollout(
    name: str, mesh: Sequence[int], layers: int
) -> dict[str, Any]:
  """One row of the second table: two rows of 1024 + 128 tokens a share."""
  work = work_of(name, mesh, layers)
  work = dataclasses.replace(
      work, prompt=1024, new_tokens=128, sampler_rows=2 * work.shares
  )
  return rollout_bytes(work)


def measure(name: str, mesh: Sequence[int], layers: int) -> dict[str, Any]:
  """One row of the table; needs as many devices as the mesh has."""
  work, start = work_of(name, mesh, layers), time.process_time()
  alone = {}
  if mesh == (1, 1, 1):
    alone['gradient_alone'] = gradient_alone_bytes(work)
  return alone | {
      'compiled': compiled_bytes(work),
      'planned': planned_bytes(work),
      'cpu_s': time.process_time() - start,
  }


def _child(
    name: str, mesh: Sequence[int], layers: int, rollout: bool = False
) -> dict[str, Any]:
  """A row that is measured with as many devices as the mesh has."""
  count = mesh[0] * mesh[1] * mesh[2]
  env = os.environ | {
      'XLA_FLAGS': f'--xla_force_host_platform_device_count={count}',
      'JAX_PLATFORMS': 'cpu',
  }
  command = [sys.executable, '-m', 'benchmarks.memory', f'--model={name}']
  command += [f'--mesh={",".join(map(str, mesh))}']
  command += [f'--layers={layers}', f'--rollout={rollout}']
  done = subprocess.run(
      command,
      env=env,
      check=True,
      stdout=subprocess.PIPE,
      text=True,
      stderr=None if flags.FLAGS.verbose else subprocess.DEVNULL,
  )
  return json.loads(done.stdout.splitlines()[-1])


_HEAD = (
    f'{"model":6}{"data,fsdp,tensor":>17}'
    f'{"gradient GB":>13}{"plan":>8}{"ratio":>7}'
    f'{"step GB":>10}{"plan":>8}{"ratio":>7}{"CPU s":>7}'
)


def _line(name: str, mesh: Sequence[int], row: dict[str, Any]) -> str:
  cells = ''
  for part, width in (('gradient', 13), ('step', 10)):
    compiled, planned = row['compiled'][part], row['planned'][part]
    cells += f'{compiled / 1e9:{width}.2f}{planned / 1e9:8.2f}'
    cells += f'{planned / compiled:7.2f}'
  shape = ','.join(map(str, mesh))
  return f'{name:6}{shape:>17}{cells}{row["cpu_s"]:7.0f}'


def main(argv: Sequence[str]) -> None:
  del argv
  if flags.FLAGS.mesh:
    mesh = tuple(map(int, flags.FLAGS.mesh.split(',')))
    row = measure_rollout if flags.FLAGS.rollout else measure
    print(json.dumps(row(flags.FLAGS.model, mesh, flags.FLAGS.layers)))
    return
  print(_HEAD, flush=True)
  for name, mesh in CASES:
    if flags.FLAGS.model and name != flags.FLAGS.model:
      continue
    row = _child(name, mesh, flags.FLAGS.layers)
    print(_line(name, mesh, row), flush=True)
    if 'gradient_alone' in row:
      work = work_of(name, mesh)
      print(
          f'       loss and gradient alone, {work.rows} x {work.length}, all'
          f' scored: {row["gradient_alone"] / 1e9:.2f} GB temporary'
      )
  print('\nmodel  layers  data,fsdp,tensor  rollout GB    plan  ratio')
  for name, mesh, layers in SAMPLED:
    if flags.FLAGS.model and name != flags.FLAGS.model:
      continue
    row = _child(name, mesh, layers, rollout=True)
    compiled, planned = row['compiled'], row['planned']
    shape = ','.join(map(str, mesh))
    print(
        f'{name:6}{layers:7}{shape:>18}{compiled / 1e9:12.2f}'
        f'{planned / 1e9:8.2f}{planned / compiled:7.2f}',
        flush=True,
    )


def _define_flags() -> None:
  flags.DEFINE_string('model', '', 'Only this model.')
  flags.DEFINE_string('mesh', '', 'Only this mesh, in this process, as JSON.')
  flags.DEFINE_integer('layers', 0, 'Compile so many layers; 0 for all.')
  flags.DEFINE_bool('rollout', False, 'With --mesh: the sampler instead.')
  flags.DEFINE_bool('verbose', False, 'Show what the compiler says.')


if __name__ == '__main__':
  _define_flags()
  app.run(main)
