"""The comparison of estimators: order of runs, pairing, table, equal budget."""

from __future__ import annotations

import dataclasses
import json
import math
import types

from absl import flags
import numpy as np
import pytest

from benchmarks import ablation
from benchmarks import ablation_methods
from benchmarks import ablation_table
from benchmarks import bindings as bindings_lib
from benchmarks import quickstart
from hgpo_jax import config
from hgpo_jax.experiment import spec as spec_lib


def _outcome(after, training=0.5):
  return ablation_table.Outcome(0.3, after, training, 0.25, 80.0, 3.0)


def test_all_methods_of_a_seed_come_before_the_next_seed():
  two = ablation_methods.find(['grpo', 'hgpo'])
  order = [*ablation.jobs(['mini', 'hard'], two, [])]
  assert [(j.setting, j.method.name, j.seed) for j in order[:5]] == [
      ('mini', 'grpo', 0),
      ('mini', 'hgpo', 0),
      ('hard', 'grpo', 0),
      ('hard', 'hgpo', 0),
      ('mini', 'grpo', 1),
  ]
  assert len(order) == len(set(order)) == 2 * 5 + 2 * 3
  assert len([*ablation.jobs(['hard'], two[:1], [4, 7])]) == 2


@pytest.mark.parametrize('setting', ablation.SETTINGS)
def test_runs_differ_in_the_estimator_and_the_seed_alone(setting):
  specs = {}
  for job in ablation.jobs(
      [setting], [*ablation_methods.METHODS.values()], [3]
  ):
    specs[job.method.name] = config.load(
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
      'covgpo_g2po',
      'covgpo_graphgpo',
  }
  for name, spec in specs.items():
    if name.startswith('covgpo_'):
      over = specs[name.removeprefix('covgpo_')]
      assert spec.estimator.base == over.estimator and spec.env == over.env
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
          ablation.Job(setting, ablation_methods.BASELINE, 0).gin_files,
          root=spec_lib.Experiment,
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
    found = dataclasses.astuple(ablation_table.read(tmp_path))
    assert found[1:] == pytest.approx((0.75, 0.3, 0.5, 6.0, 2.0))
    assert math.isnan(found[0]) != bool(before)
  assert found[0] == 0.25
  # An estimator of one's own reports what it likes.
  del lines[0]['advantage/frac_failed_groups']
  text = ''.join(json.dumps(line) + '\n' for line in lines)
  (tmp_path / 'metrics.jsonl').write_text(text)
  found = ablation_table.read(tmp_path)
  assert math.isnan(found.failed) and found.updates == 6.0
  row = ablation_table.table({'mine': {0: found}}, 'GRPO').splitlines()[-1]
  assert row == '| mine | 1 | 25.0 | 75.0 |  |  | 30.0 |  |  | 6 | 2.0 |'


def test_differences_are_taken_seed_by_seed():
  mine = {0: _outcome(0.60), 1: _outcome(0.70), 2: _outcome(0.95)}
  theirs = {0: _outcome(0.50), 1: _outcome(0.58), 3: _outcome(0.10)}
  # Gaps of 10 and 12 points: mean 11, s = sqrt(2), t_{0.975, 1} = 12.7062.
  half = 12.7062 * np.sqrt(2) / np.sqrt(2)
  text = ablation_table.paired(mine, theirs, 'after')
  assert text == f'+11.0 ({11 - half:+.1f} to {11 + half:+.1f}, 2 pairs)'
  assert ablation_table.paired({0: _outcome(0.4)}, theirs, 'after') == '-10.0'
  assert ablation_table.paired({9: _outcome(0.4)}, theirs, 'after') == ''


def test_table():
  mini = {
      name: {seed: _outcome(after) for seed, after in enumerate(rates)}
      for name, rates in (('GRPO', (0.6, 0.7)), ('HGPO', (0.7, 0.8)))
  }
  lines = ablation_table.table(mini, 'GRPO').splitlines()
  assert len({line.count('|') for line in lines}) == 1
  assert lines[2:] == [
      '| GRPO | 2 | 30.0 | 65.0 | 7.1 |  | 50.0 |  | 25 | 80 | 3.0 |',
      '| HGPO | 2 | 30.0 | 75.0 | 7.1 | +10.0 (+10.0 to +10.0) | 50.0 |'
      ' +0.0 (+0.0 to +0.0) | 25 | 80 | 3.0 |',
  ]
  alone = ablation_table.table({'HGPO': mini['HGPO']}, 'GRPO').splitlines()
  assert alone[2:] == [
      '| HGPO | 2 | 30.0 | 75.0 | 7.1 |  | 50.0 |  | 25 | 80 | 3.0 |'
  ]
  piped = ablation_table.table({'a|b': mini['HGPO']}, 'GRPO').splitlines()
  assert piped[2].count('|') == piped[0].count('|')
  both = {'mini': mini, 'hard': {'GRPO': {0: _outcome(0.1)}}}
  page = ablation.page(both, ['cpu'])
  assert page.startswith('Same for all') and page.endswith('\n\ncpu\n')
  assert page.count('| estimator |') == 2
  assert '| GRPO | 1 | 30.0 | 10.0 |  |  |' in page
  assert 'household_hard' not in ablation.page({'mini': mini}, [])


def test_a_gin_file_of_ones_own_is_a_method(tmp_path):
  mine = tmp_path / 'hgpo_base.gin'
  mine.write_text(
      "include 'algorithms/hgpo.gin'\nHGPO.base_group = True\n"
      "AlfworldEnv.state_key = 'inventory'\n"
  )
  found = ablation_methods.find(['grpo', str(mine), str(mine)])
  assert [m.name for m in found] == ['grpo', 'hgpo_base']
  [job] = ablation.jobs(['hard'], found[1:], [7])
  assert job.folder(tmp_path) == tmp_path / 'hard' / 'hgpo_base' / 'seed7'
  spec = config.load(job.gin_files, job.bindings, root=spec_lib.Experiment)
  assert spec.estimator.base_group and spec.seed == 7
  assert spec.env.state_key == 'inventory'
  assert ablation_methods.find(
      ['algorithms/g2po.gin']
  ) == ablation_methods.find(['g2po'])


@pytest.mark.parametrize(
    'names, message',
    [
        ([], 'is empty'),
        (['grpo', 'hgp'], "'hgp' is unknown; expected some of grpo,"),
        (['mine/..gin'], "'mine/..gin' is unknown"),
        (['mine/GRPO.gin'], 'would share the folder grpo'),
        (['a/x.gin', 'b/x.gin'], 'a/x.gin would share the folder x'),
        (['CovGPO over GRPO.gin'], "share the row 'CovGPO over GRPO' of the"),
    ],
)
def test_methods_that_cannot_be_compared_are_refused(names, message):
  with pytest.raises(ValueError, match=message):
    ablation_methods.find(names)


def test_a_binding_that_is_wrong_for_one_method_is_told_before_any_trains(
    tmp_path,
):
  # GRPO takes it, GiGPO has no such field: nothing would read it there.
  bindings = ['GRPO.norm_by_std = False']
  wanted = [
      *ablation.jobs(['mini'], ablation_methods.find(['grpo', 'gigpo']), [0])
  ]
  assert not ablation.finished(wanted[0], tmp_path / 'a', bindings)
  with pytest.raises(config.ConfigError, match='^gigpo in the setting mini: '):
    ablation.finished(wanted[1], tmp_path / 'b', bindings)


@pytest.mark.parametrize(
    ('binding', 'text'),
    [
        ('Experiment.seed = 3', 'give --seeds'),
        ('Experiment.estimator = @GRPO()', 'in --methods'),
        ('Evaluation.before_training = True', 'the baseline alone'),
        ("AlfworldEnv.state_key = 'inventory'", 'that of grpo, g2po is fixed'),
    ],
)
def test_bindings_that_the_comparison_sets_are_refused(binding, text):
  compared = ablation_methods.find(['grpo', 'g2po', 'mine.gin'])
  own = ablation._own(compared)
  with pytest.raises(ValueError, match=f'is not taken from there; .*{text}'):
    bindings_lib.refuse(['AdamW.beta1 = 0.5', binding], own)
  assert 'AlfworldEnv.state_key' not in ablation._own(compared[2:])


def test_a_run_of_another_configuration_names_the_flag_of_the_comparison(
    tmp_path,
):
  job = ablation.Job('mini', ablation_methods.BASELINE, 0)
  config.load(job.gin_files, root=spec_lib.Experiment)
  config.write(tmp_path)
  with pytest.raises(config.ConfigError, match='or give another --out$'):
    ablation.finished(job, tmp_path, ['AdamW.learning_rate = 0.1'])


def test_runs_of_other_settings_are_told_before_any_trains(
    tmp_path, monkeypatch
):
  given = types.SimpleNamespace(
      out=str(tmp_path),
      settings=['mini'],
      methods=['hgpo'],
      seeds=['0'],
      gin_bindings=[],
      train=True,
  )
  monkeypatch.setattr(flags, 'FLAGS', given)
  trained = []
  monkeypatch.setattr(
      quickstart, 'train', lambda run_dir, *rest: trained.append(run_dir)
  )

  def refuse(job, run_dir, bindings):
    if job.method == ablation_methods.BASELINE:
      raise config.ConfigError('of another configuration')
    return False

  monkeypatch.setattr(ablation, 'finished', refuse)
  # Its run lies there, and it is not asked for.
  ablation.Job('mini', ablation_methods.BASELINE, 0).folder(tmp_path).mkdir(
      parents=True
  )
  with pytest.raises(SystemExit, match='another configuration'):
    ablation.main(['x'])
  assert not trained


def test_folders_of_other_names_are_passed_over(tmp_path):
  for name in ('seed1', 'seedling', 'seed1.old'):
    (tmp_path / 'mini' / 'grpo' / name).mkdir(parents=True)
  assert ablation._seeds_of(tmp_path) == [1]
  assert not ablation._passed_over(tmp_path, [ablation_methods.BASELINE])
  [line] = ablation._passed_over(tmp_path, [])
  assert line.startswith('Not in a table: runs of `grpo`; name its gin file')
  assert ablation.page({}, []).startswith('No training has finished yet.')


def test_an_unfinished_run_is_not_in_the_table(tmp_path):
  job = ablation.Job('mini', ablation_methods.BASELINE, 0)
  assert not ablation.finished(job, job.folder(tmp_path), [])
  assert job.folder(tmp_path) == tmp_path / 'mini' / 'grpo' / 'seed0'
