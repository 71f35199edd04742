"""What accelerators can do, from their makers' pages, and slices of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import os
import re

import jax

_TPU = 'https://cloud.google.com/tpu/docs/'
_A100 = 'https://www.nvidia.com/en-us/data-center/a100/'
_H100 = 'https://www.nvidia.com/en-us/data-center/h100/'
_H200 = 'https://www.nvidia.com/en-us/data-center/h200/'


@dataclasses.dataclass(frozen=True)
class Device:
  """One chip (a jax device), as its maker describes it.

  Attributes:
    name: as in a slice: 'v5e' of 'v5e-64'.
    teraflops: dense bfloat16 matrix products, 1e12 operations a second.
    memory_gb: of the chip, 1e9 bytes.
    bandwidth_gbs: of that memory, 1e9 bytes a second.
    link_gbs: to other chips (ICI or NVLink), both directions together, 1e9
      bytes a second.
    source: the page that says so.
    cores: what a slice name counts for one chip: 'v5p-8' has 4 chips of two
      cores each.
    kinds: parts of `jax.Device.device_kind`, lower case, that tell it.
  """

  name: str
  teraflops: float
  memory_gb: float
  bandwidth_gbs: float
  link_gbs: float
  source: str
  cores: int = 1
  kinds: tuple[str, ...] = ()

  @property
  def platform(self) -> str:
    """As jax names it."""
    return 'gpu' if 'nvidia' in self.source else 'tpu'

  @property
  def memory_bytes(self) -> float:
    return self.memory_gb * 1e9


# SXM versions of the GPUs; FLOP/s without sparsity.
DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device('v4', 275, 32, 1200, 600, f'{_TPU}v4', 2, ('tpu v4',)),
        Device('v5e', 197, 16, 819, 400, f'{_TPU}v5e', 1, ('v5 lite', 'v5e')),
        Device('v5p', 459, 95, 2765, 1200, f'{_TPU}v5p', 2, ('tpu v5',)),
        Device('v6e', 918, 32, 1638, 800, f'{_TPU}v6e', 1, ('v6 lite', 'v6e')),
        Device(
            *('a100-40gb', 312, 40, 1555, 600, _A100),
            kinds=('a100-sxm4-40gb', 'a100-pcie-40gb'),
        ),
        Device('a100', 312, 80, 2039, 600, _A100, 1, ('a100',)),
        Device('h100', 989, 80, 3350, 900, _H100, 1, ('h100',)),
        Device('h200', 989, 141, 4800, 900, _H200, 1, ('h200',)),
    )
}


@dataclasses.dataclass(frozen=True)
class Slice:
  """So many equal chips, connected."""

  device: Device
  chips: int

  @classmethod
  def parse(cls, text: str) -> Slice:
    """'v5e-64', 'v5p-8' (4 chips), 'h100x8' or 'h200'.

    Raises:
      ValueError: no such device, or a count that it does not come in.
    """
    name, count = text.strip().lower(), None
    if name not in DEVICES:
      match = re.fullmatch(r'(.+?)(?:-|x)(\d+)', name)
      name, count = match.groups() if match else (name, None)
    device = DEVICES.get(name)
    if device is None:
      raise ValueError(
          f'{text!r} is no device that is known; expected one of'
          f' {", ".join(DEVICES)} with a count, as in v5e-64, v5p-8 or h100x8'
      )
    if count is None:
      return cls(device, 1)
    chips, rest = divmod(int(count), device.cores)
    if rest or chips < 1:
      raise ValueError(
          f'{text!r}: the number after {device.name} counts cores,'
          f' {device.cores} a chip; expected a multiple of {device.cores}'
      )
    return cls(device, chips)


def of_kind(kind: str) -> Device | None:
  """The device that jax calls so; None if it is not in the table."""
  kind = kind.lower()
  for device in DEVICES.values():
    if any(part in kind for part in device.kinds):
      return device
  return None


def memory_present(devices: Sequence[jax.Device]) -> float | None:
  """Bytes that one of these devices has; None where nobody knows.

  What the runtime was given counts first: a GPU's is a part of its memory
  (XLA_PYTHON_CLIENT_MEM_FRACTION, 0.75 unless set). Then the table. Devices
  of a CPU share the machine's memory.
  """
  first = devices[0]
  limit = (first.memory_stats() or {}).get('bytes_limit')
  if limit:
    return float(limit)
  if first.platform == 'cpu':
    local = sum(d.process_index == first.process_index for d in devices)
    return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / local
  device = of_kind(first.device_kind)
  return device.memory_bytes if device else None
