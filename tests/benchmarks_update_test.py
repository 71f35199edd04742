"""The comparison of updates: its table, and what it refuses to compare."""

from __future__ import annotations

import pathlib

import pytest

from benchmarks import sampler
from benchmarks import update
from benchmarks import update_torch
from benchmarks import update_tunix


def _found(loss):
  keys = ('cpu_s', 'peak_mb', 'peak_above_start_mb')
  numbers = lambda size, loss: {
      **dict.fromkeys(keys, size),
      'loss': [0.5, loss],
      'grad_norm': [2.0, 1.0],
  }
  ways = [*update_torch.WAYS, *update_tunix.WAYS]
  theirs = {way: numbers(4.0, 0.25) for way in ways}
  return {'ours': numbers(3.0, loss), **theirs}


def test_the_table_has_ours_over_theirs():
  lines = update.table(_found(0.25001)).splitlines()
  assert len(lines) == 3 + len(update_torch.WAYS) + len(update_tunix.WAYS)
  assert lines[2] == '| ours | 3.00 | 1.00 | 3 | 1.00 | 3 | 1.00 |'
  assert lines[3].endswith(
      'checkpointing | 4.00 | 0.75 | 4 | 0.75 | 4 | 0.75 |'
  )
  assert lines[-1].startswith('| tunix, no remat | 4.00 | 0.75 |')


def test_each_peer_has_a_program_and_an_environment():
  assert update.PEERS.keys() <= sampler.SIDES.keys()
  for program, ways, _ in update.PEERS.values():
    assert pathlib.Path(program).is_file() and ways


def test_updates_that_differ_are_not_compared():
  with pytest.raises(AssertionError, match='loss of ours and of torch, ch'):
    update.table(_found(0.26))


def test_memory_of_this_process_is_read():
  step = lambda: (1.0, 2.0)
  found = update_torch.timed(step, 2, start_mb=1.0)
  assert len(found['loss']) == 4 and found['peak_mb'] > 10.0
  assert found['peak_above_start_mb'] == found['peak_mb'] - 1.0
