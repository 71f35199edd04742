"""torch's side of `benchmarks.update`, run by an environment that has torch.

  python update_torch.py WORK WAY

reads the weights, rows and settings in WORK and writes WORK/WAY.json. It knows
nothing of this project, only of the files.
"""

from __future__ import annotations

from collections.abc import Callable
import ctypes
import gc
import json
import pathlib
import sys
import time
from typing import Any

WAYS = ('torch, checkpointing', 'torch, no checkpointing')


def memory_mb(name: str) -> float:
  """'VmRSS': what the process has now; 'VmHWM': the most it has had."""
  text = pathlib.Path('/proc/self/status').read_text(encoding='utf-8')
  line = next(x for x in text.splitlines() if x.startswith(name + ':'))
  return int(line.split()[1]) / 1e3


def timed(
    step: Callable[[], tuple[float, float]], repeats: int, start_mb: float
) -> dict[str, Any]:
  """CPU seconds of `step`, the least of several, and the peak of memory.

  The first two calls are not timed: they compile, Tunix's both. The peak is
  that of the calls that are, so what the compiler took and gave back does not
  count.
  """
  seen = [step(), step()]
  gc.collect()
  ctypes.CDLL(None).malloc_trim(0)  # Or what was freed still counts.
  pathlib.Path('/proc/self/clear_refs').write_text('5', encoding='utf-8')
  seconds = []
  for _ in range(repeats):
    start = time.process_time()
    seen.append(step())
    seconds.append(time.process_time() - start)
  peak_mb = memory_mb('VmHWM')
  return {
      'cpu_s': min(seconds),
      'all_cpu_s': seconds,
      'peak_mb': peak_mb,
      'peak_above_start_mb': peak_mb - start_mb,
      'loss': [loss for loss, _ in seen],
      'grad_norm': [norm for _, norm in seen],
  }


def part_torch(work: pathlib.Path, way: str) -> dict[str, Any]:
  """PPO's clipped loss of the responses, its gradient, a clip, AdamW."""
  import numpy as np
  import torch
  import transformers

  start_mb = memory_mb('VmRSS')
  settings = json.loads((work / 'settings.json').read_text(encoding='utf-8'))
  model = transformers.Qwen2ForCausalLM.from_pretrained(
      work / 'model', dtype=torch.float32, attn_implementation='sdpa'
  )
  model.train()
  if way == WAYS[0]:
    model.gradient_checkpointing_enable({'use_reentrant': False})
  optimizer = torch.optim.AdamW(
      model.parameters(),
      lr=settings['learning_rate'],
      betas=(settings['b1'], settings['b2']),
      eps=settings['eps'],
      weight_decay=settings['weight_decay'],
      fused=True,
  )
  rows = np.load(work / 'rows.npz')
  tokens = torch.from_numpy(rows['tokens']).long()
  advantages = torch.from_numpy(rows['advantages']).float()
  old = torch.from_numpy(rows['old_logprobs']).float()
  scored, clip = settings['response'], settings['clip']

  def step():
    # One position more, since each token is predicted by the one before.
    logits = model(tokens, use_cache=False, logits_to_keep=scored + 1).logits
    logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    own = logprobs.gather(-1, tokens[:, -scored:, None])[..., 0]
    ratio = torch.exp(own - old)
    clipped = ratio.clamp(1 - clip, 1 + clip)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(
        model.parameters(), settings['max_grad_norm']
    )
    optimizer.step()
    return loss.item(), norm.item()

  return timed(step, settings['repeats'], start_mb)


def main() -> None:
  work, way = pathlib.Path(sys.argv[1]), sys.argv[2]
  found = part_torch(work, way)
  (work / f'{way}.json').write_text(json.dumps(found), encoding='utf-8')


if __name__ == '__main__':
  main()
