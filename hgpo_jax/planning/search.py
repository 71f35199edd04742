"""The meshes on which a workload that fits is fastest."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import math

from hgpo_jax.planning import advice
from hgpo_jax.planning import devices
from hgpo_jax.planning import roofline
from hgpo_jax.planning import workload


def fastest(
    work: workload.Workload,
    slice_: devices.Slice,
    efficiency: roofline.Efficiency = roofline.ASSUMED,
) -> workload.Workload | None:
  """The workload on the meshes with most tokens a second; None: none fits.

  Of sampling, those that keep weights whole but for a tensor axis.
  """
  device, best, most = slice_.device, None, 0.0
  for made in _tried(work, slice_.chips):
    rate = roofline.seconds(made, device, efficiency).tokens_per_second
    # Times are cheaper than bytes.
    if rate <= most:
      continue
    needed = advice.peak(made, device.platform)
    if needed <= advice.USABLE * device.memory_bytes:
      best, most = made, rate
  return best


def _tried(work: workload.Workload, chips: int) -> Iterator[workload.Workload]:
  shapes = list(_shapes(chips))
  for mesh in shapes:
    for sampled_on in (shape for shape in shapes if shape[1] == 1):
      made = dataclasses.replace(work, mesh=mesh, rollout_mesh=sampled_on)
      shares = made.sampler_shares
      rows = math.ceil(work.sampler_rows / shares) * shares
      made = dataclasses.replace(made, sampler_rows=rows)
      try:
        made.check()
      except ValueError:
        continue
      yield made


def _shapes(chips: int) -> Iterator[tuple[int, int, int]]:
  """All ways to arrange so many devices."""
  divisors = [n for n in range(1, chips + 1) if not chips % n]
  for tensor in divisors:
    for fsdp in divisors:
      if not (chips // tensor) % fsdp:
        yield chips // tensor // fsdp, fsdp, tensor
