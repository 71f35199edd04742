from __future__ import annotations

import logging
import math
import sys
import types as python_types

import pytest

from hgpo_jax.io import metrics as metrics_lib


def _open(folder, first=0, **kwargs):
  spec = metrics_lib.Logging(**{'tensorboard': False, **kwargs})
  return spec.open(folder, first, iterations=10)


def _write(folder, first, last, **kwargs):
  with _open(folder, first, **kwargs) as writer:
    for i in range(first, last):
      writer.write(i, {'loss/total': i / 3, 'rollout/success_rate': 0.1 * i})


def test_a_killed_and_resumed_file_equals_an_uninterrupted_one(tmp_path):
  _write(tmp_path / 'whole', 0, 6)
  _write(tmp_path / 'killed', 0, 5)
  path = tmp_path / 'killed' / metrics_lib.JSONL
  with open(path, 'a', encoding='utf-8') as file:
    file.write('{"iteration": 5, "loss/to')  # Cut off by the kill.
  _write(tmp_path / 'killed', 3, 6)  # The last checkpoint was of iteration 2.
  expected = (tmp_path / 'whole' / metrics_lib.JSONL).read_bytes()
  assert path.read_bytes() == expected
  assert [line['iteration'] for line in metrics_lib.read(path.parent)] == [
      *range(6)
  ]


def test_each_line_is_there_before_the_next_iteration(tmp_path):
  writer = _open(tmp_path)
  writer.write(0, {'loss/total': 0.1})
  assert metrics_lib.read(tmp_path) == [{'iteration': 0, 'loss/total': 0.1}]
  writer.close()


def test_values_that_are_not_finite_become_null_with_a_warning(
    tmp_path, caplog
):
  with _open(tmp_path) as writer, caplog.at_level(logging.WARNING, 'absl'):
    writer.write(0, {'loss/total': math.nan, 'update/grad_norm': math.inf})
  assert metrics_lib.read(tmp_path) == [
      {'iteration': 0, 'loss/total': None, 'update/grad_norm': None}
  ]
  assert 'loss/total=nan, update/grad_norm=inf' in caplog.text


def test_a_gap_after_resuming_is_warned_of(tmp_path, caplog):
  _write(tmp_path, 0, 2)
  with caplog.at_level(logging.WARNING, 'absl'):
    _open(tmp_path, 5).close()
  assert 'of iteration 1, but the run goes on with iteration 5' in caplog.text


@pytest.mark.parametrize('name', ['lost/total', 'loss', 'Loss/x', 'loss/ x'])
def test_names_without_a_known_prefix_are_refused(tmp_path, name):
  with _open(tmp_path) as writer:
    with pytest.raises(ValueError, match='expected prefix/what with a prefix'):
      writer.write(0, {name: 1.0})


def test_an_iteration_is_written_once(tmp_path):
  with _open(tmp_path) as writer:
    writer.write(0, {'loss/total': 0.1})
    with pytest.raises(ValueError, match='iteration 0 are already written'):
      writer.write(0, {'loss/total': 0.1})


def test_tensorboard_holds_the_curve(tmp_path):
  _write(tmp_path, 0, 3, tensorboard=True)
  (events,) = (tmp_path / 'tensorboard').iterdir()
  assert events.read_bytes().count(b'rollout/success_rate') == 3


def test_wandb_is_asked_for_by_name_only(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'wandb', None)
  _write(tmp_path, 0, 1)
  with pytest.raises(ImportError, match=r"bind Logging.wandb_project = ''"):
    _open(tmp_path, wandb_project='household')
  # The folder of its logs, seen from where they were made.
  monkeypatch.setitem(sys.modules, 'wandb', python_types.ModuleType('wandb'))
  with pytest.raises(ImportError, match='but wandb is not installed'):
    _open(tmp_path, wandb_project='household')


def test_wandb_gets_finite_values_and_resumes_by_folder_name(
    tmp_path, monkeypatch
):
  calls = []
  run = python_types.SimpleNamespace(
      log=lambda values, step: calls.append((step, values)),
      finish=lambda: calls.append('finish'),
  )
  fake = python_types.ModuleType('wandb')
  fake.init = lambda **kwargs: calls.append(kwargs) or run
  monkeypatch.setitem(sys.modules, 'wandb', fake)
  with _open(tmp_path / 'run7', wandb_project='household') as writer:
    writer.write(4, {'loss/total': math.nan, 'loss/kl': 0.5})
  assert calls[0]['id'] == 'run7' and calls[0]['resume'] == 'allow'
  assert calls[1:] == [(4, {'loss/kl': 0.5}), 'finish']


def test_the_progress_line_is_for_terminals(tmp_path, monkeypatch, capsys):
  _write(tmp_path, 0, 2)
  assert capsys.readouterr().err == ''
  monkeypatch.setattr(sys.stderr, 'isatty', lambda: True, raising=False)
  _write(tmp_path, 2, 4)
  assert 'rollout/success_rate=0.3' in capsys.readouterr().err
