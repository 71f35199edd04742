"""`whole_file.replacing`."""

from __future__ import annotations

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
