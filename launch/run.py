"""Launches a training run: python launch/run.py --target local ...

  python launch/run.py --gin_file=runs/quickstart.gin --run_dir=runs/first
  python launch/run.py ... --dry_run        print the plan and stop
  python launch/run.py ... -- --alsologtostderr     pass flags on to training

A target is one file in launch/targets/ with two functions:
`make_plan(Request) -> Plan`, which is pure, and `submit(Plan) -> int`.
The exit code is that of the run: 0 done, 42 preempted (the same command goes
on from the last checkpoint), 128 + n killed by signal n, anything else a
failure.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import difflib
import importlib
import pathlib
import pkgutil
import sys
import types

_ROOT = pathlib.Path(__file__).resolve().parent.parent
if str(_ROOT) not in sys.path:  # Run as a file, not as a module.
  sys.path.insert(0, str(_ROOT))

# pylint: disable=wrong-import-position
from launch import plan as plan_lib
from launch import targets


def target_names() -> list[str]:
  """Returns the targets there are: the modules of launch/targets/."""
  return sorted(m.name for m in pkgutil.iter_modules(targets.__path__))


def find_target(name: str) -> types.ModuleType:
  """Imports a target.

  Raises:
    ValueError: there is none of that name.
  """
  known = target_names()
  if name not in known:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f'; did you mean {close[0]}?' if close else '.'
    raise ValueError(
        f'--target: got {name!r}{hint} The targets are: {", ".join(known)}'
    )
  return importlib.import_module(f'launch.targets.{name}')


def _folder(name: str) -> pathlib.Path:
  if not name:  # pathlib would take it for the working directory.
    raise argparse.ArgumentTypeError("got '', expected a folder")
  return pathlib.Path(name)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, plan_lib.Request]:
  """Returns the options of the launcher and the request to the target."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  parser.add_argument('--target', default='local')
  parser.add_argument('--run_dir', required=True, type=_folder)
  parser.add_argument('--gin_file', action='append', required=True)
  parser.add_argument('--gin_bindings', action='append', default=[])
  parser.add_argument('--max_restarts', type=int, default=20)
  parser.add_argument('--python', default=sys.executable)
  parser.add_argument('--dry_run', action='store_true')
  parser.add_argument('extra', nargs='*', help='after --: passed to training')
  options = parser.parse_args(argv)
  if options.max_restarts < 0:
    parser.error(f'--max_restarts: got {options.max_restarts}, expected >= 0')
  request = plan_lib.Request(
      run_dir=options.run_dir,
      gin_files=tuple(options.gin_file),
      gin_bindings=tuple(options.gin_bindings),
      max_restarts=options.max_restarts,
      python=options.python,
      extra=tuple(options.extra),
  )
  return options, request


def main(argv: Sequence[str]) -> int:
  options, request = parse(argv)
  try:
    target = find_target(options.target)
  except ValueError as error:
    print(error, file=sys.stderr)
    return 2
  plan = target.make_plan(request)
  if options.dry_run:
    print(plan.render())
    return 0
  try:
    return target.submit(plan)
  except plan_lib.StartError as error:
    print(f'launch: {error}', file=sys.stderr)
    return 2


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
