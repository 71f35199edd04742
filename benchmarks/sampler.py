"""Tokens per CPU second: ours, transformers' generate, Tunix's sampler.

  python -m benchmarks.sampler --out=/tmp/sampler

The same random weights of a Qwen2.5 shape with 5.4 M parameters, float32, each
side in a process and a virtual environment of its own, in turns. Two workloads:

  plain   32 prompts of 256 tokens, 64 new tokens each
  agent   16 groups of 8 episodes of 5 turns; a prompt is the conversation so
          far; lengths of responses are geometric. The others play it a call a
          turn, and only two groups of it: their calls are independent.

CPU time is what a busy machine changes least; compare within one run.
"""

from __future__ import annotations

from collections.abc import Sequence
import json
import os
import pathlib
import statistics
import subprocess
import sys

from absl import app
from absl import flags
import numpy as np

from benchmarks import sampler_workload as workload

# Side -> what its environment needs; ours is the one that runs this.
SIDES = {
    'ours': (),
    'transformers': (
        'torch==2.13.0',
        'transformers==5.24.0',
        'safetensors',
        'numpy',
    ),
    'tunix': ('google-tunix==0.1.7',),
}
WORKLOADS = ('plain', 'agent')
_SLOTS = 32


def make_folder(folder: pathlib.Path) -> None:
  """Writes the model that all sides load."""
  # pylint: disable=g-import-not-at-top
  import jax

  from hgpo_jax.models import base
  from hgpo_jax.models import hf
  from hgpo_jax.models import qwen2

  config = base.ModelConfig(
      vocab_size=workload.VOCAB,
      hidden_size=256,
      intermediate_size=688,
      num_layers=6,
      num_heads=4,
      num_kv_heads=2,
      head_dim=64,
      tie_word_embeddings=True,
  )
  params = qwen2.Qwen2(config).init(jax.random.key(0))
  hf.save_folder(folder, config, jax.device_get(params))


def serve_ours(folder: str) -> None:
  """Our side: `workload.serve` with the engine."""
  # pylint: disable=g-import-not-at-top
  import jax

  from hgpo_jax.models import hf
  from hgpo_jax.models import qwen2
  from hgpo_jax.rollout import sampler as sampler_lib

  model = qwen2.Qwen2(hf.read_config(folder))
  params = jax.device_put(hf.load_params(folder, model.config))
  params = jax.jit(model.decode_params)(params)
  shapes = dict(
      max_new_tokens=workload.NEW,
      row_buckets=(_SLOTS,),
      prefill_tokens=(128, 512),
      prefill_block=32,
      chunk_steps=4,
  )
  longest = workload.FIRST + (workload.TURNS - 1) * (
      workload.NEW + workload.OBSERVED
  )
  batch = sampler_lib.Sampler(
      prompt_buckets=(workload.PROMPT,), **shapes | {'prefill_block': 64}
  ).bind(model, (workload.VOCAB - 1,))
  agent = sampler_lib.Sampler(
      prompt_buckets=(192, 320, longest), **shapes
  ).bind(model, workload.STOPS)

  def plain(seed):
    keys = np.stack([np.full(workload.ROWS, seed), np.arange(workload.ROWS)], 1)
    found = batch.generate(params, list(workload.batch(seed)), keys, 1.0)
    return sum(len(completion.ids) for completion in found)

  workload.serve(
      {
          'plain': plain,
          'agent': lambda seed: _play(agent, params, seed),
      }
  )


def _play(sampler, params, seed: int) -> int:
  """The agent workload: an episode asks again as soon as it was answered."""
  engine = sampler.open(params)
  made, asked = 0, {}

  def ask(group, member, turn, prompt):
    key = seed, group, member, turn
    request = sampler.request(prompt, key, 1.0, session=(group, member))
    asked[engine.submit(request)] = key[1:], prompt

  for group in range(workload.GROUPS):
    for member in range(workload.MEMBERS):
      ask(group, member, 0, workload.task(seed, group))
  while engine.busy:
    for ticket, completion in engine.step():
      (group, member, turn), prompt = asked.pop(ticket)
      made += len(completion.ids)
      if turn + 1 < workload.TURNS:
        seen = workload.observation(seed, group, member, turn)
        longer = np.concatenate([prompt, completion.ids, seen])
        ask(group, member, turn + 1, longer)
      else:
        engine.release((group, member))
  return made


class Side:
  """A process that serves one side."""

  def __init__(self, name: str, out: pathlib.Path, model: pathlib.Path):
    here = pathlib.Path(__file__).resolve().parent
    env = os.environ | {'OMP_NUM_THREADS': '2', 'OMP_WAIT_POLICY': 'PASSIVE'}
    if name == 'ours':
      command = [sys.executable, '-m', 'benchmarks.sampler', f'--serve={model}']
    else:
      python = make_environment(out / name, SIDES[name])
      command = [str(python), str(here / f'sampler_{name}.py'), str(model)]
    self._log = (out / f'{name}.log').open('w')
    self._process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=self._log,
        text=True,
        env=env,
        cwd=here.parent,
    )
    self._read()

  def run(self, name: str, seed: int) -> dict[str, float]:
    """One round of a workload."""
    self._process.stdin.write(json.dumps([name, seed]) + '\n')
    self._process.stdin.flush()
    return self._read()

  def close(self) -> None:
    """Ends the process."""
    self._process.stdin.close()
    self._process.wait()
    self._log.close()

  def _read(self) -> dict[str, float]:
    for line in self._process.stdout:
      if line.startswith('@'):
        return json.loads(line[1:])
    raise RuntimeError(f'the process ended; its errors are in {self._log.name}')


def make_environment(
    folder: pathlib.Path, packages: Sequence[str]
) -> pathlib.Path:
  """The interpreter of a virtual environment with these packages."""
  python, stamp = folder / 'bin' / 'python', folder / '.installed'
  if not stamp.exists():
    print(f'installing {", ".join(packages)} into {folder}', flush=True)
    subprocess.run([sys.executable, '-m', 'venv', folder], check=True)
    pip = [python, '-m', 'pip', 'install', '--quiet', *packages]
    subprocess.run(pip, check=True)
    stamp.touch()
  return python


def table(rounds: dict[str, dict[str, list[dict[str, float]]]]) -> str:
  """Medians over rounds, and how many times more tokens ours makes."""
  lines = [
      '| workload | side | tokens / CPU s | ours is | wall s |',
      '|---|---|---|---|---|',
  ]
  for name, sides in rounds.items():
    rate = {
        side: statistics.median(r['tokens'] / r['cpu_s'] for r in found)
        for side, found in sides.items()
    }
    for side, found in sides.items():
      times = f'{rate["ours"] / rate[side]:.2f} x' if 'ours' in rate else ''
      wall = statistics.median(r['wall_s'] for r in found)
      lines.append(
          f'| {name} | {side} | {rate[side]:.0f} | {times} | {wall:.2f} |'
      )
  return '\n'.join(lines)


def define_flags() -> None:
  flags.DEFINE_string('out', '/tmp/sampler', 'Where models and environments go')
  flags.DEFINE_integer(
      'rounds', 3, 'Rounds of each workload and side', lower_bound=1
  )
  flags.DEFINE_list('sides', list(SIDES), 'Which sides to run')
  flags.DEFINE_list('workloads', list(WORKLOADS), 'Which workloads to run')
  for name, known in (('sides', SIDES), ('workloads', WORKLOADS)):
    flags.register_validator(
        name,
        lambda given, known=known: set(given) <= set(known),
        f'expected some of {", ".join(known)}',
    )
  flags.DEFINE_string('serve', '', 'Serve our side with this model folder')


def main(unused_argv: Sequence[str]) -> None:
  """Runs all sides in turns and prints the table."""
  if flags.FLAGS.serve:
    serve_ours(flags.FLAGS.serve)
    return
  out = pathlib.Path(flags.FLAGS.out).resolve()
  out.mkdir(parents=True, exist_ok=True)
  model = out / 'model'
  if not model.exists():
    make_folder(model)
  sides = {name: Side(name, out, model) for name in flags.FLAGS.sides}
  rounds = {
      name: {side: [] for side in sides} for name in flags.FLAGS.workloads
  }
  for seed in range(1, 1 + flags.FLAGS.rounds):
    for name, found in rounds.items():
      for side, process in sides.items():
        found[side].append(process.run(name, seed))
        print(seed, name, side, found[side][-1], flush=True)
  for process in sides.values():
    process.close()
  print(table(rounds))


if __name__ == '__main__':
  define_flags()
  app.run(main)
