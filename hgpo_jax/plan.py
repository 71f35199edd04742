"""Memory and seconds of a training on devices that need not be there.

  python -m hgpo_jax.plan --model=1.5b --devices=v5e-64 --mesh=fsdp=64 \\
      --rollout_mesh=tensor=2 --int8_rollout
  python -m hgpo_jax.plan --gin_file=runs/alfworld_hgpo_qwen2p5_1p5b.gin \\
      --gin_bindings="OfficialGames.folder = 'later'" \\
      --model=1.5b --devices=h100x8

With --gin_file the lengths, rows and knobs are those of the run (its games need
a name, but are not looked at); without, those of the flags. --model is a name of
`models/configs.py` or a Hugging Face folder; a run whose policy folder is there
needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import pathlib
import re
import sys
from typing import TYPE_CHECKING

from absl import app
from absl import flags

from hgpo_jax import entry

if TYPE_CHECKING:  # They import jax, which --help does not need.
  from hgpo_jax.models import base
  from hgpo_jax.planning import devices
  from hgpo_jax.planning import workload

flags.adopt_module_key_flags(entry)
_MODEL = flags.DEFINE_string(
    'model', None, '0.5b, 1.5b, 3b, 7b, 14b, tiny, or a folder.'
)
_DEVICES = flags.DEFINE_string(
    'devices', None, 'Such as v5e-64, v5p-8, v6e-16, a100x8, h100x8, h200.'
)
_TPU = flags.DEFINE_string('tpu', None, 'The same as --devices.')
_GPU = flags.DEFINE_string('gpu', None, 'The same as --devices.')
_MESH = flags.DEFINE_string(
    'mesh', '', 'Such as data=1,fsdp=16,tensor=4; one of them may be -1.'
)
_DTYPE = flags.DEFINE_enum(
    'dtype', 'bfloat16', ['float32', 'bfloat16'], 'Of activations.'
)
_ROWS = flags.DEFINE_integer('rows', 1, 'Rows of a pass on each share.')
_PROMPT = flags.DEFINE_integer('prompt', 2048, 'Tokens of a prompt.')
_RESPONSE = flags.DEFINE_integer('response', 512, 'Tokens of a response.')
_EPISODES = flags.DEFINE_integer('episodes', 128, 'Of an iteration.')
_STEPS = flags.DEFINE_integer('steps', 50, 'Of an episode.')
_ROLLOUT_MESH = flags.DEFINE_string(
    'rollout_mesh', '', 'Likewise, of sampling; --mesh with fsdp made data.'
)
_SAMPLED = flags.DEFINE_integer(
    'sampler_rows', 0, 'Responses sampled side by side; 0: all episodes.'
)
_PREFILL = flags.DEFINE_integer(
    'prefill_tokens', 8192, 'Prompt tokens that one call computes.'
)
_BLOCK = flags.DEFINE_integer(
    'prefill_block', 128, 'Of them, computed as one block of a prompt.'
)
_INT8 = flags.DEFINE_bool(
    'int8_rollout', False, 'Sample with kernels of layers in int8.'
)
_LORA = flags.DEFINE_integer('lora_rank', 0, 'Train adapters of this rank.')
_REFERENCE = flags.DEFINE_bool('reference', True, 'A KL to a reference policy.')
# What a run has knobs for.
_ALONE = (
    _DTYPE,
    _ROWS,
    _PROMPT,
    _RESPONSE,
    _EPISODES,
    _STEPS,
    _SAMPLED,
    _PREFILL,
    _BLOCK,
    _INT8,
    _LORA,
    _REFERENCE,
)
_COMPUTE = flags.DEFINE_float('mfu', 0.4, 'Fraction of peak FLOP/s assumed.')
_BANDWIDTH = flags.DEFINE_float(
    'bandwidth', 0.6, 'Fraction of memory bandwidth assumed.'
)


def main(argv: Sequence[str]) -> None:
  entry.refuse_arguments(argv)
  from hgpo_jax.planning import devices
  from hgpo_jax.planning import report
  from hgpo_jax.planning import roofline

  named = [flag.value for flag in (_DEVICES, _TPU, _GPU) if flag.value]
  try:
    if len(named) != 1:
      raise ValueError(
          f'--devices (or --tpu, --gpu) is given {len(named)} times; expected'
          ' once, such as --devices=v5e-64 or --devices=h100x8'
      )
    slice_ = devices.Slice.parse(named[0])
    work = _workload(slice_)
    work.check()
    efficiency = roofline.Efficiency(_COMPUTE.value, _BANDWIDTH.value)
    print(report.text(work, slice_, efficiency))
  except (ValueError, OSError) as error:
    sys.exit(f'error: {error}')


def _workload(slice_: devices.Slice) -> workload.Workload:
  """Of the run that --gin_file names, else of the flags."""
  from hgpo_jax import sharding
  from hgpo_jax.models import lora
  from hgpo_jax.planning import workload

  if flags.FLAGS.gin_file:
    _refuse_flags_of_no_run()
    return _configured(slice_)
  if flags.FLAGS.gin_bindings:
    raise ValueError('--gin_bindings needs the --gin_file that it changes')
  if not _MODEL.value:
    raise ValueError('--model or --gin_file is required, such as --model=1.5b')
  mesh = sharding.Mesh(**axes(_MESH.value)).shape(slice_.chips)
  sampled_on = _rollout_shape(mesh)
  shares, rows = sampled_on[0] * sampled_on[1], _SAMPLED.value
  rows = rows or _EPISODES.value
  return workload.Workload(
      model=_model(_MODEL.value),
      mesh=mesh,
      compute_dtype=_DTYPE.value,
      lora=lora.LoRA(_LORA.value, base_dtype='bfloat16')
      if _LORA.value
      else None,
      reference=_REFERENCE.value,
      rows=_ROWS.value,
      length=_PROMPT.value + _RESPONSE.value,
      response=_RESPONSE.value,
      episodes=_EPISODES.value,
      steps=_STEPS.value,
      prompt=_PROMPT.value,
      new_tokens=_RESPONSE.value,
      sampler_rows=-(-rows // shares) * shares,
      prefill_tokens=_PREFILL.value,
      prefill_block=_BLOCK.value,
      int8_rollout=_INT8.value,
      rollout_mesh=sampled_on,
  )


def _refuse_flags_of_no_run() -> None:
  """A flag that the run's own value would silently win over."""
  given = [
      f'--{flag.name}' for flag in _ALONE if flags.FLAGS[flag.name].present
  ]
  if given:
    raise ValueError(
        f'{", ".join(given)}: with --gin_file that is the run\'s own; bind its'
        ' knob with --gin_bindings instead'
    )


def _rollout_shape(mesh: tuple[int, int, int]) -> tuple[int, int, int]:
  """Sizes of the mesh that is sampled on."""
  from hgpo_jax import sharding

  spec = None
  if _ROLLOUT_MESH.value:
    spec = sharding.RolloutMesh(**axes(_ROLLOUT_MESH.value, 'data'))
  return sharding.rollout_shape(mesh, spec)


def _configured(slice_: devices.Slice) -> workload.Workload:
  from hgpo_jax import config
  from hgpo_jax import sharding
  from hgpo_jax.experiment import footprint
  from hgpo_jax.experiment import spec as spec_lib

  bindings = list(flags.FLAGS.gin_bindings)
  if _MODEL.value:  # Stands for the run's own folder, which need not be there.
    bindings.append(f'PolicySource.folder = {_MODEL.value!r}')
  spec = config.load(flags.FLAGS.gin_file, bindings, root=spec_lib.Experiment)
  mesh = sharding.Mesh(**axes(_MESH.value)) if _MESH.value else spec.mesh
  model = _model(_MODEL.value or str(spec.policy.path))
  work = footprint.largest(spec, model, mesh.shape(slice_.chips))
  if _ROLLOUT_MESH.value:
    work = dataclasses.replace(work, rollout_mesh=_rollout_shape(work.mesh))
  return work


def _model(name: str) -> base.ModelConfig:
  from hgpo_jax.models import configs
  from hgpo_jax.models import hf

  if name in configs.CONFIGS:
    return configs.CONFIGS[name]
  if not pathlib.Path(name).is_dir():
    raise ValueError(
        f'{name!r} is neither a folder nor one of {", ".join(configs.CONFIGS)};'
        ' set --model'
    )
  return hf.read_config(name)


def axes(text: str, rest: str = 'fsdp') -> dict[str, int]:
  """{'fsdp': 16} of 'fsdp=16'; what is not named is 1, or `rest` the rest."""
  found = {}
  for part in filter(None, text.split(',')):
    match = re.fullmatch(r'(data|fsdp|tensor)=(-?[0-9]+)', part)
    if not match or match[1] in found:
      raise ValueError(
          f'{text!r}: {part!r} is not one of data=N, fsdp=N, tensor=N, each'
          ' once'
      )
    found[match[1]] = int(match[2])
  return {rest: 1, **found} if -1 in found.values() else found


if __name__ == '__main__':
  app.run(main)
