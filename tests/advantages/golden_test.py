"""Estimators against the golden files, and the checker itself."""

from __future__ import annotations

import copy
import gzip
import json
import pathlib

import numpy as np
import pytest

from hgpo_jax.advantages import grouping
from tests import golden_check

GIVEN = pathlib.Path(__file__).parents[1] / 'golden' / 'given'
CASES = dict(golden_check.read_cases(GIVEN))


@pytest.mark.parametrize(
    'name', [name for name in CASES if not name.startswith('LOSS')]
)
def test_golden(name):
  notes = []
  assert golden_check.check_case(CASES[name], notes) == []
  assert not notes  # Unstable rows agree too.


@pytest.mark.parametrize(
    'name', [name for name in CASES if name.startswith('HGPO')]
)
def test_sizes_of_history_groups(name):
  case = CASES[name]
  inputs = golden_check.make_inputs(case)
  table = grouping.index_steps(inputs)
  want = np.array(case['expected']['level_group_size'])[table.row_U]
  keys = grouping.history_ids(
      inputs.group_N[table.row_U],
      inputs.state_N[table.row_U],
      table.step_U,
      want.shape[1],
  )
  for level, ids in enumerate(keys):
    size, inside = np.zeros(len(ids), int), ids >= 0
    size[inside] = np.bincount(ids[inside])[ids[inside]]
    np.testing.assert_array_equal(size, want[:, level])


def _write(folder, name, case):
  with gzip.open(folder / f'{name}.json.gz', 'wt') as file:
    json.dump(case, file)


def test_checker_counts_and_exits(tmp_path, capsys):
  good = CASES['GRPO_case10']
  bad = copy.deepcopy(good)
  bad['expected']['advantage'][0] += 0.01
  _write(tmp_path, 'GRPO_case10', good)
  assert golden_check.main([str(tmp_path)]) == 0
  assert capsys.readouterr().out.endswith('1 passed, 0 failed\n')
  _write(tmp_path, 'GRPO_case11', bad)
  _write(tmp_path, 'NEW_case00', good | {'algorithm': 'NEW'})
  assert golden_check.main([str(tmp_path)]) == 1
  out = capsys.readouterr().out
  assert 'FAIL GRPO_case11: 1 wrong\n  row 0: advantage' in out
  assert 'SKIP NEW_case00: no estimator named NEW yet' in out
  assert out.endswith('1 passed, 1 failed, 1 skipped\n')


def test_checker_notes_unstable_rows(tmp_path, capsys):
  case = copy.deepcopy(CASES['GRPO_case10'])
  case['expected']['advantage'][0] += 0.01
  case['unstable_rows'] = [0]
  _write(tmp_path, 'GRPO_case10', case)
  case['expected'].pop('advantage_ref_float32')
  notes = []
  assert golden_check.check_case(case, notes) == [] and len(notes) == 1
  assert golden_check.main([str(tmp_path)]) == 0  # Float32 agrees.
  case['expected']['advantage'] = [9.0] * 14
  case['unstable_rows'] = list(range(14))
  assert len(golden_check.check_case(case)) == 14
  _write(tmp_path, 'GRPO_case11', case | {'unstable_rows': [1]})
  assert golden_check.main([str(tmp_path)]) == 1
  assert '1 passed, 1 failed' in capsys.readouterr().out


def test_the_originals_flat_sample():
  case = {
      'algorithm': 'GRPO',
      'hyper': {'stats_over_steps': False, 'invalid_penalty': 0.25},
      'rows': {
          'uid': [0, 0, 0],
          'traj': [0, 0, 1],
          'step': [0, 1, 0],
          'obs': [0, 0, 0],
          'reward': [0, 0, 0],
          'episode_reward': [0, 0, 0],
          'valid': [1, 0, 1],
          'uid_table': ['u'],
          'traj_table': ['a', 'b'],
          'obs_table': ['o'],
      },
      'expected': {'advantage': [0.0, -250000.0, 0.0]},
  }
  assert golden_check.check_case(case) == []
  case['expected']['advantage'][1] = -240000.0
  assert len(golden_check.check_case(case)) == 1


def test_checker_passes_nothing_uncompared():
  loss = CASES['LOSS_case09']
  for case in (loss, CASES['PROJECTION_case00']):
    assert golden_check.check_case(case | {'expected': {}})
  more = copy.deepcopy(loss)
  more['expected']['kl/k1']['median'] = 0.0
  (wrong,) = golden_check.check_case(more)
  assert wrong == 'kl/k1 median: nothing here computes it'
  case = CASES['GRPO_case10']
  with pytest.raises(golden_check.Skipped, match='no setting new'):
    golden_check.check_case(case | {'hyper': case['hyper'] | {'new': 1}})


def test_checker_refuses_an_empty_folder(tmp_path, capsys):
  assert golden_check.main([str(tmp_path)]) == 1
  assert 'no golden files' in capsys.readouterr().out


def test_checker_finds_a_wrong_gradient():
  case = copy.deepcopy(CASES['LOSS_case09'])
  case['expected']['ppo/token-mean']['grad_log_prob'][0][0] += 1e-3
  (wrong,) = golden_check.check_case(case)
  assert wrong.startswith('ppo/token-mean gradient[0, 0]')


def test_checker_finds_a_wrong_action():
  case = copy.deepcopy(CASES['PROJECTION_case00'])
  case['expected']['webshop']['valid'][1] ^= 1
  (wrong,) = golden_check.check_case(case)
  assert wrong.startswith("webshop '<think>a</think>")


def test_a_file_that_cannot_be_read_fails_alone(tmp_path, capsys):
  _write(tmp_path, 'GRPO_case10', CASES['GRPO_case10'])
  (tmp_path / 'a.json').write_text('{"algorithm":')
  (tmp_path / 'b.json.gz').write_bytes(b'no gzip')
  (tmp_path / 'c.json').write_bytes(b'\xff\xfe')
  (tmp_path / 'd.json').mkdir()
  assert golden_check.main([str(tmp_path)]) == 1
  out = capsys.readouterr().out
  assert [out.count(f'FAIL {name}: ') for name in 'abcd'] == [1] * 4
  assert out.endswith('1 passed, 4 failed\n')
  assert golden_check.main([str(tmp_path / 'c.json')]) == 1
  assert 'which is no folder' in capsys.readouterr().out


def test_nothing_is_near_to_an_infinite_number():
  case = copy.deepcopy(CASES['GRPO_case10'])
  case['expected']['advantage'][0] = float('inf')
  assert len(golden_check.check_case(case)) == 1
