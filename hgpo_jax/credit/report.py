"""From a file of episodes to the inspector's page."""

from __future__ import annotations

from collections.abc import Sequence
import pathlib

from hgpo_jax import whole_file
from hgpo_jax.credit import inspector
from hgpo_jax.credit import methods
from hgpo_jax.credit import page
from hgpo_jax.io import trajectories as trajectories_io


def write(
    source: pathlib.Path, out: pathlib.Path, estimators: Sequence[str] = ()
) -> str:
  """Writes the page, whole or not at all; returns a line about it.

  Args:
    source: what `io.trajectories.save` wrote.
    out: the HTML file.
    estimators: gin files, see `methods.load`.

  Raises:
    OSError: a file cannot be read or written.
    ValueError: the file holds no episodes that could be compared, or a gin
      file no estimator.
    EstimatorError: an estimator returned no advantages.
  """
  _check_file(source)
  whole_file.check(out, '--out')
  if out.exists() and out.samefile(source):
    raise ValueError(
        f'--out={out} is the file of episodes itself, which the page would'
        ' replace; give another file'
    )
  chosen = methods.load(estimators)
  trajectories = trajectories_io.load(source)
  try:
    data = inspector.data(trajectories, chosen)
  except ValueError as error:
    raise ValueError(f'{source}: {str(error).rstrip(".")}.') from error
  data['source'] = str(source)
  with whole_file.replacing(out) as partial:
    partial.write_text(page.render(data, source.name), encoding='utf-8')
  shown = ', '.join(f'{n} ({type(e).__name__})' for n, e in chosen.items())
  return (
      f'{out}: {len(data["tasks"])} tasks, {len(trajectories)} episodes,'
      f' {len(data["steps"]["step"])} steps under'
      f' {len(chosen)} estimator{"s" if len(chosen) > 1 else ""}'
      + (f': {shown}' if estimators else '')
  )


def _check_file(source: pathlib.Path) -> None:
  wanted = 'give --trajectories=RUN/rollouts/iteration_000000.jsonl.gz'
  if source.is_dir():
    raise ValueError(f'{source} is a folder, expected a file: {wanted}')
  if not source.exists():
    raise FileNotFoundError(f'{source} does not exist: {wanted}')
