"""Notebooks run from top to bottom, and are committed without their output."""

from __future__ import annotations

import os
import pathlib
import re

import jax
import nbclient
import nbformat
import pytest

from hgpo_jax import assets
from hgpo_jax.assets import tiny_tokenizer
from hgpo_jax.models import base
from hgpo_jax.models import hf
from hgpo_jax.models import qwen2
from hgpo_jax.rollout import tokenizer as tokenizer_lib

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_NOTEBOOKS = sorted((_ROOT / 'notebooks').glob('*.ipynb'))
_PACKAGED = pathlib.Path(assets.__file__).parent / 'tiny_household'
_SETTING = "POLICY = 'tiny_household'"
# A path from the root of somebody's machine.
_ABSOLUTE = re.compile(r'(?<![\w.~/:-])/(?:home|root|tmp|work|Users|mnt)/')


@pytest.fixture(autouse=True)
def _own_jupyter_folders(monkeypatch, tmp_path):
  monkeypatch.setenv('IPYTHONDIR', str(tmp_path / 'ipython'))
  monkeypatch.setenv('JUPYTER_RUNTIME_DIR', str(tmp_path / 'runtime'))
  monkeypatch.setenv('JUPYTER_CONFIG_DIR', str(tmp_path / 'config'))
  # The kernel is a process of its own.
  paths = [str(_ROOT), os.environ.get('PYTHONPATH', '')]
  monkeypatch.setenv('PYTHONPATH', os.pathsep.join(filter(None, paths)))


def _run(notebook: nbformat.NotebookNode, folder: pathlib.Path) -> str:
  """Executes a notebook; returns all that it printed."""
  client = nbclient.NotebookClient(
      notebook,
      timeout=600,
      kernel_name='python3',
      resources={'metadata': {'path': str(folder)}},
  )
  client.execute()
  outputs = [o for cell in notebook.cells for o in cell.get('outputs', ())]
  return ''.join(o.get('text', '') for o in outputs)


def _random_policy(folder: pathlib.Path) -> pathlib.Path:
  """A folder of random weights, whose responses have no form at all."""
  texts = ['Task: put a mug in desk', 'go to desk 1', 'take mug 1 from desk 1']
  tokens = folder / 'tokens'
  tiny_tokenizer.save(tiny_tokenizer.train(texts, 400), tokens)
  config = base.ModelConfig(
      vocab_size=tokenizer_lib.ChatTokenizer(tokens).size,
      hidden_size=16,
      intermediate_size=32,
      num_layers=1,
      num_heads=2,
      num_kv_heads=1,
      head_dim=8,
      tie_word_embeddings=True,
      max_position_embeddings=4096,
  )
  params = qwen2.Qwen2(config).init(jax.random.key(0))
  hf.save_folder(folder / 'policy', config, params, tokens)
  return folder / 'policy'


@pytest.mark.skipif(
    not _PACKAGED.is_dir(), reason='hgpo_jax/assets/tiny_household is absent'
)
def test_walk(tmp_path):
  notebook = nbformat.read(_ROOT / 'notebooks' / '01_walk.ipynb', as_version=4)
  printed = _run(notebook, tmp_path)
  # The walk is only shown if there is something to learn from.
  assert 'steps without signal: 100 %' not in printed
  assert 'advantage > 0:' in printed and 'advantage < 0:' in printed
  gain = re.search(r'advantage x change: ([+-][\d.]+)', printed)
  assert float(gain.group(1)) > 0


def test_walk_takes_any_folder_and_an_episode_without_signal(tmp_path):
  notebook = nbformat.read(_ROOT / 'notebooks' / '01_walk.ipynb', as_version=4)
  cell = notebook.cells[1]
  assert _SETTING in cell.source
  folder = _random_policy(tmp_path)
  cell.source = cell.source.replace(_SETTING, f'POLICY = {str(folder)!r}')
  # Its prompts are long, with a token for nearly every character.
  for cell in notebook.cells:
    cell.source = re.sub(r'\b(208|224)\b', '1024', cell.source)
    cell.source = cell.source.replace('max_steps=20', 'max_steps=8')
  assert 'steps without signal' in _run(notebook, tmp_path)


def _faults(text: str) -> list[str]:
  """What must not be in a committed notebook."""
  notebook = nbformat.reads(text, as_version=4)
  faults = [
      f'cell {i}: {key}'
      for i, cell in enumerate(notebook.cells)
      for key in ('outputs', 'execution_count')
      if cell.get(key)
  ]
  if set(notebook.metadata) - {'kernelspec', 'language_info'}:
    faults.append(f'metadata: {sorted(notebook.metadata)}')
  faults += [f'path: {found}' for found in _ABSOLUTE.findall(text)]
  return faults


@pytest.mark.parametrize('path', _NOTEBOOKS, ids=lambda path: path.name)
def test_committed_without_output(path):
  text = path.read_text()
  nbformat.validate(nbformat.reads(text, as_version=4))
  assert not _faults(text)


def test_the_check_finds_what_it_should():
  notebook = nbformat.v4.new_notebook(
      cells=[nbformat.v4.new_code_cell("open('/home/me/x')")]
  )
  assert _faults(nbformat.writes(notebook)) == ['path: /home/']
  notebook.cells[0].source = 'see https://host/home/x and ~/work/x'
  assert not _faults(nbformat.writes(notebook))
  notebook.cells[0].execution_count = 3
  notebook.cells[0].outputs = [
      nbformat.v4.new_output('stream', name='stdout', text='3')
  ]
  assert _faults(nbformat.writes(notebook)) == [
      'cell 0: outputs',
      'cell 0: execution_count',
  ]
