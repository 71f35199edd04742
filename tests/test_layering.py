"""Imports go one way, and importing the package is cheap."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_PACKAGE = _ROOT / 'hgpo_jax'
_MAX_LINES = 320

_BASE = {'types', 'config', 'sharding', 'whole_file'}
_ISLANDS = {'envs', 'models', 'advantages', 'losses', 'batch', 'io'}
_MIDDLE = _BASE | _ISLANDS | {'rollout', 'learner', 'planning'}
_TOP = {'experiment', 'credit', 'report', 'assets'}
_ENTRIES = {'entry', 'train', 'eval', 'export', 'plan'}

# Part -> the parts it may import, beside itself. A part is a module or a
# folder right under hgpo_jax.
_ALLOWED = {
    'types': set(),
    'field_types': set(),
    'gin_parts': set(),
    'gin_source': {'gin_parts'},
    'gin_checks': {'gin_parts', 'gin_source'},
    'run_record': {'gin_source', 'whole_file'},
    'whole_file': set(),
    'config': {
        'types',
        'field_types',
        'gin_parts',
        'gin_source',
        'gin_checks',
        'run_record',
    },
    'sharding': {'types', 'config'},
    **{island: _BASE for island in _ISLANDS},
    'rollout': _BASE | {'envs', 'models'},
    'learner': _BASE | {'losses', 'models'},
    'planning': _BASE | {'models'},
    **{part: _MIDDLE | _TOP for part in _TOP},
    **{entry: _MIDDLE | _TOP | {'entry'} for entry in _ENTRIES},
}


def imported_parts(source: str, package: str = 'hgpo_jax') -> set[str]:
  """Returns the parts of the package that a module imports, at any depth."""
  found = set()
  for node in ast.walk(ast.parse(source)):
    names = []
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      assert not node.level, 'relative imports hide what is imported'
      names = [f'{node.module}.{alias.name}' for alias in node.names]
    for name in names:
      parts = name.split('.')
      if parts[0] == package and len(parts) > 1:
        found.add(parts[1])
  return found


def violations(part: str, source: str) -> set[str]:
  assert part in _ALLOWED, f'{part} has no place in the layers yet'
  return imported_parts(source) - _ALLOWED[part] - {part}


def _modules():
  return sorted(_PACKAGE.rglob('*.py'))


def _part(path):
  return path.relative_to(_PACKAGE).parts[0].removesuffix('.py')


@pytest.mark.parametrize(
    'path', _modules(), ids=lambda path: str(path.relative_to(_PACKAGE))
)
def test_imports_go_one_way(path):
  if path.parent == _PACKAGE and path.name == '__init__.py':
    assert not imported_parts(path.read_text())
  else:
    assert not violations(_part(path), path.read_text())


@pytest.mark.parametrize(
    ('part', 'source', 'bad'),
    [
        ('envs', 'from hgpo_jax.models import base', {'models'}),
        ('envs', 'import hgpo_jax.rollout.parse', {'rollout'}),
        ('types', 'from hgpo_jax import config', {'config'}),
        ('rollout', 'def f():\n  from hgpo_jax import learner', {'learner'}),
        ('learner', 'from hgpo_jax.experiment import loop', {'experiment'}),
        ('experiment', 'from hgpo_jax import train', {'train'}),
        ('credit', 'from hgpo_jax import entry, train', {'entry', 'train'}),
        ('credit', 'from hgpo_jax.experiment import runtime', set()),
        ('rollout', 'from hgpo_jax.credit import truth', {'credit'}),
        ('learner', 'from hgpo_jax.models import base', set()),
        ('envs', 'from hgpo_jax.envs import base\nimport jax', set()),
    ],
)
def test_the_check_finds_what_it_should(part, source, bad):
  assert violations(part, source) == bad


def test_files_stay_readable():
  paths = [*_modules(), *(_ROOT / 'launch').rglob('*.py')]
  lines = {
      str(path.relative_to(_ROOT)): len(path.read_text().splitlines())
      for path in paths
  }
  long = {k: v for k, v in lines.items() if v >= _MAX_LINES}
  assert not long, f'split these, the limit is {_MAX_LINES} lines: {long}'


def texts_of_the_locale(source: str) -> list[int]:
  """Lines that read or write text without saying that it is UTF-8."""
  return [
      call.lineno
      for call in ast.walk(ast.parse(source))
      if isinstance(call, ast.Call)
      and isinstance(call.func, ast.Attribute)
      and call.func.attr in ('read_text', 'write_text')
      and not any(keyword.arg == 'encoding' for keyword in call.keywords)
  ]


def test_text_is_utf8_whatever_the_locale():
  assert texts_of_the_locale("x.read_text()\nx.write_text('a')") == [1, 2]
  assert not texts_of_the_locale("x.read_text(encoding='utf-8')")
  paths = [*_modules(), *(_ROOT / 'launch').rglob('*.py')]
  found = {p: texts_of_the_locale(p.read_text(encoding='utf-8')) for p in paths}
  assert not {path: lines for path, lines in found.items() if lines}


def _imports_of(statement):
  code = (
      f'import sys; {statement}; '
      "print(*sorted({m.split('.')[0] for m in sys.modules}))"
  )
  result = subprocess.run(
      [sys.executable, '-c', code],
      cwd=_ROOT,
      capture_output=True,
      text=True,
      check=True,
  )
  return set(result.stdout.split())


def test_importing_the_package_imports_neither_jax_nor_an_environment():
  heavy = {'jax', 'flax', 'optax', 'numpy', 'textworld', 'alfworld', 'torch'}
  assert not _imports_of('import hgpo_jax') & heavy
  assert not _imports_of('from hgpo_jax import config') & heavy


def test_environments_import_no_jax():
  names = sorted(
      '.'.join(path.relative_to(_ROOT).with_suffix('').parts)
      for path in (_PACKAGE / 'envs').rglob('*.py')
      if path.name != '__init__.py'
  )
  found = _imports_of('import ' + ', '.join(['hgpo_jax.types', *names]))
  assert not found & {'jax', 'torch', 'torchvision', 'ai2thor', 'transformers'}


def claims_flags(source: str) -> bool:
  """Whether importing the module defines flags."""
  for node in ast.parse(source).body:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.If)):
      continue  # Runs when called, or only as a program.
    for call in ast.walk(node):
      name = ast.unparse(call.func) if isinstance(call, ast.Call) else ''
      if name.startswith('flags.DEFINE_'):
        return True
  return False


def test_only_entry_points_claim_flags_when_imported():
  assert claims_flags("_OUT = flags.DEFINE_string('out', '', 'File.')")
  assert not claims_flags("def f():\n  flags.DEFINE_string('out', '', '')")
  entries = {f'hgpo_jax/{name}.py' for name in _ENTRIES}
  entries |= {'hgpo_jax/credit/__main__.py', 'launch/run.py'}
  claiming = {
      str(path.relative_to(_ROOT))
      for folder in ('hgpo_jax', 'benchmarks', 'launch', 'tests')
      for path in (_ROOT / folder).rglob('*.py')
      if claims_flags(path.read_text())
  }
  assert claiming <= entries
