"""What the inspector's page shows, and that a browser shows it."""

from __future__ import annotations

import dataclasses
import gzip
import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from hgpo_jax.advantages import base
from hgpo_jax.advantages import covgpo
from hgpo_jax.advantages import g2po
from hgpo_jax.advantages import grpo
from hgpo_jax.advantages import hgpo
from hgpo_jax.credit import agreement
from hgpo_jax.credit import inspector
from hgpo_jax.credit import levels
from hgpo_jax.credit import methods
from hgpo_jax.credit import page
from hgpo_jax.credit import report
from hgpo_jax.credit import state_graph
from hgpo_jax.io import trajectories as trajectories_io
from tests.credit import browser
from tests.credit import episodes

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_ESTIMATORS = {
    'hgpo': hgpo.HGPO(),
    'grpo': grpo.GRPO(),
    'g2po': g2po.G2PO(),
    'covgpo_hgpo': covgpo.CovGPO(base=hgpo.HGPO(), level='step'),
}


@pytest.fixture(scope='module', name='data')
def _data():
  return inspector.data(episodes.two_tasks(), _ESTIMATORS)


def test_every_gin_file_is_a_method_and_equal_estimators_are_shown_once():
  found = methods.load()
  assert found['grpo'] == grpo.GRPO()
  assert {'g2po', 'covgpo_hgpo', 'progpo'} <= set(found)
  assert not {'gspo', 'dapo'} & set(found)
  assert len(set(found.values())) == len(found)


def test_levels_are_those_that_the_estimator_used():
  inputs, _ = levels.in_order(episodes.two_tasks())
  found = levels.measure(hgpo.HGPO(base_group=True), inputs)
  assert list(found.levels) == ['episode', 'level1', 'level2', 'level3']
  # Steps from room 4 times, from shelf 3 times, from sink twice.
  assert found.levels['episode'].size_N[:9].tolist() == [9] * 9
  sizes = [4, 3, 2] + [4, 2, 4, 3] + [4, 3]
  assert found.levels['level1'].size_N[:9].tolist() == sizes
  alone = levels.measure(hgpo.HGPO(history_length=0), inputs)
  level = alone.levels['level1'].value_N
  np.testing.assert_allclose(alone.advantage_N, level, atol=1e-5)


def test_coverage_is_what_covgpo_added():
  failed = [
      dataclasses.replace(
          t,
          success=False,
          steps=tuple(dataclasses.replace(s, reward=0.0) for s in t.steps),
      )
      for t in episodes.two_tasks()
  ]
  inputs, _ = levels.in_order(failed)
  found = levels.measure(_ESTIMATORS['covgpo_hgpo'], inputs)
  level = found.levels['coverage']
  assert np.abs(level.value_N).max() > 0.1
  base_N, _ = hgpo.HGPO()(inputs)
  np.testing.assert_array_equal(base_N + level.value_N, found.advantage_N)


def test_columns_and_episodes_name_the_same_rows(data):
  steps, tasks = data['steps'], data['tasks']
  assert data['aborted'] == 1 and len(steps['step']) == 17
  assert [t['group'] for t in tasks] == [0, 3]
  for index, task in enumerate(tasks):
    for episode in task['episodes']:
      rows = slice(episode['first'], episode['first'] + episode['steps'])
      assert steps['step'][rows] == list(range(episode['steps']))
      assert set(steps['task'][rows]) == {index}
  last = steps['texts'][steps['next'][2]]
  assert (last, steps['actions'][steps['action'][2]]) == ('end', 'go to end')
  assert json.dumps(data, allow_nan=False)


def test_the_graph_has_g2pos_values_by_hand():
  inputs, steps = levels.in_order(episodes.two_tasks())
  credit = levels.measure(g2po.G2PO(), inputs).levels['edge'].value_N
  graph = state_graph.build(
      inputs, 0, [s.action for s in steps], {'edge': credit}, g2po.G2PO()
  )
  by_label = {node.label: node for node in graph.nodes}
  start = by_label['start']
  # Four visits of 'room', one of them by the episode of three that solved it.
  assert start.value == pytest.approx(0.95**3 * 10 / 4)
  assert (start.visits, start.episodes, start.column) == (4, 3, 0)
  assert start.solved == pytest.approx(1 / 3)
  assert by_label['solved'].value == 10.0
  assert by_label['not solved'].visits == 2
  assert by_label['solved'].column == 1 + max(
      n.column for n in graph.nodes if n.state >= 0
  )
  edges = {
      (graph.nodes[e.source].label, graph.nodes[e.target].label): e
      for e in graph.edges
  }
  edge = edges['start', 'go to shelf']
  assert edge.rows == (0, 5, 7)
  assert edge.credit['edge'] == pytest.approx(credit[[0, 5, 7]].mean())
  places = {(n.column, n.row) for n in graph.nodes}
  assert len(places) == len(graph.nodes), 'two nodes in one place'


def test_agreement_by_hand():
  found = agreement.compare(
      {
          'a': np.array([1.0, 2.0, -3.0, 0.0]),
          'b': np.array([1.0, -2.0, -3.0, 1.0]),
          'minus a': np.array([-1.0, -2.0, 3.0, 0.0]),
      }
  )
  # Ranks of a: 3 4 1 2; of b: 3.5 2 1 3.5.
  x, y = np.array([3, 4, 1, 2]) - 2.5, np.array([3.5, 2, 1, 3.5]) - 2.5
  rho = (x * y).sum() / np.sqrt((x**2).sum() * (y**2).sum())
  assert found.rank_EE[0, 1] == pytest.approx(rho)
  assert found.rank_EE[0, 2] == pytest.approx(-1.0)
  assert found.opposed_EE[0].tolist() == [0.0, 0.25, 0.75]
  assert found.one_silent_EE[0].tolist() == [0.0, 0.25, 0.0]


def test_the_page_asks_for_nothing_and_survives_any_text(data):
  text = page.render(data, '<i>title</i>')
  assert '<i>title' not in text and '</script><b>' not in text
  assert text.count('</script>') == 2
  # What a browser would fetch. The name of SVG in scripts is no address.
  assert not re.search(r'(src|href)="(?!#)|@import|url\(', text)
  assert set(re.findall(r'https?://[^\'"\s]+', text)) == {
      'http://www.w3.org/2000/svg'
  }
  assert not re.search(r'@\w+@', text)


def test_marks_of_the_page_in_a_title_are_text(data):
  text = page.render(data, '@data@ @script@')
  assert '<title>Credit inspector · @data@ @script@</title>' in text
  assert text.count('id="data"') == 1 and text.count('</script>') == 2


class Broken:
  """No dataclass is needed to fail."""

  def __init__(self, found):
    self._found = found

  def __call__(self, inputs):
    return self._found(inputs), {}


def test_what_an_estimator_gets_wrong_is_said_with_its_name():
  nan = Broken(lambda inputs: inputs.outcome_N * np.nan)
  with pytest.raises(base.EstimatorError, match='mine: Broken returned nan'):
    inspector.data(episodes.two_tasks(), {'mine': nan})
  writes = Broken(lambda inputs: inputs.outcome_N.sort())
  place = r'mine: .*read-only \(.*inspector_test\.py:\d+\)'
  with pytest.raises(ValueError, match=place):
    inspector.data(episodes.two_tasks(), {'mine': writes})


def test_given_files_are_all_shown(tmp_path):
  mine = []
  for folder, alpha in (('a', 0.5), ('b', 1.0)):
    (tmp_path / folder).mkdir()
    path = tmp_path / folder / 'mine.gin'
    path.write_text(f"include 'algorithms/hgpo.gin'\nHGPO.alpha = {alpha}\n")
    mine.append(str(path))
  same = ['algorithms/grpo.gin', 'algorithms/gspo.gin']
  found = methods.load([*mine, *same])
  assert list(found) == [*mine, 'grpo', 'gspo']
  assert [found[name].alpha for name in mine] == [0.5, 1.0]
  with pytest.raises(ValueError, match='in envs/household_mini.gin; expected'):
    methods.load(['envs/household_mini.gin'])


def test_the_page_of_the_documentation_holds(tmp_path):
  text = (_ROOT / 'docs' / 'credit.md').read_text()
  (gin_file,) = re.findall(r'```\n(include .*?)```', text, re.S)
  (tmp_path / 'cov_g2po.gin').write_text(gin_file)
  found = methods.load([str(tmp_path / 'cov_g2po.gin')])['cov_g2po']
  assert found == covgpo.CovGPO(base=g2po.G2PO(shrinkage=1.0), level='step')
  table = text.split('| level | of |')[1]
  inputs, _ = levels.in_order(episodes.two_tasks())
  for estimator in methods.load().values():
    _, metrics = base.estimate(estimator, inputs)
    for name in metrics:
      if level := re.fullmatch(r'advantage/(\w+)_mean_group_size', name):
        if level[1] != 'level3':
          assert f'`{level[1]}`' in table, name


def test_the_episodes_are_not_replaced_by_their_page(tmp_path):
  source = _write(tmp_path / 'a.jsonl.gz', episodes.two_tasks())
  before = source.read_bytes()
  with pytest.raises(ValueError, match='is the file of episodes itself'):
    report.write(source, tmp_path / '.' / 'a.jsonl.gz')
  assert source.read_bytes() == before


def test_a_reward_that_cannot_be_compared_is_said_with_its_file(tmp_path):
  for reward, text in ((float('nan'), 'reward is nan'), (1e30, 'is 1e+30')):
    played = episodes.two_tasks()
    steps = played[1].steps
    steps = (dataclasses.replace(steps[0], reward=reward), *steps[1:])
    played[1] = dataclasses.replace(played[1], steps=steps)
    source = _write(tmp_path / 'a.jsonl.gz', played)
    with pytest.raises(ValueError) as caught:
      report.write(source, tmp_path / 'out.html', ['algorithms/grpo.gin'])
    assert str(source) in str(caught.value) and text in str(caught.value)
    assert 'trajectory 1, step 0' in str(caught.value)


def _write(path, trajectories):
  trajectories_io.save(path, trajectories)
  return path


def test_bad_files_are_refused_in_a_line(tmp_path):
  whole = _write(tmp_path / 'a.jsonl.gz', episodes.two_tasks())
  cases = {
      'does not exist': tmp_path / 'none.jsonl.gz',
      'is a folder': tmp_path,
      'no episode in it': _write(tmp_path / 'empty.jsonl.gz', []),
      'all of different groups': _write(
          tmp_path / 'one.jsonl.gz', episodes.two_tasks()[2:4]
      ),
      'all are aborted': _write(
          tmp_path / 'aborted.jsonl.gz', episodes.two_tasks()[6:]
      ),
  }
  broken = bytearray(whole.read_bytes())
  broken[60:70] = bytes(10)
  for name, content in {
      'cut': whole.read_bytes()[:-20],
      'broken': bytes(broken),
      'text': b'hello',
      'metrics': gzip.compress(b'{"iteration": 0}\n'),
      'list': gzip.compress(b'[1, 2]\n'),
      'strings': gzip.compress(b'{"steps": ["a"], "task": {}}\n'),
  }.items():
    (tmp_path / name).write_bytes(content)
    cases[f'{name}: episode'] = tmp_path / name
  for text, path in cases.items():
    with pytest.raises((ValueError, OSError), match=text) as caught:
      report.write(path, tmp_path / 'out.html')
    assert str(path) in str(caught.value)
  assert not (tmp_path / 'out.html').exists()


def test_the_command_writes_a_page_or_says_in_a_line_why_not(tmp_path):
  source = _write(tmp_path / 'a.jsonl.gz', episodes.two_tasks())
  run = lambda path, *more: subprocess.run(
      [
          *(sys.executable, '-m', 'hgpo_jax.credit', 'inspect'),
          *(f'--trajectories={path}', f'--out={tmp_path}/out.html', *more),
      ],
      capture_output=True,
      text=True,
  )
  missing = run(tmp_path / 'none')
  assert missing.returncode == 1
  assert missing.stderr.startswith(f'error: {tmp_path}/none does not exist')
  assert missing.stderr.count('\n') == 1
  picked = [f'--estimator=algorithms/{name}.gin' for name in ('rloo', 'g2po')]
  found = run(source, *picked)
  assert found.returncode == 0, found.stderr
  assert '17 steps under 2 estimators: rloo (RLOO), g2po (G2PO)' in found.stdout
  twice = run(source, f'--trajectories={source}')
  assert 'got 2 --trajectories, expected one' in twice.stdout + twice.stderr
  assert '"name":"rloo"' in (tmp_path / 'out.html').read_text()


@pytest.mark.skipif(not browser.EXECUTABLE, reason='no chromium on the PATH')
def test_a_browser_shows_it(data, tmp_path):
  out = tmp_path / 'report.html'
  out.write_text(page.render({**data, 'source': 'here'}, 'test'))
  address = out.as_uri()
  with browser.Browser(tmp_path / 'profile') as tab:
    count = lambda what: tab.evaluate(
        f'document.querySelectorAll({json.dumps(what)}).length'
    )
    text = lambda what: tab.evaluate(
        f'document.querySelector({json.dumps(what)}).textContent'
    )
    tab.open(address)
    assert count('.cell') == 9 and count('.task') == 2
    assert '17 steps · 1 aborted episode left out' in text('#about')
    assert text('#detail h2') == 'Episode 0, step 0'
    assert count('.cell.same') == 3  # The other visits of 'room'.
    assert count('#episode tbody tr') == 3

    tab.evaluate('document.querySelector(\'.cell[tabindex="0"]\').focus()')
    for key in ('ArrowRight', 'ArrowDown', 'End'):
      tab.press(key)
    focus = 'document.activeElement.dataset.row'
    assert text('#detail h2') == 'Episode 2, step 1'
    assert tab.evaluate(focus) == '8'  # The focus is where the choice is.
    tab.press('e')
    assert 'estimator=g2po' in tab.evaluate('location.hash')
    tab.press('l')
    assert 'level=episode' in tab.evaluate('location.hash')
    tab.press('j')
    assert '</script><b>a mug</b>' in text('#detail .quote')
    theme = 'document.documentElement.dataset.theme'
    before = tab.evaluate(theme)
    tab.press('t')
    assert {before, tab.evaluate(theme)} == {'light', 'dark'}

    tab.press('2')
    assert count('#view .card') == len(_ESTIMATORS)
    tab.press('3')
    nodes = data['tasks'][1]['graph']['nodes']
    assert count('#graph .node') == len(nodes)
    tab.press('4')
    levels_shown = sum(len(e['levels']) for e in data['estimators'])
    assert count('#levels .stack') == levels_shown
    tab.press('5')
    pairs = len(_ESTIMATORS) * (len(_ESTIMATORS) - 1)
    assert count('#matrix button') == pairs
    tab.evaluate('document.querySelector(\'[data-pair="0,2"]\').click()')
    assert count('#apart tbody tr') > 0
    tab.press('?')
    assert tab.evaluate('document.querySelector("dialog").open')

    # Whatever the fragment says, something is shown.
    tab.open(address + '#view=no&task=99&estimator=no&level=no&step=x')
    assert count('.cell') == 8
    assert tab.errors == []
    asked = {request.split('#')[0] for request in tab.requests}
    assert asked - {'about:blank'} == {address}
