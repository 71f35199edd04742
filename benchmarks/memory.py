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
import json
import os
import subprocess
import sys
import time
from typing import Any

from absl import app
from absl import flags

from benchmarks import compiled
from hgpo_jax.models import configs
from hgpo_jax.planning import memory
from hgpo_jax.planning import rollout_memory
from hgpo_jax.planning import workload

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
  """One row of the second table: 16 rows of 1024 + 128 tokens a share."""
  work = work_of(name, mesh, layers)
  work = dataclasses.replace(
      work, prompt=1024, new_tokens=128, sampler_rows=16 * work.shares
  )
  planned = {
      k: sum(v.values()) for k, v in rollout_memory.moments(work).items()
  }
  # An argument that a program leaves unused is none of its own, and prefill
  # leaves many: what lies there anyway is counted by decode, which needs all.
  used = compiled.rollout_bytes(work)
  there = used['decode'] - used['decode temporary']
  fullest = max(used['prefill temporary'], used['decode temporary'])
  sync = compiled.sync_bytes(work)
  return {
      'compiled': there + fullest,
      'planned': max(planned['prefill'], planned['decode']),
      'sync compiled': sync['made'] + sync['temporary'],
      'sync planned': planned['sync'],
  }


def measure(name: str, mesh: Sequence[int], layers: int) -> dict[str, Any]:
  """One row of the table; needs as many devices as the mesh has."""
  work, start = work_of(name, mesh, layers), time.process_time()
  alone = {}
  if mesh == (1, 1, 1):
    alone['gradient_alone'] = compiled.gradient_alone_bytes(work)
  return alone | {
      'compiled': compiled.update_bytes(work),
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
    used, planned = row['compiled'][part], row['planned'][part]
    cells += f'{used / 1e9:{width}.2f}{planned / 1e9:8.2f}'
    cells += f'{planned / used:7.2f}'
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
  print(
      '\nmodel  layers  data,fsdp,tensor  rollout GB    plan  ratio'
      '     sync GB    plan  ratio'
  )
  for name, mesh, layers in SAMPLED:
    if flags.FLAGS.model and name != flags.FLAGS.model:
      continue
    row = _child(name, mesh, layers, rollout=True)
    cells = ''
    for what in ('', 'sync '):
      used, planned = row[f'{what}compiled'], row[f'{what}planned']
      cells += f'{used / 1e9:12.2f}{planned / 1e9:8.2f}{planned / used:7.2f}'
    print(
        f'{name:6}{layers:7}{",".join(map(str, mesh)):>18}{cells}', flush=True
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
