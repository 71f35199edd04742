"""The table and the picture of the fidelity study."""

from __future__ import annotations

import json
import math
import pathlib
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from benchmarks import credit_fidelity
from benchmarks import fidelity_plot
from benchmarks import fidelity_table
from hgpo_jax import config
from hgpo_jax.credit import fidelity
from hgpo_jax.credit import probes
from hgpo_jax.experiment import spec as spec_lib

_FOUND = {name: fidelity.Interval(0.5, 0.25, 0.75) for name in fidelity.NAMES}
_TABLE = {
    'grpo': {4: _FOUND, 8: _FOUND},
    'g2po': {
        4: _FOUND,
        8: _FOUND | {'sign': fidelity.Interval(*[math.nan] * 3)},
    },
    fidelity.CEILING: {0: _FOUND},
}


def test_the_table_and_the_picture_are_written(tmp_path):
  gaps = {'g2po': {4: _FOUND | {'rank': fidelity.Interval(-0.1, -0.2, 0.1)}}}
  comparison = fidelity.Comparison(_TABLE, gaps)
  result = fidelity_table.Result(0.25, 12, 120.0, 0.125, comparison)
  credit_fidelity.write(
      {'low': result}, probes.Design(tasks=3), fidelity.Study(), tmp_path
  )
  text = (tmp_path / 'fidelity.md').read_text()
  assert '## low\n\nSuccess 25 %, 12 steps, 2 minutes' in text
  assert 'a bias² of 0.12' in text
  rows = [line for line in text.splitlines() if line.startswith('| g')]
  assert len(rows) == 5 and rows[0].count('0.50 (0.25 to 0.75)') == 5
  assert rows[3].count('–') == 1
  assert '### low, minus grpo in the same groups' in text
  assert rows[4].count('+0.50 (+0.25 to +0.75)') == 4
  assert '-0.10 (-0.20 to +0.10)' in rows[4]
  picture = ElementTree.parse(tmp_path / 'fidelity.svg').getroot()
  dots = picture.findall('.//{*}circle')
  # Two figures of two estimators at two sizes, and the legend.
  assert len(dots) == 2 * 2 * 2 + 2
  width = float(picture.get('width'))
  assert all(0 < float(dot.get('cx')) < width for dot in dots)


def test_values_off_the_axis_stay_on_the_picture():
  off = {4: {'rank': fidelity.Interval(-0.9, -1.0, 2.0)}}
  picture = fidelity_plot.draw({'a < b': {'x': off}}, {'rank': 'rank'})
  root = ElementTree.fromstring(picture)
  xs = [float(e.get('x1')) for e in root.findall('.//{*}line')]
  assert min(xs) > 0 and 'a &lt; b' in picture


def test_bad_settings_are_refused(tmp_path):
  assert credit_fidelity.policies_of(['a=b=c']) == {'a': 'b=c'}
  with pytest.raises(ValueError, match='policy=low; expected --policy=name='):
    credit_fidelity.policies_of(['low'])
  for name in ('', 'a/b', '..', '/tmp'):
    with pytest.raises(ValueError, match='expected --policy=name='):
      credit_fidelity.policies_of([f'{name}=folder'])
  with pytest.raises(ValueError, match='a=y, and a is x already'):
    credit_fidelity.policies_of(['a=x', 'a=y'])


def test_episodes_of_other_studies_are_not_mixed(tmp_path):
  keep = lambda **settings: credit_fidelity._keep_to(tmp_path, settings)
  keep(low='tpyo', tasks=2)
  # Nothing was played, so there is nothing to mix.
  keep(low='typo', tasks=2)
  part = tmp_path / 'rollouts' / 'low' / '000_00000.jsonl.gz'
  part.parent.mkdir(parents=True)
  part.touch()
  keep(low='typo', tasks=2)
  with pytest.raises(ValueError, match="low: 'typo' in the run, 'x' now\n"):
    keep(low='x', tasks=2)
  with pytest.raises(
      ValueError, match="split: '\\(absent\\)' in the run, 1 now"
  ):
    keep(low='typo', tasks=2, split=1)


@pytest.mark.parametrize('content', ['', '{', '[]', 'null', '3', None])
def test_episodes_of_an_unknown_study_are_not_mixed(tmp_path, content):
  part = tmp_path / 'rollouts' / 'low' / '000_00000.jsonl.gz'
  part.parent.mkdir(parents=True)
  part.touch()
  if content is not None:
    (tmp_path / 'study.json').write_text(content)
  with pytest.raises(ValueError, match='study.json does not say .* --out'):
    credit_fidelity._keep_to(tmp_path, {'tasks': 2})


@pytest.mark.parametrize(
    ('binding', 'flag'),
    [
        ("HGPO.mode = 'mean_norm'", '--estimator'),
        ('hgpo_jax.advantages.hgpo.HGPO.alpha = 0.5', '--estimator'),
        ('Experiment.seed=3', '--seed'),
        ('Experiment.group_size = 4', '--group_sizes'),
    ],
)
def test_bindings_that_nothing_would_read_are_refused(binding, flag):
  with pytest.raises(ValueError, match=f'is not taken from there; .*{flag}$'):
    credit_fidelity._load('runs/quickstart.gin', [binding])
  spec = credit_fidelity._load(
      'runs/quickstart.gin', ['Experiment.temperature = 0.5']
  )
  assert spec.temperature == 0.5


def test_a_study_is_of_its_design_games_prompts_and_sampler():
  def load(*bindings, policy='x', **design):
    spec = config.load(
        ['runs/quickstart.gin'], bindings, root=spec_lib.Experiment
    )
    return credit_fidelity._settings(
        {'low': policy}, spec, probes.Design(**design)
    )

  base = load()
  for other in (
      'AlfworldEnv.max_steps = 3',
      'Experiment.temperature = 0.5',
      "Experiment.split = 'heldout'",
  ):
    assert load(other) != base
  assert load(policy='y') != base and load(tasks=2) != base
  assert load('Experiment.iterations = 3', 'AdamW.learning_rate = 0.1') == base
  assert json.loads(json.dumps(base)) == base
  assert base['env.max_steps'] == 20 and base['temperature'] == 1.0
  assert base['policy.low'] == 'x' and base['design.probes'] == 3


def test_what_would_fail_after_hours_fails_at_once(tmp_path):
  spec = config.load(['runs/quickstart.gin'], root=spec_lib.Experiment)
  config.reset()
  run = lambda policies, pool: credit_fidelity.study(
      policies,
      {},
      spec,
      probes.Design(pool=pool),
      fidelity.Study(group_sizes=(4, 16)),
      tmp_path,
  )
  with pytest.raises(
      ValueError, match='--pool=8 is too small for --group_sizes=4,16; .* 15,'
  ):
    run({}, 8)
  # The last of the policies, before the first one plays.
  (tmp_path / 'empty').mkdir()
  for folder in ('empty', 'absent'):
    with pytest.raises(FileNotFoundError, match=folder):
      run({'low': 'tiny_household', 'high': str(tmp_path / folder)}, 15)
  assert not (tmp_path / 'study.json').exists()


def test_file_names_and_unknown_figures_do_not_break_the_page():
  unknown = dict.fromkeys(fidelity.NAMES, fidelity.Interval(*[math.nan] * 3))
  comparison = fidelity.Comparison({'a|b': {4: unknown}}, {})
  result = fidelity_table.Result(0.0, 2, 6.0, math.nan, comparison)
  page = fidelity_table.markdown(
      {'low': result}, probes.Design(), fidelity.Study()
  )
  assert 'All measured advantages are 0' in page and 'nan' not in page
  assert len({x.count('|') for x in page.splitlines() if x[:1] == '|'}) == 1


def test_a_design_that_cannot_be_is_told_in_a_line(tmp_path):
  command = [sys.executable, '-m', 'benchmarks.credit_fidelity']
  done = subprocess.run(
      [*command, f'--out={tmp_path}', '--continuations=5'],
      cwd=pathlib.Path(__file__).resolve().parent.parent,
      capture_output=True,
      text=True,
  )
  assert done.returncode == 1
  assert done.stderr.startswith('error: continuations is 5; expected an even')
