"""What the README and the documentation name is there."""

from __future__ import annotations

import importlib
import pathlib
import re
import textwrap

import pytest

from hgpo_jax.advantages import base
from hgpo_jax.io import metrics as metrics_io
from tests.advantages import rows

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_PAGES = [
    _ROOT / 'README.md',
    _ROOT / 'CONTRIBUTING.md',
    *sorted((_ROOT / 'docs').glob('*.md')),
    _ROOT / 'benchmarks' / 'README.md',
]
_FOLDERS = 'benchmarks|docs|gin|hgpo_jax|launch|notebooks|scripts|tests'
_PATH = re.compile(rf'\b(?:{_FOLDERS})/[\w./]*\w')
_GIN_FILE = re.compile(r'\b(?:algorithms|envs|models|runs|training)/\w+\.gin\b')
_TEST = re.compile(r'(tests/[\w/]+\.py)?::(test_\w+)')
_BINDING = re.compile(r'\b([A-Z]\w+)\.([a-z]\w*)')
_MISSPELT = ('HGPO', 'alhpa')  # On purpose, to show the error.
_ANCHOR = re.compile(r'\]\(#([\w-]+)\)')


def _anchor(heading: str) -> str:
  """What GitHub makes of a heading."""
  kept = re.sub(r'[^\w\- ]', '', heading.strip().lower())
  return kept.replace(' ', '-')


@pytest.fixture(params=_PAGES, ids=lambda page: str(page.relative_to(_ROOT)))
def text(request):
  return request.param.read_text()


def test_paths_exist(text):
  named = [p for p in _PATH.findall(text) if 'mine' not in p]
  missing = [p for p in named if not (_ROOT / p).exists()]
  # The installed name of a module, as in python -m, is no path.
  assert not [p for p in missing if not (_ROOT / f'{p}.py').exists()]


def test_gin_files_exist(text):
  named = [p for p in _GIN_FILE.findall(text) if 'mine' not in p]
  assert not [p for p in named if not (_ROOT / 'gin' / p).exists()]


def test_tests_exist(text):
  path = ''
  for found, name in _TEST.findall(text):
    path = found or path
    assert f'def {name}(' in (_ROOT / path).read_text(), f'{path}::{name}'


def test_bindings_name_fields_that_exist(text):
  sources = [p.read_text() for p in (_ROOT / 'hgpo_jax').rglob('*.py')]
  for owner, field in _BINDING.findall(text):
    classes = [s for s in sources if f'\nclass {owner}' in s]
    if classes and (owner, field) != _MISSPELT:
      body = ''.join(s.split(f'\nclass {owner}')[1] for s in classes)
      assert re.search(rf'^  (?:def )?{field}\b', body, re.M), (owner, field)


def test_links_inside_a_page_have_a_heading(text):
  headings = re.findall(r'^#+ (.+)$', text, re.M)
  assert set(_ANCHOR.findall(text)) <= set(map(_anchor, headings))


def test_the_readme_has_no_figure_left_open():
  open_cells = re.findall(r'@@[^@]*@@', (_ROOT / 'README.md').read_text())
  assert not open_cells


def test_the_estimator_of_the_guide_runs(tmp_path, monkeypatch):
  guide = (_ROOT / 'CONTRIBUTING.md').read_text(encoding='utf-8')
  code = re.search(r'```python\n(.*?)```', guide, re.S).group(1)
  (tmp_path / 'guide_mine.py').write_text(
      textwrap.dedent('   ' + code.lstrip())
  )
  monkeypatch.syspath_prepend(tmp_path)
  mine = importlib.import_module('guide_mine').Mine(alpha=1.0)
  advantage_N, metrics = base.estimate(mine, rows.random_inputs(0))
  assert abs(advantage_N.mean()) < 1e-5
  for name in metrics:
    metrics_io.check_name(name)
