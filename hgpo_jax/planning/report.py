"""The plan of a workload as a short table, for people."""

from __future__ import annotations

from collections.abc import Mapping

from hgpo_jax import sharding
from hgpo_jax.planning import advice
from hgpo_jax.planning import devices
from hgpo_jax.planning import memory
from hgpo_jax.planning import roofline
from hgpo_jax.planning import search
from hgpo_jax.planning import workload

_GB = 1e9


def text(
    work: workload.Workload,
    slice_: devices.Slice,
    efficiency: roofline.Efficiency = roofline.ASSUMED,
) -> str:
  """The whole plan: memory by part and phase, seconds, what to turn."""
  device = slice_.device
  platform, limit = device.platform, device.memory_bytes
  needs, times = memory.need(work, platform), roofline.seconds
  return '\n'.join(
      [
          *_what(work, slice_),
          '',
          *table(needs),
          '',
          *_verdict(work, needs, limit, platform),
          '',
          *_times(times(work, device, efficiency), work, efficiency),
          *_faster(work, slice_, efficiency),
      ]
  )


def _what(work: workload.Workload, slice_: devices.Slice) -> list[str]:
  own, trained = work.parameters(), work.trained()
  device = slice_.device
  trains = (
      'all trained'
      if work.lora is None
      else f'adapters of {trained.whole / 1e6:.1f} M trained'
  )
  return [
      f'model     {own.whole / 1e9:.2f} G parameters, {trains}, computed in'
      f' {work.compute_dtype}',
      f'devices   {slice_.chips} x {device.name}, each {device.memory_gb:g} GB,'
      f' {device.teraflops:g} TFLOP/s, {device.bandwidth_gbs:g} GB/s',
      f'mesh      {_mesh(work.mesh)}{_sampled_on(work)}',
      f'iteration {work.episodes} episodes of at most {work.steps} steps,'
      f' {work.prompt} + {work.new_tokens} tokens each',
      f'a pass    {work.rows} rows of {work.length} tokens on each of'
      f' {work.shares} shares, {work.response} of them scored',
  ]


def _mesh(shape: tuple[int, int, int], between: str = ' ') -> str:
  named = zip(sharding.MESH_AXES, shape)
  return between.join(f'{axis}={size}' for axis, size in named)


def _sampled_on(work: workload.Workload) -> str:
  if work.sampled_on == work.mesh:
    return ''
  return f', sampling on {_mesh(work.sampled_on)}'


def table(needs: Mapping[str, memory.Need]) -> list[str]:
  """Gigabytes of one device: a line a part, a column a phase."""
  names = list(dict.fromkeys(n for need in needs.values() for n in need.parts))
  head = ''.join(f'{phase:>10}' for phase in needs)
  lines = [f'{"GB a device":<20}{head}']
  for name in names:
    sizes = (need.parts.get(name) for need in needs.values())
    cells = (f'{s / _GB:10.2f}' if s else f'{"":10}' for s in sizes)
    lines.append(f'{name:<20}{"".join(cells)}'.rstrip())
  totals = ''.join(f'{need.total / _GB:10.2f}' for need in needs.values())
  return [*lines, f'{"sum":<20}{totals}']


def _verdict(
    work: workload.Workload,
    needs: Mapping[str, memory.Need],
    limit: float,
    platform: str,
) -> list[str]:
  phase, need = memory.largest(needs)
  used = need.total / limit
  fits = 'fits' if used <= advice.USABLE else 'is near the limit'
  fits = fits if used <= 1 else 'DOES NOT FIT'
  lines = [
      f'memory    {need.total / _GB:.1f} of {limit / _GB:.0f} GB in'
      f' {phase!r}: {fits}'
  ]
  most = advice.rows(work, limit, platform)
  if most:
    lines.append(
        f'rows      up to Minibatches.micro_batch_steps = {most} at this length'
    )
  else:
    lines.append('rows      not even one row a pass fits')
  return lines + knobs(work, limit, platform)


def knobs(work: workload.Workload, limit: float, platform: str) -> list[str]:
  """What to turn, a line each; none where it fits."""
  found = advice.turns(work, limit, platform)
  lines = [
      f'turn      {turn.knob}  -> {turn.peak / _GB:.1f} GB' for turn in found
  ]
  left = found[-1].peak if found else advice.peak(work, platform)
  if left > advice.USABLE * limit:
    lines.append('turn      more or larger devices; nothing else is enough')
  return lines


def _times(
    seconds: roofline.Seconds,
    work: workload.Workload,
    efficiency: roofline.Efficiency,
) -> list[str]:
  phases = {
      'sync': seconds.sync,
      'prefill': seconds.prefill,
      'decode': seconds.decode,
      'score': seconds.score,
      'update': seconds.update,
      'sum': seconds.total,
  }
  head = ''.join(f'{name:>10}' for name in phases)
  cells = ''.join(f'{value:10.1f}' for value in phases.values())
  return [
      f'{"seconds":<10}{head}',
      f'{"":10}{cells}',
      f'sampling  {seconds.decode_steps:,} steps of {work.sampler_rows} rows,'
      f' kernels in {"int8" if work.int8_rollout else work.compute_dtype};'
      f' {seconds.prefill_calls:,} calls of {work.prefill_tokens} prompt',
      '          tokens at most: no prompt finds its beginning in the cache',
      f'tokens/s  {seconds.tokens_per_second:,.0f} (at most'
      f' {seconds.tokens / 1e6:.1f} M tokens an iteration)',
      f'assumed   {efficiency.compute:.0%} of peak FLOP/s,'
      f' {efficiency.bandwidth:.0%} of bandwidth; environments, host and'
      ' compilation not included',
  ]


def _faster(
    work: workload.Workload,
    slice_: devices.Slice,
    efficiency: roofline.Efficiency,
) -> list[str]:
  """Other meshes of the same devices, if they are faster by a twentieth."""
  now = roofline.seconds(work, slice_.device, efficiency).tokens_per_second
  found = search.fastest(work, slice_, efficiency)
  if found is None:
    return []
  rate = roofline.seconds(found, slice_.device, efficiency).tokens_per_second
  if rate < 1.05 * now:
    return []
  return [
      f'faster    --mesh={_mesh(found.mesh, ",")}'
      f' --rollout_mesh={_mesh(found.sampled_on, ",")}: {rate:,.0f} tokens/s'
  ]
