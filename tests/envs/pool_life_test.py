"""However a pool's process ends, its workers end too."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from hgpo_jax.envs import pool
from tests.envs import toy

ROOT = pathlib.Path(__file__).parents[2]


def test_ctrl_c_in_a_call_closes_the_pool():
  spec = toy.ToySpec(faults=((0, 'hang_in_reset'),))
  envs = pool.EnvPool(spec, 2, 2, 30.0, 30.0, 30.0)
  pids = envs.worker_pids
  main = threading.main_thread().ident
  timer = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
  timer.start()
  with pytest.raises(KeyboardInterrupt):
    envs.reset({s: spec.split('train')[s] for s in (0, 1)})
  assert_gone(pids)


def assert_gone(pids: tuple[int, ...], seconds: float = 5.0) -> None:
  deadline = time.monotonic() + seconds
  while alive := [pid for pid in pids if is_alive(pid)]:
    assert time.monotonic() < deadline, f'{alive} are still there'
    time.sleep(0.02)


def is_alive(pid: int) -> bool:
  """Whether a process runs; one that waits to be reaped does not."""
  try:
    stat = pathlib.Path(f'/proc/{pid}/stat').read_text(encoding='utf-8')
  except (FileNotFoundError, ProcessLookupError):
    return False
  return stat.rpartition(')')[2].split()[0] != 'Z'


# Not guarded by `if __name__ == '__main__'`: workers must not run it again.
SCRIPT = """
import os, signal, sys, time
from hgpo_jax.envs import pool, ray_pool
from tests.envs import toy
spec = toy.ToySpec(faults=((1, 'hang_in_step'),))
envs = POOL
print(*envs.worker_pids, flush=True)
split = spec.split('train')
envs.reset({0: split[0], 1: split[1]})
end = sys.argv[1]
if end == 'raise':
  raise ValueError('a bug')
if end == 'group_sigint':
  signal.signal(signal.SIGINT, lambda *_: None)
  os.killpg(0, signal.SIGINT)
  time.sleep(0.2)
  assert envs.step({0: 'look'})[0].observation == 'Nothing happens.'
  assert not envs.metrics['pool/restarts']
if end == 'stopped':
  os.kill(envs.worker_pids[0], signal.SIGSTOP)
if end.startswith('SIG'):
  print('stepping', flush=True)
  envs.step({1: 'look'})
"""


def check_no_orphans(
    folder: pathlib.Path, end: str, make: str, seconds: float
) -> None:
  """Plays `SCRIPT` to its end, with the pool that the expression `make` is."""
  script = folder / 'script.py'
  script.write_text(textwrap.dedent(SCRIPT).replace('POOL', make))
  parent = subprocess.Popen(
      [sys.executable, str(script), end],
      cwd=ROOT,
      env={**os.environ, 'PYTHONPATH': str(ROOT)},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      start_new_session=True,
  )
  pids = tuple(map(int, parent.stdout.readline().split()))
  assert len(pids) == 2
  if end.startswith('SIG'):
    assert parent.stdout.readline() == 'stepping\n'
    time.sleep(0.1)
    parent.send_signal(getattr(signal, end))
  _, errors = parent.communicate(timeout=seconds)
  assert_gone(pids, seconds)
  ok = end in ('exit', 'group_sigint', 'stopped')
  assert (parent.returncode == 0) == ok, errors


@pytest.mark.parametrize(
    'end',
    'exit raise group_sigint stopped SIGINT SIGTERM SIGKILL'.split(),
)
def test_no_orphans(tmp_path, end):
  """However the parent ends, and with a worker hung, no worker outlives it."""
  make = 'pool.EnvPool(spec, 2, 2, 30.0, 30.0, 30.0)'
  check_no_orphans(tmp_path, end, make, 20.0)
