"""`whole_file.replacing`."""

from __future__ import annotations

import os

import pytest

from hgpo_jax import whole_file


def test_the_file_is_new_whole_or_as_it_was(tmp_path):
  path = tmp_path / 'new folder' / 'file'
  with whole_file.replacing(path) as partial:
    partial.write_text('old')
    assert not path.exists()
  with pytest.raises(OSError, match='disk is full'):
    with whole_file.replacing(str(path)) as partial:
      partial.write_text('ne')
      raise OSError('the disk is full')
  assert path.read_text() == 'old'
  with whole_file.replacing(path) as partial:
    partial.write_text('new')
  assert path.read_text() == 'new'
  assert [p.name for p in path.parent.iterdir()] == ['file']


def test_an_error_of_writing_names_the_file(tmp_path):
  path = tmp_path / 'file'
  with pytest.raises(OSError, match=f'No space left on device: .{path}'):
    with whole_file.replacing(path) as partial:
      partial.symlink_to('/dev/full')
      partial.write_text('x')
  assert not list(tmp_path.iterdir())


def test_a_device_or_a_pipe_is_not_replaced(tmp_path):
  path = tmp_path / 'pipe'
  os.mkfifo(path)
  with pytest.raises(OSError, match='--out=.*device or a pipe.*give a file'):
    whole_file.check(path, '--out')
  with pytest.raises(OSError, match='device or a pipe'):
    with whole_file.replacing(path) as partial:
      partial.write_text('x')
  assert path.is_fifo() and [p.name for p in tmp_path.iterdir()] == ['pipe']


def test_whether_a_file_can_be_written_is_known_before(tmp_path):
  path = tmp_path / 'new folder' / 'file'
  whole_file.check(path, '--out')
  assert not list(path.parent.iterdir())
  with pytest.raises(OSError, match='--out=.* is a folder; give a file in it'):
    whole_file.check(path.parent, '--out')
  path.write_text('x')
  for closed in (path / 'inside', '/proc/closed/file'):
    with pytest.raises(OSError, match=f'--out={closed} cannot be written to'):
      whole_file.check(closed, '--out')
