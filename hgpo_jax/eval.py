"""Evaluates: `python -m hgpo_jax.eval --gin_file=... --out=result.json`.

Takes the configuration of a training run; `--run_dir` evaluates the newest
checkpoint of that run, else the policy's own folder is evaluated. Each game of
`Evaluation.split` is played exactly once a seed, whatever the number of slots;
`--compat=verl_agent` draws 128 games with replacement, as that code does.
"""

from __future__ import annotations

from collections.abc import Sequence
import pathlib
import sys

from absl import app
from absl import flags

from hgpo_jax import entry
from hgpo_jax import whole_file

flags.adopt_module_key_flags(entry)
_RUN_DIR = flags.DEFINE_string('run_dir', None, 'Run whose policy to evaluate.')
_OUT = flags.DEFINE_string(
    'out', None, 'JSON file to write the result to; the table goes beside it.'
)
_COMPAT = flags.DEFINE_enum(
    'compat', None, ['verl_agent'], 'Choose games as other code does.'
)

_COMPAT_BINDINGS = {None: [], 'verl_agent': ['Evaluation.draws = 128']}


def main(argv: Sequence[str]) -> None:
  entry.refuse_arguments(argv)
  from hgpo_jax.experiment import evaluate
  from hgpo_jax.experiment import loop
  from hgpo_jax.experiment import saved_policy

  spec, _ = entry.load(bindings=_COMPAT_BINDINGS[_COMPAT.value])
  run_dir = pathlib.Path(_RUN_DIR.value) if _RUN_DIR.value else None
  out = _OUT.value and pathlib.Path(_OUT.value)
  try:
    if out:
      evaluate.check_out(out)
    name, iteration, result = saved_policy.evaluate(spec, run_dir)
  except loop.FAILURES as error:
    sys.exit(f'error: {error}')
  table = evaluate.table({name: result})
  print(table)
  if out:
    evaluate.save(out, result, iteration)
    with whole_file.replacing(out.with_suffix('.md')) as partial:
      partial.write_text(table + '\n', encoding='utf-8')


if __name__ == '__main__':
  app.run(main)
