"""Evaluates: `python -m hgpo_jax.eval --gin_file=... --out=result.json`.

Takes the configuration of a training run; `--run_dir` evaluates the newest
checkpoint of that run, else the policy's own folder is evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence
import pathlib
import sys

from absl import app
from absl import flags

from hgpo_jax import entry

_RUN_DIR = flags.DEFINE_string('run_dir', None, 'Run whose policy to evaluate.')
_OUT = flags.DEFINE_string('out', None, 'JSON file to write the result to.')


def main(argv: Sequence[str]) -> None:
  entry.refuse_arguments(argv)
  from hgpo_jax.experiment import evaluate
  from hgpo_jax.experiment import loop
  from hgpo_jax.experiment import saved_policy

  spec, _ = entry.load()
  run_dir = pathlib.Path(_RUN_DIR.value) if _RUN_DIR.value else None
  try:
    name, iteration, result = saved_policy.evaluate(spec, run_dir)
  except loop.FAILURES as error:
    sys.exit(f'error: {error}')
  print(evaluate.table({name: result}))
  if _OUT.value:
    evaluate.save(_OUT.value, result, iteration)


if __name__ == '__main__':
  app.run(main)
