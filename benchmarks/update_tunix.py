"""Tunix's side of `benchmarks.update`, run by an environment that has Tunix.

  python update_tunix.py WORK WAY

reads the weights, rows and settings in WORK and writes WORK/WAY.json. The step
is that of Tunix's trainer: its GRPO loss, the gradient, optax's AdamW, in one
program. It has the same loss and gradient as the others; beside them it makes
what it logs, such as the entropy of each token.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

# Way -> Tunix's own name of what is made again in the backward pass.
WAYS = {
    'tunix, remat of decoder layers': 'DECODER',
    'tunix, remat of blocks': 'BLOCK',
    'tunix, no remat': 'NONE',
}


def part_tunix(work: pathlib.Path, way: str) -> dict[str, Any]:
  """Tunix's train step on the rows, see `update_torch.timed`."""
  import numpy as np
  import optax
  import sampler_tunix  # Beside this file.
  from tunix.models.qwen2 import model as model_lib
  from tunix.rl import algo_core
  from tunix.rl import common
  from tunix.rl.grpo import grpo_learner
  from tunix.sft import peft_trainer
  import update_torch as measure

  start_mb = measure.memory_mb('VmRSS')
  settings = json.loads((work / 'settings.json').read_text(encoding='utf-8'))
  remat = model_lib.RematConfig[WAYS[way]]
  model, _ = sampler_tunix.load(str(work / 'model'), remat_config=remat)
  optimizer = optax.chain(
      optax.clip_by_global_norm(settings['max_grad_norm']),
      optax.adamw(
          settings['learning_rate'],
          b1=settings['b1'],
          b2=settings['b2'],
          eps=settings['eps'],
          weight_decay=settings['weight_decay'],
      ),
  )
  algorithm = grpo_learner.GRPOConfig(
      beta=0.0, epsilon=settings['clip'], loss_agg_mode='token-mean'
  )
  algorithm.temperature = 1.0
  rows, scored = np.load(work / 'rows.npz'), settings['response']
  tokens = rows['tokens'].astype(np.int32)
  example = common.TrainExample(
      prompt_ids=tokens[:, :-scored],
      prompt_mask=np.ones_like(tokens[:, :-scored]),
      completion_ids=tokens[:, -scored:],
      completion_mask=np.ones_like(tokens[:, -scored:]),
      advantages=rows['advantages'][:, 0].astype(np.float32),
      ref_per_token_logps=None,
      old_per_token_logps=rows['old_logprobs'].astype(np.float32),
  )
  # Ids start at 1, so no token is taken for padding.
  ids = {'algo_config': algorithm, 'pad_id': 0, 'eos_id': -1}
  trainer = peft_trainer.PeftTrainer(
      model, optimizer, peft_trainer.TrainingConfig(eval_every_n_steps=1)
  )
  trainer.with_loss_fn(
      lambda model, train_example: algo_core.grpo_loss_fn(
          model, train_example, **ids
      ),
      has_aux=True,
  ).with_gen_model_input_fn(lambda x: {'train_example': x})
  train, _ = trainer.jit_train_and_eval_step()

  def step():
    loss, _, norm = train(example)
    return float(loss), float(norm)

  return measure.timed(step, settings['repeats'], start_mb)


def main() -> None:
  work, way = pathlib.Path(sys.argv[1]), sys.argv[2]
  found = part_tunix(work, way)
  (work / f'{way}.json').write_text(json.dumps(found), encoding='utf-8')


if __name__ == '__main__':
  main()
