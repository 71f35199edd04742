"""The comparison of estimators: order of runs, pairing, table, equal budget."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from benchmarks import ablation
from hgpo_jax import config
from hgpo_jax.experiment import spec as spec_lib


@pytest.fixture(autouse=True)
def _clean():
  yield
  config.reset()


def _outcome(after, training=0.5):
  return ablation.Outcome(0.3, after, training, 0.25, 80.0, 3.0)


def test_all_methods_of_a_seed_come_before_the_next_seed():
  order = [*ablation.jobs(['mini', 'hard'], ['grpo', 'hgpo'], [])]
  assert [(j.setting, j.method, j.seed) for j in order[:5]] == [
      ('mini', 'grpo', 0),
      ('mini', 'hgpo', 0),
      ('hard', 'grpo', 0),
      ('hard', 'hgpo', 0),
      ('mini', 'grpo', 1),
  ]
  assert len(order) == len(set(order)) == 2 * 5 + 2 * 3
  assert len([*ablation.jobs(['hard'], ['grpo'], [4, 7])]) == 2


@pytest.mark.parametrize('setting', ablation.SETTINGS)
def test_runs_differ_in_the_estimator_and_the_seed_alone(setting):
  specs = {}
  for job in ablation.jobs([setting], list(ablation.METHODS), [3]):
    specs[job.method] = config.load(
        job.gin_files, job.bindings, root=spec_lib.Experiment
    )
  base = specs['grpo']
  assert (base.iterations, base.episodes, base.seed) == (10, 64, 3)
  assert base.minibatches.minibatch_steps == 128
  assert base.evaluation.before_training
  keys = {m: s.env.state_key for m, s in specs.items()}
  assert {m for m, key in keys.items() if key != 'observation'} == {
      'g2po',
      'graphgpo',
  }
  for spec in specs.values():
    held = dict(estimator=base.estimator, evaluation=base.evaluation)
    env = dataclasses.replace(spec.env, state_key='observation')
    assert dataclasses.replace(spec, env=env, **held) == base
    assert spec.evaluation == dataclasses.replace(
        base.evaluation, before_training=spec is base
    )
  knobs = [getattr(s.estimator, 'base', s.estimator) for s in specs.values()]
  assert {k.invalid_action_penalty for k in knobs} == {0.1}
  assert all(
      getattr(k, 'mode', 'mean_std_norm') == 'mean_std_norm' for k in knobs
  )
  assert base.estimator.norm_by_std


def test_the_hard_setting_differs_in_its_games_alone():
  mini, hard = (
      config.load(
          ablation.Job(setting, 'grpo', 0).gin_files, root=spec_lib.Experiment
      )
      for setting in ('mini', 'hard')
  )
  games = dataclasses.replace(hard.env.games, kinds=mini.env.games.kinds)
  env = dataclasses.replace(hard.env, games=games, max_steps=mini.env.max_steps)
  assert dataclasses.replace(hard, env=env) == mini
  kinds = {hard.env.split('heldout')[i].kind for i in range(256)}
  assert len(kinds) == 3 and kinds < set(mini.env.games.kinds)


def test_a_finished_run_is_read(tmp_path):
  lines = [
      {
          'iteration': i,
          'rollout/success_rate': 0.2 + 0.2 * i,
          'advantage/frac_failed_groups': 0.5 - 0.5 * i,
          'update/count': 3.0,
          'time/rollout_s': 30.0,
      }
      for i in range(2)
  ]
  lines.append(
      {'iteration': 2, 'eval/success_rate': 0.75, 'time/evaluate_s': 60.0}
  )
  for before in ({}, {'eval/success_rate': 0.25}):
    lines[0] |= before
    text = ''.join(json.dumps(line) + '\n' for line in lines)
    (tmp_path / 'metrics.jsonl').write_text(text)
    found = dataclasses.astuple(ablation.read(tmp_path))
    assert found[1:] == pytest.approx((0.75, 0.3, 0.5, 6.0, 2.0))
    assert math.isnan(found[0]) != bool(before)
  assert found[0] == 0.25


def test_differences_are_taken_seed_by_seed():
  mine = {0: _outcome(0.60), 1: _outcome(0.70), 2: _outcome(0.95)}
  theirs = {0: _outcome(0.50), 1: _outcome(0.58), 3: _outcome(0.10)}
  # Gaps of 10 and 12 points: mean 11, s = sqrt(2), t_{0.975, 1} = 12.7062.
  half = 12.7062 * np.sqrt(2) / np.sqrt(2)
  text = ablation.paired(mine, theirs, 'after')
  assert text == f'+11.0 ({11 - half:+.1f} to {11 + half:+.1f}, 2 pairs)'
  assert ablation.paired({0: _outcome(0.4)}, theirs, 'after') == '-10.0'
  assert ablation.paired({9: _outcome(0.4)}, theirs, 'after') == ''


def test_table():
  found = {
      ablation.Job('mini', method, seed): _outcome(after)
      for method, rates in (('hgpo', (0.7, 0.8)), ('grpo', (0.6, 0.7)))
      for seed, after in enumerate(rates)
  }
  found[ablation.Job('hard', 'grpo', 0)] = _outcome(0.1)
  lines = ablation.table(found, 'mini').splitlines()
  assert len({line.count('|') for line in lines}) == 1
  assert lines[2:] == [
      '| GRPO | 2 | 30.0 | 65.0 | 7.1 |  | 50.0 |  | 25 | 80 | 3.0 |',
      '| HGPO | 2 | 30.0 | 75.0 | 7.1 | +10.0 (+10.0 to +10.0) | 50.0 |'
      ' +0.0 (+0.0 to +0.0) | 25 | 80 | 3.0 |',
  ]
  page = ablation.page(found, ['cpu'])
  assert page.startswith('Same for all') and page.endswith('\n\ncpu\n')
  assert page.count('| estimator |') == 2
  assert '| GRPO | 1 | 30.0 | 10.0 |  |  |' in page
  found.pop(ablation.Job('hard', 'grpo', 0))
  assert 'household_hard' not in ablation.page(found, [])


def test_a_binding_that_is_wrong_for_one_method_is_told_before_any_trains(
    tmp_path,
):
  # GRPO takes it, GiGPO has no such field: nothing would read it there.
  bindings = ['GRPO.norm_by_std = False']
  wanted = [*ablation.jobs(['mini'], ['grpo', 'gigpo'], [0])]
  assert not ablation.finished(wanted[0], tmp_path / 'a', bindings)
  with pytest.raises(config.ConfigError, match='^gigpo in the setting mini: '):
    ablation.finished(wanted[1], tmp_path / 'b', bindings)


def test_folders_of_other_names_are_passed_over(tmp_path):
  for name in ('seed1', 'seedling', 'seed1.old'):
    (tmp_path / 'mini' / 'grpo' / name).mkdir(parents=True)
  assert ablation._seeds_of(tmp_path) == [1]
  assert ablation.page({}, []).startswith('No training has finished yet.')


def test_an_unfinished_run_is_not_in_the_table(tmp_path):
  job = ablation.Job('mini', 'grpo', 0)
  assert not ablation.finished(job, job.folder(tmp_path), [])
  assert job.folder(tmp_path) == tmp_path / 'mini' / 'grpo' / 'seed0'
