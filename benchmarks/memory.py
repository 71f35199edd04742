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
from hgpo_jax.planning import rollout
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
# Likewise, the sizes of the sampler's mesh, layers and whether in int8. Its
# programs write layers out, so a few stand for all.
SAMPLED = (
    ('1.5b', (1, 8, 1), (8, 1, 1), 2, False),
    ('1.5b', (1, 8, 1), (8, 1, 1), 4, False),
    ('1.5b', (1, 8, 1), (8, 1, 1), 4, True),
    ('1.5b', (1, 8, 1), (4, 1, 2), 2, False),
    ('1.5b', (1, 8, 1), (1, 4, 2), 2, False),
    ('7b', (1, 2, 4), (2, 1, 4), 2, False),
    ('7b', (1, 2, 4), (2, 1, 4), 2, True),
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
    name: str,
    mesh: Sequence[int],
    layers: int,
    sampled_on: Sequence[int] = (),
    int8: bool = False,
) -> dict[str, Any]:
  """One row of the second table: 16 rows of 1024 + 128 tokens a share."""
  work = work_of(name, mesh, layers)
  work = dataclasses.replace(
      work,
      prompt=1024,
      new_tokens=128,
      rollout_mesh=tuple(sampled_on) or None,
      int8_rollout=int8,
  )
  work = dataclasses.replace(work, sampler_rows=16 * work.sampler_shares)
  # An argument that a program leaves unused is none of its own, and prefill
  # leaves many: what lies there anyway is counted by decode, which needs all.
  used = compiled.rollout_bytes(work)
  there = used['decode'] - used['decode temporary']
  fullest = max(used['prefill temporary'], used['decode temporary'])
  return {
      'compiled': there + fullest,
      'planned': sum(rollout.sampling(work, 'cpu').values()),
      'sync compiled': compiled.sync_bytes(work),
      'sync planned': sum(rollout.laying_out(work, 'cpu').values()),
  }


def measure(name: str, mesh: Sequence[int], layers: int) -> dict[str, Any]:
  """One row of the table; needs as many devices as the mesh has."""
  work, start = work_of(name, mesh, layers), time.process_time()
  alone = {}
  if mesh == (1, 1, 1):
    alone['gradient_alone'] = compiled.gradient_alone_bytes(
        dataclasses.replace(work, keep_attention=False)
    )
  return alone | {
      'compiled': compiled.update_bytes(work),
      'planned': planned_bytes(work),
      'cpu_s': time.process_time() - start,
  }


def _child(mesh: Sequence[int], *arguments: str) -> dict[str, Any]:
  """A row that is measured with as many devices as the mesh has."""
  count = mesh[0] * mesh[1] * mesh[2]
  env = os.environ | {
      'XLA_FLAGS': f'--xla_force_host_platform_device_count={count}',
      'JAX_PLATFORMS': 'cpu',
  }
  command = [sys.executable, '-m', 'benchmarks.memory', *arguments]
  command += [f'--mesh={",".join(map(str, mesh))}']
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
  values = flags.FLAGS
  if values.mesh:
    mesh = tuple(map(int, values.mesh.split(',')))
    given = values.model, mesh
    if values.rollout:
      sampled_on = tuple(map(int, values.rollout.split(',')))
      row = measure_rollout(*given, values.layers, sampled_on, values.int8)
    else:
      row = measure(*given, values.layers)
    print(json.dumps(row))
    return
  _print_updates()
  _print_rollouts()


def _wanted(name: str) -> bool:
  return flags.FLAGS.model in ('', name)


def _print_updates() -> None:
  print(_HEAD, flush=True)
  for name, mesh in CASES:
    if not _wanted(name):
      continue
    layers = flags.FLAGS.layers
    row = _child(mesh, f'--model={name}', f'--layers={layers}')
    print(_line(name, mesh, row), flush=True)
    if 'gradient_alone' in row:
      work = work_of(name, mesh)
      print(
          f'       loss and gradient alone, {work.rows} x {work.length}, all'
          f' scored: {row["gradient_alone"] / 1e9:.2f} GB temporary'
      )


def _print_rollouts() -> None:
  """Of sampling, and of what lays weights out for it."""
  show = lambda row, what: (
      f'{row[f"{what}compiled"] / 1e9:10.2f}{row[f"{what}planned"] / 1e9:8.2f}'
      f'{row[f"{what}planned"] / row[f"{what}compiled"]:7.2f}'
  )
  text = lambda shape: ','.join(map(str, shape))
  print(
      f'\n{"model":6}{"learner":>9}{"sampler":>9}{"layers":>8}{"int8":>6}'
      f'{"GB":>10}{"plan":>8}{"ratio":>7}{"sync GB":>10}{"plan":>8}{"ratio":>7}'
  )
  for name, mesh, sampled_on, layers, int8 in SAMPLED:
    if not _wanted(name):
      continue
    row = _child(
        mesh,
        *(f'--model={name}', f'--layers={layers}', f'--int8={int8}'),
        f'--rollout={text(sampled_on)}',
    )
    print(
        f'{name:6}{text(mesh):>9}{text(sampled_on):>9}{layers:8}{int8!s:>6}'
        f'{show(row, "")}{show(row, "sync ")}',
        flush=True,
    )


def define_flags() -> None:
  flags.DEFINE_string('model', '', 'Only this model.')
  flags.DEFINE_string('mesh', '', 'Only this mesh, in this process, as JSON.')
  flags.DEFINE_integer(
      'layers', 0, 'Compile so many layers; 0 for all.', lower_bound=0
  )
  flags.DEFINE_string('rollout', '', 'With --mesh: the sampler on this mesh.')
  flags.DEFINE_bool('int8', False, "The sampler's kernels are in int8.")
  flags.DEFINE_bool('verbose', False, 'Show what the compiler says.')


if __name__ == '__main__':
  define_flags()
  app.run(main)
