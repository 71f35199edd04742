"""One iteration of a policy of 0.5 billion parameters on this machine's CPU.

  python -m benchmarks.half_billion

makes a Hugging Face folder of the shape of Qwen2.5-0.5B with random weights and
the tokenizer of the packaged policy, trains on it for one iteration of a few
short episodes of generated household games with the normal entry point, and
prints the most memory that the processes held together, and seconds. Memory is
the proportional set size, so what several processes share counts once.
`--model=tiny` tries the script.
"""

from __future__ import annotations

from collections.abc import Sequence
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import app
from absl import flags

_EVERY_S = 0.25
# What runs/quickstart.gin is replaced by: as little as makes an iteration.
_BINDINGS = (
    'Experiment.iterations = 1',
    'Experiment.tasks_per_iteration = 1',
    'Experiment.group_size = 2',
    'Experiment.save_every = 1',
    'AlfworldEnv.max_steps = 2',
    'Evaluation.games = 1',
    'Evaluation.every = 0',
    'Workers.processes = 1',
    'PolicySource.remat = True',
    'Sampler.prompt_buckets = (208,)',
    'Sampler.row_buckets = (2,)',
    'Minibatches.minibatch_steps = 4',
    'Minibatches.micro_batch_steps = 2',
    'Minibatches.length_buckets = (224,)',
    # Random weights win no game: it is the entropy bonus that is learned from.
    "Minibatches.no_signal = 'keep'",
)


def make_policy(folder: pathlib.Path, name: str) -> None:
  """Writes a policy with random weights; in a process of its own."""
  import jax
  import numpy as np

  from hgpo_jax import assets
  from hgpo_jax.models import configs
  from hgpo_jax.models import hf
  from hgpo_jax.models import qwen2_params

  rng = np.random.default_rng(0)
  shapes = configs.CONFIGS[name]

  def draw(spec):
    if spec.init != 'normal':
      return np.full(spec.shape, float(spec.init == 'ones'), np.float32)
    values = rng.standard_normal(spec.shape, np.float32)
    values *= 0.02
    return values

  params = jax.tree.map(draw, qwen2_params.specs(shapes))
  tokenizer = pathlib.Path(assets.__file__).parent / 'tiny_household'
  hf.save_folder(folder, shapes, params, tokenizer, 'bfloat16')


def tree(pid: int) -> list[int]:
  """A process and all that it started, directly or not."""
  found, parents = [pid], {}
  for path in pathlib.Path('/proc').glob('[0-9]*/stat'):
    try:
      fields = path.read_text().rsplit(')', 1)[1].split()
    except OSError:  # It has just ended.
      continue
    parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
  for parent in found:
    found += parents.get(parent, [])
  return found


def memory_bytes(pids: Sequence[int]) -> int:
  """What the processes hold together."""
  total = 0
  for pid in pids:
    try:
      text = pathlib.Path(f'/proc/{pid}/smaps_rollup').read_text()
    except OSError:
      continue
    sizes = (line.split() for line in text.splitlines())
    total += sum(int(s[1]) * 1024 for s in sizes if s[0] == 'Pss:')
  return total


def watched(command: Sequence[str]) -> tuple[int, float, str]:
  """(most bytes held, seconds, what it printed) of a command."""
  start, most = time.monotonic(), 0
  with tempfile.TemporaryFile('w+') as out:
    process = subprocess.Popen(command, stdout=out)
    while process.poll() is None:
      most = max(most, memory_bytes(tree(process.pid)))
      time.sleep(_EVERY_S)
    out.seek(0)
    text = out.read()
  if process.returncode:
    sys.exit(f'{" ".join(command)}\nended with {process.returncode}:\n{text}')
  return most, time.monotonic() - start, text


def run(name: str, folder: pathlib.Path) -> dict[str, Any]:
  """Trains for one iteration below `folder`."""
  policy, run_dir = folder / 'policy', folder / 'run'
  own = [sys.executable, '-m', 'benchmarks.half_billion', f'--model={name}']
  subprocess.run([*own, f'--make={policy}'], check=True)
  bindings = (*_BINDINGS, f'PolicySource.folder = {str(policy)!r}')
  most, took, text = watched(
      [
          *(sys.executable, '-m', 'hgpo_jax.train'),
          *('--gin_file=runs/quickstart.gin', f'--run_dir={run_dir}'),
          *(f'--gin_bindings={binding}' for binding in bindings),
      ]
  )
  lines = (run_dir / 'metrics.jsonl').read_text().splitlines()
  first = json.loads(lines[0])
  return {
      'peak_gb': most / 1e9,
      'seconds': took,
      'planned': next(
          line for line in text.splitlines() if line.startswith('memory ')
      ),
      **{
          name: first[name]
          for name in (
              'batch/steps',
              'update/count',
              'update/grad_norm',
              'update/skipped',
              'time/rollout_s',
              'time/learn_s',
          )
      },
  }


def main(argv: Sequence[str]) -> None:
  del argv
  name = flags.FLAGS.model
  if flags.FLAGS.make:
    make_policy(pathlib.Path(flags.FLAGS.make), name)
    return
  text = pathlib.Path('/proc/meminfo').read_text()
  there = dict(line.split(':') for line in text.splitlines())['MemAvailable']
  there = int(there.split()[0]) * 1024 / 1e9
  print(f'{name}; {there:.1f} GB of memory are available before it starts')
  with tempfile.TemporaryDirectory(prefix='half_billion') as folder:
    found = run(name, pathlib.Path(folder))
  for key, value in found.items():
    print(f'{key:18}{value if isinstance(value, str) else f"{value:.4g}"}')


def define_flags() -> None:
  """Not at import: other programs have flags of these names."""
  flags.DEFINE_string('model', '0.5b', 'Shape of the policy.')
  flags.DEFINE_string('make', '', 'Internal: only write the policy here.')


if __name__ == '__main__':
  define_flags()
  app.run(main)
