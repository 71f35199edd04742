"""The entry point that plans, in one process."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from absl import flags
import pytest

from hgpo_jax import plan
from hgpo_jax import sharding

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_QUICKSTART = '--gin_file=runs/quickstart.gin'


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
      [sys.executable, '-m', 'hgpo_jax.plan', *arguments],
      cwd=_ROOT,
      env=os.environ | {'PYTHONPATH': str(_ROOT)},
      capture_output=True,
      text=True,
      check=False,
  )


def test_a_model_and_a_slice_are_enough():
  done = _run(
      *('--model=3b', '--tpu=v6e-16', '--mesh=fsdp=8,tensor=2'),
      *('--rollout_mesh=tensor=2', '--int8_rollout', '--sampler_rows=64'),
  )
  assert done.returncode == 0, done.stderr
  assert (
      'mesh      data=1 fsdp=8 tensor=2, sampling on data=8 fsdp=1 tensor=2\n'
      in done.stdout
  )
  assert 'steps of 64 rows, kernels in int8; ' in done.stdout
  assert 'fits' in done.stdout and 'tokens/s' in done.stdout


def test_a_run_is_planned_with_its_own_knobs():
  done = _run(_QUICKSTART, '--devices=a100')
  assert done.returncode == 0, done.stderr
  assert '128 episodes of at most 20 steps, 208 + 16 tokens' in done.stdout
  assert '32 rows of 224 tokens' in done.stdout


def test_a_mistake_is_one_line():
  done = _run('--model=1.5b', '--devices=h100x8', '--mesh=fsdp=2,tensor=4')
  assert done.returncode == 1
  assert done.stderr.strip().splitlines()[-1] == (
      "error: The mesh splits 'kv_heads' (2) over tensor=4, but 2 is not"
      ' divisible by 4. Set Mesh.tensor so that the product divides 2.'
  )


def test_a_mesh_of_its_own_for_sampling():
  flags = '--model=7b', '--tpu=v5e-8', '--mesh=fsdp=8'
  done = _run(*flags, '--rollout_mesh=tensor=4')
  assert 'fsdp=8 tensor=1, sampling on data=2 fsdp=1 tensor=4' in done.stdout
  done = _run(*flags, '--rollout_mesh=tensor=3')
  assert 'RolloutMesh(data=-1, fsdp=1, tensor=3): the product' in done.stderr


def test_devices_are_named_once():
  done = _run('--model=1.5b', '--tpu=v5e-8', '--gpu=h100x8')
  assert done.returncode == 1
  assert done.stderr.strip().splitlines()[-1] == (
      'error: --devices (or --tpu, --gpu) is given 2 times; expected once, such'
      ' as --devices=v5e-64 or --devices=h100x8'
  )


@pytest.mark.parametrize(
    'arguments, text',
    [
        (['--rows=0'], 'rows is 0; expected at least 1'),
        (['--response=0'], 'response is 0; expected at least 1'),
        (['--episodes=-1'], 'episodes is -1; expected at least 1'),
        (['--sampler_rows=-3'], 'sampler_rows is -3; expected at least 1'),
        (['--prefill_block=0'], 'prefill_block is 0; expected at least 1'),
        (
            ['--prefill_tokens=1'],
            'prefill_tokens is 1; expected a multiple of prefill_block = 128',
        ),
        (
            ['--mesh=fsdp=1,fsdp=1'],
            "'fsdp=1,fsdp=1': 'fsdp=1' is not one of data=N, fsdp=N, tensor=N,"
            ' each once',
        ),
        (
            ['--gin_bindings=PPOLoss.kl_coef = 0.0'],
            '--gin_bindings needs the --gin_file that it changes',
        ),
        (
            [_QUICKSTART, '--rows=4', '--int8_rollout'],
            "--rows, --int8_rollout: with --gin_file that is the run's own; bind"
            ' its knob with --gin_bindings instead',
        ),
    ],
)
def test_a_flag_that_means_nothing_is_refused(arguments, text):
  """In this process: each is seconds of its own."""
  found = _main('--model=tiny', '--devices=a100', *arguments)
  assert found == f'error: {text}'


def _main(*arguments: str) -> str:
  """Runs the entry point here; the message that it ends with, '' if none."""
  known = flags.FLAGS
  try:
    known(['plan', *arguments])
    plan.main(['plan'])
  except SystemExit as end:
    return str(end.code)
  finally:
    known.unparse_flags()
    for flag in known.get_key_flags_for_module(plan):
      flag.unparse()
  return ''


def test_a_mesh_as_text():
  assert plan.axes('') == {}
  assert plan.axes('data=2,fsdp=-1') == {'data': 2, 'fsdp': -1}
  assert sharding.Mesh(**plan.axes('tensor=2')).shape(8) == (1, 4, 2)
  assert sharding.Mesh(**plan.axes('data=-1')).shape(8) == (8, 1, 1)
  sampled_on = plan.axes('tensor=2', rest='data')
  assert sharding.RolloutMesh(**sampled_on).shape(8) == (4, 1, 2)
  with pytest.raises(ValueError, match="'pipe=2' is not one of data=N, fsdp"):
    plan.axes('data=2,pipe=2')
