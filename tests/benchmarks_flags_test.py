"""Flags of the benchmarks that mean nothing are refused before any work."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_MISTAKES = {
    '--rounds=0': ['ahead', 'sampler'],
    '--iterations=-1': ['ahead'],
    '--minutes=-1': ['gpu'],
    '--repeats=0': ['advantages', 'update'],
    '--layers=-1': ['memory'],
    '--games=0': ['envs'],
    '--replicates=0': ['credit_fidelity'],
    '--sides=nobody': ['sampler'],
    '--workloads=nothing': ['sampler'],
    '--peers=nobody': ['update'],
    '--only=nothing': ['advantages'],
    '--seeds=one': ['ablation', 'quickstart'],
    '--seeds=1,01': ['ablation', 'quickstart'],
    '--group_sizes=1': ['credit_fidelity'],
}
# In a process of its own: flags of one program are names of another's.
_PROGRAM = """
import importlib, json, sys
from absl import flags

for flag, names in json.loads(sys.argv[1]).items():
  for name in names:
    known = set(flags.FLAGS)
    importlib.import_module('benchmarks.' + name).define_flags()
    try:
      flags.FLAGS([name, flag])
      print('taken:', name, flag)
    except flags.IllegalFlagValueError as error:
      print('refused:', name, flag, error)
    for new in set(flags.FLAGS) - known:
      delattr(flags.FLAGS, new)
"""


def test_flags_that_mean_nothing_are_refused():
  done = subprocess.run(
      [sys.executable, '-c', _PROGRAM, json.dumps(_MISTAKES)],
      cwd=_ROOT,
      env=os.environ | {'PYTHONPATH': str(_ROOT)},
      capture_output=True,
      text=True,
      check=False,
  )
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert len(lines) == sum(map(len, _MISTAKES.values()))
  assert all(line.startswith('refused: ') for line in lines), done.stdout
  assert any('expected some of ours' in line for line in lines), done.stdout
