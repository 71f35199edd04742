"""Exports a run's policy: `python -m hgpo_jax.export --run_dir=... --out=DIR`.

Writes the newest checkpoint as a Hugging Face folder, with the tokenizer of
the folder that the policy started from.
"""

from __future__ import annotations

from collections.abc import Sequence
import pathlib
import sys

from absl import app
from absl import flags

from hgpo_jax import entry

flags.adopt_module_key_flags(entry)
_RUN_DIR = flags.DEFINE_string('run_dir', None, 'Folder of the run.')
_OUT = flags.DEFINE_string('out', None, 'Folder to write; must not exist.')
_DTYPE = flags.DEFINE_enum(
    'dtype', 'float32', ['float32', 'bfloat16', 'float16'], 'Of the weights.'
)


def main(argv: Sequence[str]) -> None:
  entry.refuse_arguments(argv)
  run_dir = pathlib.Path(_RUN_DIR.value)
  if not (run_dir / 'config.gin').is_file():
    sys.exit(
        f'error: {run_dir} has no config.gin; give the --run_dir of a training'
    )
  # The run's own configuration, unless another is asked for.
  spec, _ = entry.load(default=[str(run_dir / 'config.gin')])
  from hgpo_jax.experiment import loop
  from hgpo_jax.experiment import saved_policy
  from hgpo_jax.models import hf

  try:
    model, params, iteration = saved_policy.newest_policy(spec, run_dir)
    hf.save_folder(
        _OUT.value, model.config, params, spec.policy.path, _DTYPE.value
    )
  except (*loop.FAILURES, ValueError) as error:  # As of a narrow --dtype.
    sys.exit(f'error: {error}')
  print(f'policy after {iteration} iterations: {_OUT.value}')


if __name__ == '__main__':
  flags.mark_flags_as_required(['run_dir', 'out'])
  app.run(main)
