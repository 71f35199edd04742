"""Which knobs to turn so that a workload fits, and how far."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses

from hgpo_jax import sharding
from hgpo_jax.models import lora as lora_lib
from hgpo_jax.planning import memory
from hgpo_jax.planning import workload

# Of a device's memory; the rest is for what nobody counts: code, fragments,
# collectives.
USABLE = 0.9
_MOST_ROWS = 1024


@dataclasses.dataclass(frozen=True)
class Turn:
  """One knob turned.

  Attributes:
    knob: the binding, for people.
    work: the workload with it.
    peak: bytes that its fullest phase needs.
  """

  knob: str
  work: workload.Workload
  peak: float


def peak(work: workload.Workload, platform: str) -> float:
  """Bytes at the fullest moment of the fullest phase."""
  return memory.largest(memory.need(work, platform))[1].total


def rows(work: workload.Workload, limit: float, platform: str) -> int:
  """The most rows of a pass that fit, a power of 2; 0 if not even one does.

  Rows bound the passes of the learner only: 'score' and 'gradient'.
  """
  found, size = 0, 1
  while size <= _MOST_ROWS:
    needs = memory.need(dataclasses.replace(work, rows=size), platform)
    if max(needs[p].total for p in ('score', 'gradient')) > USABLE * limit:
      break
    found, size = size, 2 * size
  return found


def turns(
    work: workload.Workload, limit: float, platform: str
) -> tuple[Turn, ...]:
  """The knobs to turn, in order, until it fits; empty if it does.

  Knobs that change speed alone come before those that change the training.
  The last turn may still not fit: then nothing here helps.
  """
  found: list[Turn] = []
  now = peak(work, platform)
  for options in (_free, _slower, _paid):
    while now > USABLE * limit:
      made = [
          Turn(knob, other, peak(other, platform))
          for knob, other in options(work)
      ]
      best = min(made, key=lambda turn: turn.peak, default=None)
      if best is None or best.peak > 0.99 * now:
        break
      work, now = best.work, best.peak
      found.append(best)
  return _merged(found)


def _merged(found: list[Turn]) -> tuple[Turn, ...]:
  """Of turns of one knob in a row, the last."""
  name = lambda turn: turn.knob.split(' = ')[0]
  return tuple(
      turn
      for turn, after in zip(found, [*found[1:], None])
      if after is None or name(after) != name(turn)
  )


def _free(
    work: workload.Workload,
) -> Iterator[tuple[str, workload.Workload]]:
  """Options that leave what is learned as it is."""
  change = lambda **fields: dataclasses.replace(work, **fields)
  if work.rows > 1:
    half = work.rows // 2
    yield f'Minibatches.micro_batch_steps = {half}', change(rows=half)
  if work.logits_tokens > max(128, work.rows):
    half = work.logits_tokens // 2
    yield f'Minibatches.logits_tokens = {half}', change(logits_tokens=half)
  shares = work.sampler_shares
  if work.sampler_rows >= 2 * shares:
    half = work.sampler_rows // 2 // shares * shares
    knob = f'Sampler.row_buckets = (..., {half})'
    yield knob, change(sampler_rows=half)
  if not work.remat:
    yield 'PolicySource.remat = True', change(remat=True)
  yield from _meshes(work, 'mesh', 'Mesh')
  # One that follows the training mesh may get a shape of its own.
  own = change(rollout_mesh=work.sampled_on)
  yield from _meshes(own, 'rollout_mesh', 'RolloutMesh')


def _meshes(
    work: workload.Workload, field: str, owner: str
) -> Iterator[tuple[str, workload.Workload]]:
  """Meshes of as many devices that hold less of the parameters on each."""
  data, fsdp, tensor = getattr(work, field)
  tried = [(data // 2, fsdp * 2, tensor)] if data % 2 == 0 else []
  if fsdp % 2 == 0:
    tried.append((data, fsdp // 2, tensor * 2))
  if data % 2 == 0:
    tried.append((data // 2, fsdp, tensor * 2))
  for shape in tried:
    made = dataclasses.replace(work, **{field: shape})
    if made.sampler_rows < made.sampler_shares:
      made = dataclasses.replace(made, sampler_rows=made.sampler_shares)
    try:
      made.check()
    except ValueError:
      continue
    names = ', '.join(f'{owner}.{axis}' for axis in sharding.MESH_AXES)
    where = '' if owner == 'Mesh' else 'Experiment.rollout_mesh with '
    yield f'{where}{names} = {", ".join(map(str, shape))}', made


def _slower(
    work: workload.Workload,
) -> Iterator[tuple[str, workload.Workload]]:
  """Options that cost time in every update, and nothing else."""
  yield from _free(work)
  if work.moments_on == 'device':
    other = dataclasses.replace(work, moments_on='host')
    yield "AdamW.moments_on = 'host'", other


def _paid(
    work: workload.Workload,
) -> Iterator[tuple[str, workload.Workload]]:
  """Options that change the arithmetic or what is trained."""
  yield from _slower(work)
  change = lambda **fields: dataclasses.replace(work, **fields)
  if work.ahead:
    yield 'Experiment.rollout_lag = 0', change(ahead=False)
  if work.compute_dtype == 'float32':
    knob = "PolicySource.compute_dtype = 'bfloat16'"
    yield knob, change(compute_dtype='bfloat16')
  if not work.int8_rollout:
    yield 'PolicySource.int8_rollout = True', change(int8_rollout=True)
  if work.moment_dtype == 'float32':
    knob = "AdamW.first_moment_dtype = 'bfloat16'"
    yield knob, change(moment_dtype='bfloat16')
  if work.reference and work.lora is None:
    yield 'PPOLoss.kl_coef = 0.0', change(reference=False)
  if work.lora is None:
    adapter = lora_lib.LoRA(base_dtype='bfloat16')
    yield "include 'models/lora.gin'", change(lora=adapter)
