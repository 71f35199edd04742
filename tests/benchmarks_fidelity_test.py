"""The table and the picture of the fidelity study."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from benchmarks import credit_fidelity
from benchmarks import fidelity_plot
from hgpo_jax.credit import fidelity
from hgpo_jax.credit import probes

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
  result = credit_fidelity.Result(0.25, 12, 120.0, 0.125, _TABLE)
  credit_fidelity.write(
      {'low': result}, probes.Design(tasks=3), fidelity.Study(), tmp_path
  )
  text = (tmp_path / 'fidelity.md').read_text()
  assert '**low**: success 25 %, 12 steps, 2 minutes' in text
  assert 'a bias² of 0.12' in text
  rows = [line for line in text.splitlines() if line.startswith('| g')]
  assert len(rows) == 4 and rows[0].count('0.50 (0.25 to 0.75)') == 5
  assert rows[3].count('–') == 1
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
  credit_fidelity._keep_to(tmp_path, {'design': 1})
  credit_fidelity._keep_to(tmp_path, {'design': 1})
  with pytest.raises(ValueError, match='other settings: .* Give another --out'):
    credit_fidelity._keep_to(tmp_path, {'design': 2})
