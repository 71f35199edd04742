"""Decoding and updates of one accelerator, against what it can do.

  python -m benchmarks.gpu
  python -m benchmarks.gpu --tiny     # A model of nothing, on the CPU.

measures the card first: bytes a second of a copy, FLOP/s of a large matrix
product in bfloat16. Then, for each shape with random weights: bytes a second
that decoding reads (weights and cache, once a token), and FLOP/s of a pass with
its gradient and of the optimizer's step. A pass's FLOP/s count the model's work
only: forwards once and twice that backwards; what is computed again to save
memory counts as time.

A model is not begun once `--minutes` are over, so that the whole ends in time.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import json
import pathlib
import time
from typing import Any

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import compiled
from benchmarks import decoding
from hgpo_jax import types
from hgpo_jax import whole_file
from hgpo_jax.learner import arrays
from hgpo_jax.learner import optimizer as optimizer_lib
from hgpo_jax.learner import train_state
from hgpo_jax.learner import update as update_lib
from hgpo_jax.losses import ppo
from hgpo_jax.models import configs
from hgpo_jax.planning import devices
from hgpo_jax.planning import memory
from hgpo_jax.planning import roofline
from hgpo_jax.planning import workload


@dataclasses.dataclass(frozen=True)
class Size:
  """What is run.

  Attributes:
    models: names of shapes.
    copy_bytes: of the array that is copied.
    matrix: rows and columns of the matrices that are multiplied.
    sampled: rows, prompt tokens and new tokens of a batch that is sampled.
    trained: rows, tokens and scored tokens of a pass.
    dtype: of activations.
  """

  models: tuple[str, ...]
  copy_bytes: int
  matrix: int
  sampled: tuple[int, int, int]
  trained: tuple[int, int, int]
  dtype: str


REAL = Size(
    models=('0.5b', '1.5b', '3b'),
    copy_bytes=2**31,
    matrix=8192,
    sampled=(64, 768, 128),
    trained=(8, 1024, 256),
    dtype='bfloat16',
)
TINY = Size(
    models=('tiny',),
    copy_bytes=2**26,
    matrix=512,
    sampled=(4, 48, 8),
    trained=(4, 64, 16),
    dtype='float32',
)


def copy_rate(size: int) -> float:
  """Bytes a second, read and written, of a pass over a large array."""
  x = jnp.zeros(size // 4, jnp.float32)
  return 2 * size / decoding.seconds(lambda: _add_one(x))


def matmul_rate(n: int) -> float:
  """FLOP/s of a square matrix product in bfloat16."""
  x = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
  return 2 * n**3 / decoding.seconds(lambda: _multiply(x))


_add_one = jax.jit(lambda x: x + 1)
_multiply = jax.jit(lambda x: x @ x)


def work_of(name: str, size: Size) -> workload.Workload:
  """What the plan would be asked about the same."""
  rows, length, response = size.trained
  batch, prompt, new = size.sampled
  return workload.Workload(
      model=configs.CONFIGS[name],
      mesh=(1, 1, 1),
      compute_dtype=size.dtype,
      reference=False,
      rows=rows,
      length=length,
      response=response,
      prompt=prompt,
      new_tokens=new,
      sampler_rows=batch,
      episodes=batch,
  )


def updating(work: workload.Workload, limit: float) -> dict[str, float]:
  """Model FLOP/s of a pass, and seconds of the optimizer's step if it fits."""
  model = compiled.model_of(work)
  params = jax.jit(model.init)(jax.random.key(0))
  optimizer, loss = optimizer_lib.AdamW(), ppo.PPOLoss(kl_coef=0.0)
  needs = memory.need(work, jax.default_backend())
  fits = needs['step'].total < limit and needs['gradient'].total < limit
  batch = arrays.put(_batch(work), None)
  counted = jax.jit(loss.denominators)(
      batch.rollout.action_mask_BR, batch.rollout.row_weight_B
  )
  update = update_lib.Update(
      *(model, optimizer, loss),
      temperature=1.0,
      chunk_tokens=work.logits_tokens,
  )
  state = train_state.TrainState(params, None, jnp.zeros((), jnp.int32))
  if fits:
    state = train_state.create(params, optimizer.make())
    del params
  programs = update.programs(state, batch, counted)
  start = time.perf_counter()
  sums = programs.add(state.params, programs.zeros(), None, batch, counted)
  jax.block_until_ready(sums)
  first, box = time.perf_counter() - start, [sums]
  del sums  # A pass eats the sums that it adds to.

  def one_pass():
    box[0] = programs.add(state.params, box[0], None, batch, counted)
    return box[0]

  took = decoding.seconds(one_pass)
  tokens = work.rows * work.length
  flops = roofline.forward_flops(work, tokens, work.length)
  flops += roofline.head_flops(work, work.rows * work.response)
  found = {
      'pass_s': took,
      'train_tokens_s': tokens / took,
      'flops': 3 * flops / took,
      'compile_s': first - took,
  }
  if fits:
    held = [state]
    del state

    def one_step():
      held[0], metrics = programs.apply(held[0], *box[0])
      return metrics

    found['step_s'] = decoding.seconds(one_step)
  return found


def _batch(work: workload.Workload) -> types.PolicyBatch:
  """Random tokens; the last of each row are the response."""
  rows, length, response = work.rows, work.length, work.response
  rng = np.random.default_rng(0)
  whole, scored = (rows, length), (rows, response)
  rollout = types.RolloutBatch(
      tokens_BT=rng.integers(0, work.model.vocab_size, whole, np.int32),
      positions_BT=np.broadcast_to(np.arange(length, dtype=np.int32), whole),
      segment_ids_BT=np.ones(whole, np.int32),
      target_BR=np.broadcast_to(
          np.arange(length - response, length, dtype=np.int32), scored
      ),
      action_mask_BR=np.ones(scored, bool),
      step_BR=np.broadcast_to(np.arange(rows, dtype=np.int32)[:, None], scored),
      sampler_logprobs_BR=np.zeros(scored, np.float32),
      row_weight_B=np.ones(rows, np.float32),
  )
  advantage_BR = rng.normal(size=scored).astype(np.float32)
  old_BR = np.full(scored, -np.log(work.model.vocab_size), np.float32)
  return types.PolicyBatch(rollout, advantage_BR, old_BR)


def _table(found: dict[str, Any]) -> str:
  copy, product = found['copy_bytes_s'], found['matmul_flops']
  lines = [
      f'{found["device"]}: copy {copy / 1e9:,.3g} GB/s, matrix product'
      f' {product / 1e12:,.3g} TFLOP/s' + found['published'],
      f'{"model":6}{"token ms":>10}{"tokens/s":>10}{"GB/s":>8}{"of copy":>9}'
      f'{"pass s":>9}{"tokens/s":>10}{"TFLOP/s":>9}{"of product":>12}'
      f'{"step s":>8}{"compile s":>11}',
  ]
  for name, row in found['models'].items():
    made, learnt = row['decoding'], row['updating']
    step = f'{learnt["step_s"]:8.3f}' if 'step_s' in learnt else f'{"-":>8}'
    lines.append(
        f'{name:6}{made["token_ms"]:10.2f}{made["tokens_s"]:10,.0f}'
        f'{made["bytes_s"] / 1e9:8,.0f}{made["bytes_s"] / copy:9.0%}'
        f'{learnt["pass_s"]:9.3f}{learnt["train_tokens_s"]:10,.0f}'
        f'{learnt["flops"] / 1e12:9.3g}{learnt["flops"] / product:12.0%}'
        f'{step}{made["compile_s"] + learnt["compile_s"]:11.0f}'
    )
  return '\n'.join(lines)


def measure(size: Size, minutes: float) -> dict[str, Any]:
  """Everything; models that are not reached in time are left out."""
  start, device = time.monotonic(), jax.devices()[0]
  known = devices.of_kind(device.device_kind)
  limit = devices.memory_present(jax.devices()[:1]) or float('inf')
  found = {
      'device': device.device_kind,
      'published': f' (published: {known.bandwidth_gbs:,.0f} and'
      f' {known.teraflops:,.0f})'
      if known
      else '',
      'copy_bytes_s': copy_rate(size.copy_bytes),
      'matmul_flops': matmul_rate(size.matrix),
      'models': {},
  }
  for name in size.models:
    if time.monotonic() - start > 60 * minutes:
      print(
          f'{name} and what follows is left out: {minutes:g} minutes are over'
      )
      break
    work = work_of(name, size)
    found['models'][name] = {
        'decoding': decoding.measure(work),
        'updating': updating(work, 0.95 * limit),
    }
    print(f'{name} after {time.monotonic() - start:.0f} s', flush=True)
  return found


def main(argv: Sequence[str]) -> None:
  del argv
  if flags.FLAGS.out:
    whole_file.check(flags.FLAGS.out, '--out')
  found = measure(TINY if flags.FLAGS.tiny else REAL, flags.FLAGS.minutes)
  print(_table(found))
  if flags.FLAGS.out:
    pathlib.Path(flags.FLAGS.out).write_text(json.dumps(found, indent=1) + '\n')


def define_flags() -> None:
  """Not at import: other programs have flags of these names."""
  flags.DEFINE_bool('tiny', False, 'A tiny model in float32, for any machine.')
  flags.DEFINE_float(
      'minutes', 4.0, 'Begin no model after so many.', lower_bound=0
  )
  flags.DEFINE_string('out', '', 'JSON file to write the numbers to.')


if __name__ == '__main__':
  define_flags()
  app.run(main)
