"""Whether a training fits the memory of the devices that are there."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

from absl import logging
import jax

from hgpo_jax import config
from hgpo_jax import sharding
from hgpo_jax.experiment import spec as spec_lib
from hgpo_jax.models import base as models
from hgpo_jax.models import hf
from hgpo_jax.planning import advice
from hgpo_jax.planning import devices as devices_lib
from hgpo_jax.planning import memory
from hgpo_jax.planning import report
from hgpo_jax.planning import workload

# Temporary memory is known to about this fraction.
_DOUBT = 0.15
_GB = 1e9


def largest(
    spec: spec_lib.Experiment,
    model: models.ModelConfig,
    mesh: tuple[int, int, int],
) -> workload.Workload:
  """What an experiment asks for if every step is as long as is allowed."""
  batches, sampler, there = spec.minibatches, spec.sampler, spec.rollout_mesh
  return workload.Workload(
      model=model,
      mesh=mesh,
      rollout_mesh=there and sharding.rollout_shape(mesh, there),
      compute_dtype=spec.policy.compute_dtype,
      attention=spec.policy.attention,
      remat=spec.policy.remat,
      keep_attention=spec.policy.keep_attention,
      mlp_parts=spec.policy.mlp_parts,
      lora=spec.lora,
      reference=bool(spec.loss.kl_coef),
      moment_dtype=spec.optimizer.first_moment_dtype,
      moments_on=spec.optimizer.moments_on,
      rows=batches.micro_batch_steps,
      length=batches.length_buckets[-1],
      response=batches.response_buckets[-1],
      logits_tokens=batches.logits_tokens,
      minibatch_steps=batches.minibatch_steps,
      epochs=batches.epochs,
      episodes=spec.episodes,
      steps=spec.env.max_steps,
      prompt=sampler.prompt_buckets[-1],
      new_tokens=sampler.max_new_tokens,
      sampler_rows=sampler.row_buckets[-1],
      prefill_tokens=sampler.prefill_tokens[-1],
      prefill_block=sampler.prefill_block,
      int8_rollout=spec.policy.int8_rollout,
      ahead=bool(spec.rollout_lag),
  )


def smallest(
    spec: spec_lib.Experiment,
    model: models.ModelConfig,
    mesh: tuple[int, int, int],
) -> workload.Workload:
  """What it asks for whatever happens: the first bucket of each list."""
  batches, sampler = spec.minibatches, spec.sampler
  return dataclasses.replace(
      largest(spec, model, mesh),
      length=batches.length_buckets[0],
      response=batches.response_buckets[0],
      prompt=sampler.prompt_buckets[0],
      prefill_tokens=sampler.prefill_tokens[0],
  )


def check(
    spec: spec_lib.Experiment, devices: Sequence[jax.Device] | None = None
) -> str:
  """One line on the memory of each device; before any weight is read.

  Warns if the longest steps that are allowed need more than is sure to be
  there.

  Args:
    spec: a checked experiment.
    devices: that it runs on; all that there are by default.

  Raises:
    ConfigError: not even the shortest steps fit.
  """
  devices = list(jax.devices() if devices is None else devices)
  model = hf.read_config(spec.policy.path)
  mesh, platform = spec.mesh.shape(len(devices)), devices[0].platform
  most = largest(spec, model, mesh)
  phase, need = memory.largest(memory.need(most, platform))
  line = (
      f'memory       at most {need.total / _GB:.2f} GB a device, in {phase!r}'
  )
  limit = devices_lib.memory_present(devices)
  if limit is None:
    return f'{line}; how much {devices[0].device_kind!r} has is not known'
  _refuse(smallest(spec, model, mesh), limit, devices)
  if need.total > advice.USABLE * limit:
    logging.warning(
        'steps of %d prompt tokens need %.1f GB a device in %r, which has'
        ' %.1f GB:\n%s',
        most.prompt,
        need.total / _GB,
        phase,
        limit / _GB,
        '\n'.join(report.knobs(most, limit, platform)),
    )
  return f'{line}, of {limit / _GB:.1f}'


def _refuse(
    least: workload.Workload, limit: float, devices: Sequence[jax.Device]
) -> None:
  platform = devices[0].platform
  needs = memory.need(least, platform)
  sure = {
      name: need.resident + (1 - _DOUBT) * need.temporary
      for name, need in needs.items()
  }
  phase = max(sure, key=sure.get)
  if sure[phase] <= limit:
    return
  parts = sorted(needs[phase].parts.items(), key=lambda item: -item[1])
  listed = ', '.join(f'{name} {size / _GB:.1f}' for name, size in parts)
  raise config.ConfigError(
      f'the training cannot fit: even with the shortest rows {phase!r} needs'
      f' {sure[phase] / _GB:.1f} GB on each of {len(devices)} devices, which'
      f' have {limit / _GB:.1f} GB ({devices[0].device_kind}). In GB: {listed}.'
      ' What helps:\n' + '\n'.join(report.knobs(least, limit, platform))
  )
