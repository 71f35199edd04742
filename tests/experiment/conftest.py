"""One tiny policy and one finished run for the whole folder."""

from __future__ import annotations

from collections.abc import Iterator
import pathlib
import signal

import jax
import pytest

from tests.experiment import runs
from tests.experiment import tiny_policy


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
  """No test leaves its signal handlers to the next."""
  numbers = (signal.SIGTERM, signal.SIGINT)
  handlers = [signal.getsignal(number) for number in numbers]
  yield
  for number, handler in zip(numbers, handlers):
    signal.signal(number, handler)


@pytest.fixture(scope='session')
def policy(tmp_path_factory) -> pathlib.Path:
  """Folder of the policy."""
  return tiny_policy.make(tmp_path_factory.mktemp('policy') / 'tiny')


@pytest.fixture
def one_device(monkeypatch) -> None:
  """A machine with one device."""
  _use_one_device(monkeypatch)


@pytest.fixture(scope='session')
def finished(policy, tmp_path_factory) -> pathlib.Path:
  """Folder of a run of two iterations, seed 0, on one device."""
  run_dir = tmp_path_factory.mktemp('runs') / 'finished'
  with pytest.MonkeyPatch.context() as patch:
    _use_one_device(patch)
    runs.train(policy, run_dir, 'Experiment.iterations = 2')
  return run_dir


def _use_one_device(patch: pytest.MonkeyPatch) -> None:
  first = jax.devices()[:1]
  patch.setattr(jax, 'devices', lambda *unused: list(first))
  patch.setattr(jax, 'device_count', lambda *unused: 1)
