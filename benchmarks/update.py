"""One optimizer update of ours against torch's and Tunix's, with remat.

  python -m benchmarks.update --out=update.json

Loss, gradient and AdamW of the same weights, rows and advantages, float32, a
process each, in one run. Figures are CPU seconds, which a busy machine changes
little, and the peak of memory. torch and Tunix get an environment each, which
is made if it is missing; `--batch` and the like make it smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile
from typing import Any

from absl import app
from absl import flags
import jax
import numpy as np

from benchmarks import sampler
from benchmarks import update_torch as measure
from benchmarks import update_tunix
from hgpo_jax import types
from hgpo_jax import whole_file
from hgpo_jax.learner import optimizer as optimizer_lib
from hgpo_jax.learner import train_state
from hgpo_jax.learner import update as update_lib
from hgpo_jax.losses import ppo
from hgpo_jax.models import base
from hgpo_jax.models import hf
from hgpo_jax.models import qwen2

# Peer -> its program, the ways that it is run, and how often each.
PEERS = {
    'transformers': (measure.__file__, tuple(measure.WAYS), 1),
    'tunix': (update_tunix.__file__, tuple(update_tunix.WAYS), 2),
}
# About five million parameters.
CONFIG = base.ModelConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=688,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    tie_word_embeddings=True,
)
# Threads that wait for each other would otherwise burn what is measured.
_NO_SPINNING = {'OMP_WAIT_POLICY': 'PASSIVE', 'GOMP_SPINCOUNT': '0'}
# Both sides learn alike to this, relative; else the times mean nothing.
_TOLERANCE = 1e-3


def prepare(work: pathlib.Path, config: base.ModelConfig) -> None:
  """Writes what both sides are given: weights, rows, settings."""
  model = qwen2.Qwen2(config)
  params = jax.device_get(jax.jit(model.init)(jax.random.key(0)))
  hf.save_folder(work / 'model', config, params)
  values = flags.FLAGS
  rng = np.random.default_rng(0)
  shape = (values.batch, values.response)
  np.savez(
      work / 'rows.npz',
      tokens=rng.integers(1, config.vocab_size, (values.batch, values.length)),
      advantages=np.repeat(rng.normal(size=(values.batch, 1)), shape[1], 1),
      # Of a policy near one that says every token alike, so that some clip.
      old_logprobs=rng.normal(-np.log(config.vocab_size), 0.15, shape),
  )
  spec = optimizer_lib.AdamW(learning_rate=1e-4)
  settings = {'response': values.response, 'repeats': values.repeats}
  settings |= {'clip': 0.2, **dataclasses.asdict(spec)}
  (work / 'settings.json').write_text(json.dumps(settings))


def part_ours(work: pathlib.Path) -> dict[str, Any]:
  """The real update, in one micro-batch, with rematerialisation."""
  start_mb = measure.memory_mb('VmRSS')
  settings = json.loads((work / 'settings.json').read_text())
  config = hf.read_config(work / 'model')
  model = qwen2.Qwen2(config, remat=True, keep_attention=False, mlp_parts=8)
  params = jax.tree.map(
      jax.numpy.asarray, hf.load_params(work / 'model', config)
  )
  spec = optimizer_lib.AdamW(learning_rate=settings['learning_rate'])
  loss = ppo.PPOLoss(entropy_coef=0.0, kl_coef=0.0, dual_clip=0.0)
  update = update_lib.Update(
      model, spec, loss, temperature=1.0, chunk_tokens=1024
  )
  state = train_state.create(params, spec.make())
  del params
  batch = _batch(work)

  def step():
    nonlocal state
    state, metrics = update(state, [batch])
    found = jax.device_get(metrics)
    return float(found['loss/total']), float(found['update/grad_norm'])

  return measure.timed(step, settings['repeats'], start_mb)


def _batch(work: pathlib.Path) -> types.PolicyBatch:
  rows = np.load(work / 'rows.npz')
  tokens_BT = rows['tokens'].astype(np.int32)
  (count, length), shape = tokens_BT.shape, rows['advantages'].shape
  spread = lambda x, like: np.broadcast_to(x, like).astype(np.int32)
  rollout = types.RolloutBatch(
      tokens_BT=tokens_BT,
      positions_BT=spread(np.arange(length), (count, length)),
      segment_ids_BT=np.ones((count, length), np.int32),
      target_BR=spread(np.arange(length - shape[1], length), shape),
      action_mask_BR=np.ones(shape, bool),
      step_BR=spread(np.arange(count)[:, None], shape),
      sampler_logprobs_BR=rows['old_logprobs'].astype(np.float32),
      row_weight_B=np.ones(count, np.float32),
  )
  return types.PolicyBatch(
      rollout,
      rows['advantages'].astype(np.float32),
      rollout.sampler_logprobs_BR,
  )


def compare(found: dict[str, Any]) -> dict[str, dict[str, float]]:
  """Ours over theirs, for each way that a peer was run.

  Raises:
    ValueError: the two did not compute the same.
  """
  ours, ratios = found['ours'], {}
  for name, theirs in found.items():
    if name == 'ours':
      continue
    for what in ('loss', 'grad_norm'):
      np.testing.assert_allclose(
          ours[what],
          theirs[what],
          rtol=_TOLERANCE,
          atol=_TOLERANCE * max(map(abs, theirs[what])),
          err_msg=f'{what} of ours and of {name} differ',
      )
    ratios[name] = {
        key: ours[key] / theirs[key]
        for key in ('cpu_s', 'peak_mb', 'peak_above_start_mb')
    }
  return ratios


def table(found: dict[str, Any]) -> str:
  """The numbers as Markdown."""
  ratios = compare(found)
  lines = [
      '| | CPU s | ours | peak, MB | ours | above the start, MB | ours |',
      '|---|---|---|---|---|---|---|',
  ]
  for name, numbers in found.items():
    ratio = ratios.get(name, dict.fromkeys(numbers, 1.0))
    cells = [
        f'{numbers[key]:.{digits}f} | {ratio[key]:.2f}'
        for key, digits in (
            ('cpu_s', 2),
            ('peak_mb', 0),
            ('peak_above_start_mb', 0),
        )
    ]
    lines.append(f'| {name} | {" | ".join(cells)} |')
  return '\n'.join(lines)


def main(argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}')
  values = flags.FLAGS
  if values.part:
    work = pathlib.Path(values.work)
    (work / 'ours.json').write_text(json.dumps(part_ours(work)))
    return
  if values.out:
    whole_file.check(values.out, '--out')
  found = {}
  with tempfile.TemporaryDirectory() as name:
    work = pathlib.Path(name)
    prepare(work, CONFIG)
    ours = [sys.executable, '-m', 'benchmarks.update', '--part=ours']
    for _ in range(2):
      subprocess.run(
          [*ours, f'--work={work}'], check=True, env=_environment(work)
      )
    found['ours'] = json.loads((work / 'ours.json').read_text())
    for peer in values.peers:
      found |= _run(peer, work)
  print(table(found))
  if values.out:
    found['machine'] = f'{platform.machine()}, {os.cpu_count()} cores'
    pathlib.Path(values.out).write_text(json.dumps(found, indent=1) + '\n')


def _environment(work: pathlib.Path) -> dict[str, str]:
  """Where the second run of jax finds its programs compiled.

  As a training that goes on: what the compiler leaves in the process is no part
  of an update.
  """
  return {**os.environ, 'JAX_COMPILATION_CACHE_DIR': f'{work}/compiled'}


def _run(peer: str, work: pathlib.Path) -> dict[str, Any]:
  """A peer's numbers by way, each from a process of its environment."""
  program, ways, runs = PEERS[peer]
  folder = pathlib.Path(flags.FLAGS.environments) / peer
  python = sampler.make_environment(folder, sampler.SIDES[peer])
  env = {**_environment(work), **_NO_SPINNING, 'JAX_PLATFORMS': 'cpu'}
  found = {}
  for way in ways:
    for _ in range(runs):
      subprocess.run([python, program, work, way], check=True, env=env)
    found[way] = json.loads((work / f'{way}.json').read_text())
  return found


def define_flags() -> None:
  """Not at import: other programs have flags of these names."""
  flags.DEFINE_integer('batch', 32, 'Rows.', lower_bound=1)
  flags.DEFINE_integer('length', 320, 'Tokens of a row.', lower_bound=1)
  flags.DEFINE_integer(
      'response', 64, 'Of them, the last so many are scored.', lower_bound=1
  )
  flags.DEFINE_integer(
      'repeats', 3, 'Updates that are timed, after two more.', lower_bound=1
  )
  flags.DEFINE_list('peers', list(PEERS), 'Whom to compare with.')
  flags.register_validator(
      'peers',
      lambda given: set(given) <= set(PEERS),
      f'expected some of {", ".join(PEERS)}',
  )
  flags.DEFINE_string(
      'environments',
      str(pathlib.Path(tempfile.gettempdir()) / 'hgpo_bench'),
      'Folder of an environment for each peer; made if missing.',
  )
  flags.DEFINE_string('out', '', 'JSON file to write the numbers to.')
  flags.DEFINE_string('part', '', 'Internal: what this process measures.')
  flags.DEFINE_string('work', '', 'Internal: folder shared by the parts.')


if __name__ == '__main__':
  define_flags()
  app.run(main)
