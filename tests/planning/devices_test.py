"""The table of devices, and names of slices."""

from __future__ import annotations

import types

import jax
import pytest

from hgpo_jax.planning import devices


@pytest.mark.parametrize(
    ('text', 'name', 'chips'),
    [
        ('v5e-64', 'v5e', 64),
        ('v6e-16', 'v6e', 16),
        ('v5p-8', 'v5p', 4),  # These two count cores, two a chip.
        ('v4-32', 'v4', 16),
        ('h100x8', 'h100', 8),
        ('H200', 'h200', 1),
        ('a100-40gb', 'a100-40gb', 1),
        ('a100-40gbx4', 'a100-40gb', 4),
    ],
)
def test_names_of_slices(text, name, chips):
  found = devices.Slice.parse(text)
  assert (found.device.name, found.chips) == (name, chips)


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('b300x8', "'b300x8' is no device that is known; expected one of v4,"),
        ('v5p-7', 'counts cores, 2 a chip; expected a multiple of 2'),
        ('h100x0', 'expected a multiple of 1'),
    ],
)
def test_other_names_are_refused(text, message):
  with pytest.raises(ValueError, match=message):
    devices.Slice.parse(text)


@pytest.mark.parametrize(
    ('kind', 'name'),
    [
        ('TPU v4', 'v4'),
        ('TPU v5 lite', 'v5e'),
        ('TPU v5', 'v5p'),
        ('TPU v5p', 'v5p'),
        ('TPU v6 lite', 'v6e'),
        ('NVIDIA H100 80GB HBM3', 'h100'),
        ('NVIDIA H200', 'h200'),
        ('NVIDIA A100-SXM4-80GB', 'a100'),
        ('NVIDIA A100-SXM4-40GB', 'a100-40gb'),
        ('cpu', None),
    ],
)
def test_what_jax_calls_them(kind, name):
  found = devices.of_kind(kind)
  assert (found.name if found else None) == name


def _device(platform='tpu', kind='TPU v5 lite', stats=None):
  return types.SimpleNamespace(
      platform=platform,
      device_kind=kind,
      process_index=0,
      memory_stats=lambda: stats,
  )


def test_the_runtime_knows_best_how_much_memory_there_is():
  assert devices.memory_present([_device(stats={'bytes_limit': 7e9})]) == 7e9
  assert devices.memory_present([_device()]) == 16e9
  assert devices.memory_present([_device(kind='TPU v99')]) is None
  whole = devices.memory_present(jax.devices('cpu')[:1])
  shared = devices.memory_present([_device('cpu', 'cpu')] * 8)
  assert whole == 8 * shared > 1e8
