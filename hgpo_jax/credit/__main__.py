"""Looks at credit: `python -m hgpo_jax.credit inspect --trajectories=...`.

  python -m hgpo_jax.credit inspect \\
      --trajectories=RUN/rollouts/iteration_000000.jsonl.gz --out=report.html

writes a page that shows the episodes of one iteration under every estimator.
It works offline: open it in a browser. --estimator picks gin files, also such
as no run has used: any that binds Experiment.estimator.
"""

from __future__ import annotations

from collections.abc import Sequence
import pathlib
import sys

from absl import app
from absl import flags
from absl import logging

_TRAJECTORIES = flags.DEFINE_multi_string(
    'trajectories', [], 'Episodes of one iteration, *.jsonl.gz.'
)
_OUT = flags.DEFINE_string('out', 'report.html', 'HTML file to write.')
_ESTIMATOR = flags.DEFINE_multi_string(
    'estimator', [], 'Gin file of an estimator; repeatable. Default: all.'
)


def main(argv: Sequence[str]) -> None:
  if list(argv[1:]) != ['inspect']:
    raise app.UsageError(f"expected the one command 'inspect', got {argv[1:]}")
  if not _TRAJECTORIES.value:
    raise app.UsageError('--trajectories is missing')
  if len(_TRAJECTORIES.value) > 1:
    raise app.UsageError(
        f'got {len(_TRAJECTORIES.value)} --trajectories, expected one: a page'
        ' shows one iteration, and ids of episodes start anew in each'
    )
  logging.set_verbosity(logging.WARNING)  # Gin files are read by the dozen.
  from hgpo_jax.advantages import base
  from hgpo_jax.credit import report

  try:
    text = report.write(
        pathlib.Path(_TRAJECTORIES.value[0]),
        pathlib.Path(_OUT.value),
        _ESTIMATOR.value,
    )
  except (OSError, ValueError, base.EstimatorError) as error:
    sys.exit(f'error: {error}')
  print(text)


if __name__ == '__main__':
  app.run(main)
