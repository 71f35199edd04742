"""The launcher: pure plans, exit codes, restarts, signals."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from launch import plan as plan_lib
from launch import run
from launch import supervise

_ROOT = pathlib.Path(run.__file__).resolve().parent.parent


def _plan(tmp_path, *sources, max_restarts=3, grace_s=5.0):
  processes = tuple(
      plan_lib.Process(
          argv=(sys.executable, '-c', textwrap.dedent(source)),
          env=(('FOLDER', str(tmp_path)),),
          log=tmp_path / 'logs' / f'process_{index}.log',
      )
      for index, source in enumerate(sources)
  )
  return plan_lib.Plan('test', processes, max_restarts, grace_s, backoff_s=0.01)


def _count_starts(body):
  return (
      'import os, pathlib, signal, sys, time\n'
      "p = pathlib.Path(os.environ['FOLDER'], 'starts')\n"
      'n = int(p.read_text()) + 1 if p.exists() else 1\n'
      'p.write_text(str(n))\n' + textwrap.dedent(body)
  )


def _wait_for(path):
  end = time.monotonic() + 20
  while not path.exists() and time.monotonic() < end:
    time.sleep(0.02)
  assert path.exists()


@pytest.mark.parametrize(
    ('body', 'code', 'starts'),
    [
        ('', 0, 1),
        ('sys.exit(42 if n < 3 else 0)', 0, 3),
        ('os.kill(os.getpid(), signal.SIGKILL) if n < 2 else 0', 0, 2),
        ('os._exit(134) if n < 2 else 0', 0, 2),
        ('sys.exit(1)', 1, 1),
        ('sys.exit(42)', 42, 4),
        ('os.kill(os.getpid(), signal.SIGKILL)', 137, 4),
    ],
)
def test_exit_code_decides_about_a_restart(tmp_path, body, code, starts):
  assert supervise.run(_plan(tmp_path, _count_starts(body))) == code
  assert (tmp_path / 'starts').read_text() == str(starts)


def test_a_failure_shows_the_end_of_its_log(tmp_path, capfd):
  assert supervise.run(_plan(tmp_path, "raise ValueError('bad seed')")) == 1
  shown = capfd.readouterr().err
  assert 'exit code 1 is a failure, not a preemption: no restart' in shown
  assert 'ValueError: bad seed' in shown


def test_giving_up_says_after_how_many(tmp_path, capfd):
  plan = _plan(tmp_path, 'import sys; sys.exit(42)', max_restarts=1)
  assert supervise.run(plan) == 42
  shown = capfd.readouterr().err
  assert 'exit code 42: restart 1 of 1 in 0.01 s' in shown
  assert 'exit code 42: gave up after 1 restarts' in shown


def test_the_first_failure_ends_the_others_and_each_has_a_log(tmp_path):
  slow = "print('slow', flush=True)\nimport time; time.sleep(60)"
  bad = "print('bad', flush=True)\nimport time; time.sleep(0.5); exit(3)"
  start = time.monotonic()
  assert supervise.run(_plan(tmp_path, slow, bad)) == 3
  assert time.monotonic() - start < 20
  assert (tmp_path / 'logs/process_0.log').read_text() == 'slow\n'
  assert (tmp_path / 'logs/process_1.log').read_text() == 'bad\n'


def test_a_process_deaf_to_sigterm_is_killed_after_the_grace(tmp_path):
  deaf = """
      import signal, time
      signal.signal(signal.SIGTERM, signal.SIG_IGN)
      time.sleep(60)
  """
  bad = 'import time; time.sleep(0.7); exit(3)'
  start = time.monotonic()
  assert supervise.run(_plan(tmp_path, deaf, bad, grace_s=0.3)) == 3
  assert time.monotonic() - start < 20


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_training_and_nothing_restarts(tmp_path, number):
  # The whole launcher, with a training module that saves when told to stop.
  (tmp_path / 'fake_train.py').write_text(_count_starts("""
          def leave(*_):
            print('saved', flush=True)
            sys.exit(42)
          signal.signal(signal.SIGTERM, leave)
          signal.signal(signal.SIGINT, leave)
          pathlib.Path(os.environ['FOLDER'], 'ready').touch()
          time.sleep(60)
      """))
  code = textwrap.dedent(f"""
      import pathlib, sys
      from launch import plan, run
      from launch.targets import local
      request = plan.Request(pathlib.Path({str(tmp_path)!r}), ('x.gin',),
                             python=sys.executable, module='fake_train')
      sys.exit(local.submit(local.make_plan(request)))
  """)
  child = subprocess.Popen(
      [sys.executable, '-c', code],
      env={
          'PYTHONPATH': f'{_ROOT}:{tmp_path}',
          'FOLDER': str(tmp_path),
          'PATH': '',
      },
  )
  try:
    _wait_for(tmp_path / 'ready')
    child.send_signal(number)
    assert child.wait(timeout=20) == 42
  finally:
    child.kill()
  assert (tmp_path / 'starts').read_text() == '1'
  assert (tmp_path / 'logs/process_0.log').read_text() == 'saved\n'


def _dry_run(*args):
  return subprocess.run(
      [sys.executable, str(_ROOT / 'launch/run.py'), *args],
      capture_output=True,
      text=True,
      check=False,
      cwd='/',
  )


def test_dry_run_prints_the_plan_and_makes_nothing(tmp_path):
  result = _dry_run(
      f'--run_dir={tmp_path}/new',
      '--gin_file=runs/quickstart.gin',
      '--gin_bindings=HGPO.alpha = 0.5',
      '--python=py',
      '--dry_run',
      '--',
      '--alsologtostderr',
  )
  assert result.returncode == 0, result.stderr
  assert result.stdout == (
      '# target local, at most 20 restarts\n'
      f'PYTHONUNBUFFERED=1 py -m hgpo_jax.train --run_dir={tmp_path}/new '
      "--gin_file=runs/quickstart.gin '--gin_bindings=HGPO.alpha = 0.5' "
      f'--alsologtostderr >>{tmp_path}/new/logs/process_0.log 2>&1\n'
  )
  assert not (tmp_path / 'new').exists()


def test_an_unknown_target_lists_the_known_ones(tmp_path):
  result = _dry_run(
      f'--run_dir={tmp_path}', '--gin_file=a.gin', '--target=locl'
  )
  assert result.returncode == 2
  assert result.stderr.startswith(
      "--target: got 'locl'; did you mean local? The targets are: local"
  )


@pytest.mark.parametrize(
    'run_dir, more', [('file', []), ('new', ['--python=/no/python'])]
)
def test_what_cannot_be_started_is_told_in_one_line(
    tmp_path, capfd, run_dir, more
):
  (tmp_path / 'file').touch()
  argv = ['--gin_file=x', f'--run_dir={tmp_path / run_dir}', *more]
  assert run.main(argv) == 2
  (said,) = capfd.readouterr().err.splitlines()
  assert said.startswith('launch: ') and 'cannot be started' in said
  assert said.endswith('give another --run_dir or --python')


def test_an_empty_run_dir_is_refused(capfd):
  with pytest.raises(SystemExit):
    run.main(['--gin_file=x', '--run_dir='])
  assert "--run_dir: got '', expected a folder" in capfd.readouterr().err


def test_a_negative_number_of_restarts_is_refused(tmp_path):
  result = _dry_run(
      f'--run_dir={tmp_path}', '--gin_file=a.gin', '--max_restarts=-1'
  )
  assert result.returncode == 2
  assert '--max_restarts: got -1, expected >= 0' in result.stderr
