"""Every test runs on eight virtual CPU devices, with a compilation cache."""

from __future__ import annotations

import gc
import os
import pathlib
import signal
import tempfile

import pytest

from hgpo_jax import config

# Set before jax is imported, and inherited by the processes of tests.
_XLA_FLAGS = {
    '--xla_force_host_platform_device_count': 8,
    # Eight devices on two busy cores may be late; by default XLA aborts.
    '--xla_cpu_collective_call_terminate_timeout_seconds': 600,
}
_given = os.environ.get('XLA_FLAGS', '')
_added = [f'{k}={v}' for k, v in _XLA_FLAGS.items() if k not in _given]
os.environ['XLA_FLAGS'] = ' '.join([_given, *_added]).strip()
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
_cache = pathlib.Path(tempfile.gettempdir()) / f'hgpo_jax_{os.getuid()}_xla'
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(_cache))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.5')
os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')
# What the package keeps between runs; also of the processes of tests.
_kept = pathlib.Path(tempfile.gettempdir()) / f'hgpo_jax_{os.getuid()}_cache'
os.environ['XDG_CACHE_HOME'] = str(_kept)

# A shell ignores Ctrl-C for what it starts in the background, and children
# inherit that; tests of Ctrl-C need it as it is in the foreground.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
  signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope='module', autouse=True)
def _leave_no_tasks():
  """Tasks that orbax gave up are reported when they are collected.

  The report parses source, and where that happens within another parse, as in
  a test of imports, Python 3.11 raises SystemError. So they go here.
  """
  yield
  gc.collect()


@pytest.fixture(autouse=True)
def _leave_no_bindings():
  """gin is global: what a test has loaded must not bind in the next one."""
  yield
  config.reset()
