"""Times the sampler's programs on full rows, nothing around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import time
from typing import Any

import jax
import numpy as np

from benchmarks import compiled
from hgpo_jax.planning import workload
from hgpo_jax.rollout import compiled as compiled_lib
from hgpo_jax.rollout import programs as programs_lib
from hgpo_jax.rollout import requests


def seconds(call: Callable[[], Any], repeats: int = 3) -> float:
  """The least wall time of a call, after one that compiles."""
  jax.block_until_ready(call())
  found = []
  for _ in range(repeats):
    start = time.perf_counter()
    jax.block_until_ready(call())
    found.append(time.perf_counter() - start)
  return min(found)


def measure(work: workload.Workload) -> dict[str, float]:
  """Seconds of reading all prompts, bytes a second of decoding after them."""
  model = compiled.model_of(work)
  rows, prompt, new = work.sampler_rows, work.prompt, work.new_tokens
  count = work.prefill_tokens // work.prefill_block
  # No id stops a response: all are equally long.
  programs = compiled_lib.Compiled(
      *(model, (work.model.vocab_size,), new, (rows,), (work.entries,)),
      *((count,), work.prefill_block, (0, 0)),
  )
  params = programs.lay_out(jax.jit(model.init)(jax.random.key(0)))
  start = time.perf_counter()
  programs.warm_up(params)
  warm = time.perf_counter() - start
  cache, state = [programs.init_cache(work.entries)], _started(work)
  blocks = list(_blocks(work, count))

  def read_prompts():
    for block in blocks:
      cache[0] = programs.prefill(params, cache[0], *block)
    return cache[0]

  def write_responses():
    cache[0], chunk = programs.decode(params, cache[0], state)
    return chunk

  prefill, took = seconds(read_prompts), seconds(write_responses)
  weights = sum(x.nbytes for x in jax.tree.leaves(params))
  held = sum(x.nbytes for x in jax.tree.leaves(cache[0]))
  return {
      'prefill_s': prefill,
      'prompt_tokens_s': rows * prompt / prefill,
      'token_ms': 1e3 * took / new,
      'tokens_s': rows * new / took,
      # Rows attend to all entries, filled or not.
      'bytes_s': new * (weights + held) / took,
      'compile_s': warm,
  }


def _started(work: workload.Workload) -> programs_lib.Rows:
  """Rows that have all read a prompt and begin to write."""
  rows = requests.empty_rows(work.sampler_rows)
  rows.length_B[:] = work.prompt - 1
  rows.limit_B[:] = work.new_tokens
  rows.live_B[:] = True
  rows.key_B2[:, 0] = np.arange(work.sampler_rows)
  return rows


def _blocks(
    work: workload.Workload, count: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
  """Random prompts as prefill takes them, `count` blocks at a time."""
  rng, size = np.random.default_rng(0), work.prefill_block
  starts = range(0, work.prompt, size)
  places = [
      (start, row) for start in starts for row in range(work.sampler_rows)
  ]
  for i in range(0, len(places), count):
    some = places[i : i + count]
    some += some[-1:] * (count - len(some))
    start_N, row_N = np.asarray(some, np.int32).T
    tokens_NC = rng.integers(0, work.model.vocab_size, (count, size), np.int32)
    yield tokens_NC, start_N, row_N
