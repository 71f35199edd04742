"""The transformers side of `sampler.py`; runs in an environment of its own.

python sampler_transformers.py <folder of the model>
"""

from __future__ import annotations

import sys

import sampler_workload as workload
import torch
import transformers


def main(folder: str) -> None:
  """Serves `workload.serve` with `generate` of the model in `folder`."""
  torch.set_num_threads(2)
  model = transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.float32
  ).eval()

  def run(ids, new, stops, seed):
    transformers.set_seed(seed)
    ids = torch.as_tensor(ids, dtype=torch.long)
    with torch.inference_mode():
      out = model.generate(
          input_ids=ids,
          attention_mask=torch.ones_like(ids),
          max_new_tokens=new,
          do_sample=True,
          temperature=1.0,
          top_k=0,
          top_p=1.0,
          eos_token_id=stops,
          pad_token_id=0,
          use_cache=True,
      )
    return out[:, ids.shape[1] :].tolist()

  def plain(seed):
    rows = run(workload.batch(seed), workload.NEW, None, seed)
    return sum(map(len, rows))

  def agent(seed):
    one = lambda prompts, number: run(
        prompts[0][None], workload.NEW, list(workload.STOPS), number
    )
    return workload.one_by_one(one, seed, groups=2)

  workload.serve({'plain': plain, 'agent': agent})


if __name__ == '__main__':
  main(*sys.argv[1:])
