"""Mistakes of the user: one clear line, before anything heavy starts."""

from __future__ import annotations

import os
import pathlib
import resource
import shutil
import sys

import jax
import numpy as np
import pytest

from hgpo_jax.envs import pool as pool_lib
from hgpo_jax.experiment import saved_policy
from hgpo_jax.io import checkpoint
from hgpo_jax.models import hf
from tests.experiment import runs

# Bindings, and what the error says.
MISTAKES = {
    'misspelt name': (
        ['HGPO.alhpa = 0.5'],
        'HGPO has no parameter alhpa; did you mean alpha?',
    ),
    'misspelt class': (
        ['Experiment.estimator = @HGPOO()'],
        'no configurable is called HGPOO; did you mean HGPO',
    ),
    'group of one': (
        ['Experiment.group_size = 1'],
        'Experiment.group_size is 1; expected at least 2: a group of one has'
        ' nothing to be compared with',
    ),
    'more tasks than the split': (
        ['Experiment.tasks_per_iteration = 9'],
        "Experiment.tasks_per_iteration is 9, but the split 'train' has 8"
        ' tasks',
    ),
    'more games than the split': (
        ['Evaluation.games = 5'],
        "Evaluation.games is 5, but the split 'valid' has 4 tasks",
    ),
    'evaluation on the training split': (
        ["Evaluation.split = 'train'"],
        "Evaluation.split and Experiment.split are both 'train'; evaluate on"
        ' tasks that no training uses',
    ),
    'unknown split': (
        ["Experiment.split = 'trian'"],
        "Experiment.split: unknown split 'trian'; known: ('train', 'valid')",
    ),
    'empty split': (
        ['Boxes.valid_size = 0'],
        "Evaluation.split is 'valid', a split of 0 tasks; expected at least",
    ),
    'seed of an evaluation': (
        ['Evaluation.seeds = (0, -1)'],
        'Evaluation.seeds is (0, -1); expected each in 0 to 2**32 - 1',
    ),
    'no time at all': (
        ['Workers.step_timeout_s = 0'],
        'Workers.step_timeout_s is 0.0; expected more than 0 seconds',
    ),
    'recycling before the first': (
        ['Workers.recycle_episodes = -1'],
        'Workers.recycle_episodes is -1; expected at least 0',
    ),
    'metric that is none': (
        ["Logging.progress = ('rollot/success_rate',)"],
        "metric name 'rollot/success_rate': expected prefix/what",
    ),
    'no name of a folder': (
        ["PolicySource.folder = ''"],
        "PolicySource.folder = '' is not a folder; give the Hugging Face",
    ),
    'no such folder': (
        ["PolicySource.folder = '/nowhere'"],
        "PolicySource.folder = '/nowhere' is not a folder; give the Hugging"
        ' Face folder of a Qwen2.5 model (nothing is downloaded)',
    ),
    'prompts beyond the model': (
        ['Sampler.prompt_buckets = (64, 2048)'],
        'make 2060 positions, but the model has max_position_embeddings=1024',
    ),
    'prompts beyond the batch': (
        [
            'Collector.max_prompt_tokens = 133',
            'Sampler.prompt_buckets = (133,)',
        ],
        'end Minibatches.length_buckets with 145',
    ),
    'prompts beyond the sampler': (
        ['Sampler.prompt_buckets = (80,)'],
        'Collector.max_prompt_tokens is 128, more than the last of'
        ' Sampler.prompt_buckets, 80; set it to 80 or add a bucket',
    ),
    'answers that the sampler does not know': (
        ["Collector.answer = '<action>{}</action>'"],
        "Collector.answer is '<action>{}</action>', but Sampler.admissible is"
        ' (0, 0); set it to how many actions there are at most',
    ),
    'admissible sequences of no token': (
        ['Sampler.admissible = (4, 0)'],
        'Sampler.admissible is (4, 0); expected two counts of at least 1, or',
    ),
    'devices that there are not': (
        ['Mesh.tensor = 3'],
        'the product 3 must divide the number of devices, 1',
    ),
    'zero iterations': (
        ['Experiment.iterations = 0'],
        'Experiment.iterations is 0; expected at least 1',
    ),
}
# The same on eight devices: what the mesh does not divide.
MESHES = {
    'rows of an update': (
        ['Mesh.data = 8', 'Mesh.fsdp = 1'],
        'Minibatches.minibatch_steps=16 is not a multiple of the 64 rows of one'
        ' pass (micro_batch_steps=8 x 8 data-parallel shares of the mesh)',
    ),
    'rows of the sampler': (
        [
            'Mesh.fsdp = 8',
            'Minibatches.micro_batch_steps = 2',
            'Sampler.row_buckets = (12,)',
        ],
        'Sampler.row_buckets has 12, which the 8 data-parallel shares of the'
        ' mesh (Mesh.data x Mesh.fsdp) do not divide; use multiples of 8',
    ),
    'heads': (
        ['Mesh.fsdp = 1', 'Mesh.tensor = 8'],
        "The mesh splits 'heads' (4) over tensor=8, but 4 is not divisible by",
    ),
}


@pytest.fixture
def nothing_starts(monkeypatch):
  """Fails the test if weights are loaded or environments started."""

  def refuse(*unused_args, **unused_kwargs):
    raise AssertionError('weights were loaded, or environments started')

  monkeypatch.setattr(hf, 'load_params', refuse)
  monkeypatch.setattr(pool_lib, 'EnvPool', refuse)


def _check(found: str, expected: str, run_dir: pathlib.Path) -> None:
  assert found.startswith('error: ') and expected in found
  assert '\n' not in found
  assert not run_dir.exists()


@pytest.mark.parametrize('bindings, expected', MISTAKES.values(), ids=MISTAKES)
def test_wrong_value(
    policy, one_device, nothing_starts, tmp_path, bindings, expected
):
  run_dir = tmp_path / 'run'
  found = runs.main(*runs.arguments(policy, run_dir, *bindings))
  _check(found, expected, run_dir)


@pytest.mark.parametrize('bindings, expected', MESHES.values(), ids=MESHES)
def test_batch_or_model_that_the_mesh_does_not_divide(
    policy, nothing_starts, tmp_path, bindings, expected
):
  run_dir = tmp_path / 'run'
  found = runs.main(*runs.arguments(policy, run_dir, *bindings))
  _check(found, expected, run_dir)


def test_more_actions_than_the_sampler_has_room_for(
    policy, one_device, tmp_path
):
  """Known only once an environment offers them."""
  found = runs.main(
      *runs.arguments(
          policy,
          tmp_path,
          "Collector.answer = '<think></think><action>{}</action>'",
          'Sampler.admissible = (2, 12)',
      )
  )
  assert found.startswith('error: 3 admissible sequences of up to 8 tokens')
  assert 'raise Sampler.admissible=(2, 12)' in found


def test_wandb_that_is_not_installed(
    policy, one_device, nothing_starts, monkeypatch, tmp_path
):
  monkeypatch.setitem(sys.modules, 'wandb', None)
  run_dir = tmp_path / 'run'
  arguments = runs.arguments(policy, run_dir, "Logging.wandb_project = 'x'")
  expected = "Logging.wandb_project='x' asks for Weights & Biases, but wandb is"
  _check(runs.main(*arguments), expected, run_dir)


def test_folder_here_that_is_called_as_a_packaged_one(
    policy, one_device, nothing_starts, monkeypatch, tmp_path
):
  shutil.copytree(policy, tmp_path / 'tiny_household')
  monkeypatch.chdir(tmp_path)
  run_dir = tmp_path / 'run'
  found = runs.main(*runs.arguments('tiny_household', run_dir))
  _check(found, "or './tiny_household' for the other", run_dir)
  here = runs.arguments('./tiny_household', None)
  assert runs.main('--dry_run', *here) == ''


def test_no_device_of_the_platform(policy, tmp_path, monkeypatch):
  monkeypatch.setenv('JAX_PLATFORMS', 'abacus')
  run_dir = tmp_path / 'run'
  arguments = runs.arguments(policy, run_dir)
  process = runs.Process('train', arguments, tmp_path / 'log')
  assert process.wait() == 1 and not run_dir.exists()
  said = [x for x in process.output.splitlines() if x.startswith('error: ')]
  assert len(said) == 1 and 'Traceback' not in process.output
  assert "JAX_PLATFORMS is 'abacus', expected a platform that is" in said[0]


def test_no_gin_file():
  assert runs.main('--run_dir=x').startswith('error: --gin_file is missing')


def test_a_process_ends_with_one_line_and_exit_code_1(policy, tmp_path):
  run_dir = tmp_path / 'run'
  arguments = runs.arguments(policy, run_dir, 'AdamW.learning_rat = 1.0')
  process = runs.Process('train', arguments, tmp_path / 'log')
  assert process.wait() == 1
  said = [x for x in process.output.splitlines() if not x.startswith('I')]
  assert len(said) == 1 and said[0].startswith('error: ')
  expected = 'AdamW has no parameter learning_rat; did you mean learning_rate?'
  assert expected in said[0] and not run_dir.exists()


def _broken_tokenizer(folder: pathlib.Path) -> str:
  path = folder / 'tokenizer.json'
  path.write_text(path.read_text().replace('<|im_end|>', '<|the_end|>'))
  return f'the tokenizer in {folder} has no special token <|im_end|>'


def _cut_tokenizer(folder: pathlib.Path) -> str:
  path = folder / 'tokenizer.json'
  path.write_text(path.read_text()[:1000])
  return f'the tokenizer in {folder} cannot be read (EOF'


def _no_tokenizer(folder: pathlib.Path) -> str:
  (folder / 'tokenizer.json').unlink()
  return f'{folder} lacks tokenizer.json'


def _broken_config(folder: pathlib.Path) -> str:
  (folder / 'config.json').write_text('{')
  return f'{folder / "config.json"} is not valid JSON'


def _missing_shard(folder: pathlib.Path) -> str:
  next(folder.glob('model-00002*')).unlink()
  return "of which ['model-00002-of-"


def _truncated_shard(folder: pathlib.Path) -> str:
  path = next(folder.glob('model-00002*'))
  path.write_bytes(path.read_bytes()[:-100])
  return f'{path} ({path.stat().st_size} bytes) is truncated or damaged'


def _no_weights(folder: pathlib.Path) -> str:
  for path in folder.glob('model*'):
    path.unlink()
  return f'{folder} holds no weights: expected model.safetensors'


@pytest.fixture(scope='module')
def sharded(policy, tmp_path_factory):
  """The policy in several files."""
  folder = tmp_path_factory.mktemp('sharded') / 'policy'
  shapes = hf.read_config(policy)
  params = hf.load_params(policy, shapes)
  hf.save_folder(folder, shapes, params, policy, max_shard_bytes=50_000)
  assert len(list(folder.glob('model-*'))) > 2
  return folder


@pytest.mark.parametrize(
    'damage',
    [
        _broken_tokenizer,
        _cut_tokenizer,
        _no_tokenizer,
        _broken_config,
        _missing_shard,
        _truncated_shard,
        _no_weights,
    ],
)
def test_damaged_policy_folder(
    sharded, one_device, nothing_starts, tmp_path, damage
):
  folder = tmp_path / 'policy'
  shutil.copytree(sharded, folder)
  expected = damage(folder)
  run_dir = tmp_path / 'run'
  found = runs.main(*runs.arguments(folder, run_dir))
  assert found.startswith('error: ') and expected in found
  assert '\n' not in found
  # The folder is not bound to a configuration that never ran.
  assert not run_dir.exists() or not list(run_dir.iterdir())


def test_damaged_policy_folder_repaired(sharded, policy, one_device, tmp_path):
  folder, run_dir = tmp_path / 'policy', tmp_path / 'run'
  shutil.copytree(sharded, folder)
  _missing_shard(folder)
  command = runs.arguments(folder, run_dir, 'Experiment.iterations = 1')
  assert 'not in' in runs.main(*command)
  other = runs.arguments(policy, run_dir, 'Experiment.iterations = 1')
  assert runs.main(*other) == ''


def test_run_dir_that_is_a_file(policy, one_device, nothing_starts, tmp_path):
  path = tmp_path / 'file'
  path.write_text('precious')
  found = runs.main(*runs.arguments(policy, path))
  assert found.startswith(f'error: --run_dir={path} cannot be written to (')
  assert '\n' not in found and path.read_text() == 'precious'


def test_run_dir_that_cannot_be_written(
    policy, one_device, nothing_starts, tmp_path
):
  closed = tmp_path / 'closed'
  closed.mkdir(mode=0o500)
  # For root every folder of a disk is open, but not those of the kernel.
  run_dir = closed / 'run' if os.geteuid() else pathlib.Path('/proc/run')
  found = runs.main(*runs.arguments(policy, run_dir))
  assert found.startswith(f'error: --run_dir={run_dir} cannot be written to (')
  assert '\n' not in found


def test_run_dir_that_holds_something_else(
    policy, one_device, nothing_starts, tmp_path
):
  (tmp_path / 'run.json').write_text('[1, 2]')
  found = runs.main(*runs.arguments(policy, tmp_path))
  assert f'{tmp_path / "run.json"} is not the record of a run' in found
  assert 'give another --run_dir' in found


def test_dry_run_prints_the_arithmetic_and_starts_nothing(
    policy, one_device, nothing_starts, tmp_path, capsys
):
  run_dir = tmp_path / 'run'
  assert runs.main('--dry_run', *runs.arguments(policy, run_dir)) == ''
  *lines, memory = capsys.readouterr().out.splitlines()
  assert memory.startswith('memory       at most 0.')
  assert lines == [
      f'policy       {policy}, trained: all weights',
      'estimator    ' + str(runs.load(policy).estimator),
      "tasks        8 in 'train', 4 in 'valid'",
      'iteration    4 tasks x 4 members = 16 episodes of at most 3 steps = at'
      ' most 48 steps',
      'tokens       at most 128 prompt + 12 response = 140 a step',
      'sampling     at temperature 1',
      'updates      16 steps each: at most 3 x 1 epochs = 3 an iteration, in'
      ' passes of 8 rows, one step each',
      'learning     rate 0.003, constant',
      'mesh         data=1 fsdp=1 tensor=1',
      'evaluation   4 games x 1 seeds at temperature 0.4',
      'run          4 iterations, seed 0, a checkpoint every 2',
  ]
  assert not run_dir.exists()


# What orbax leaves behind of the writes that failed.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_full_disk_while_saving(
    policy, finished, one_device, monkeypatch, tmp_path
):
  """The kernel refuses to write: the older checkpoint stays, and is used."""
  run_dir = tmp_path / 'run'
  save = checkpoint.Checkpoints.save

  def save_on_a_full_disk(self, iteration, *args):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    full = 20_000 if iteration == 2 else limits[0]
    resource.setrlimit(resource.RLIMIT_FSIZE, (full, limits[1]))
    try:
      return save(self, iteration, *args)
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, limits)

  bindings = ('Experiment.iterations = 2', 'Experiment.save_every = 1')
  with monkeypatch.context() as patch:
    patch.setattr(checkpoint.Checkpoints, 'save', save_on_a_full_disk)
    found = runs.main(*runs.arguments(policy, run_dir, *bindings))
  assert found.startswith(f'error: {run_dir}/checkpoints: the checkpoint of ')
  assert 'Complete checkpoints: [1]; they are untouched. Free disk' in found
  assert '\n' not in found
  left = {p.name for p in (run_dir / 'checkpoints').iterdir()}
  assert '1' in left and all('tmp' in name for name in left - {'1'})

  assert runs.main(*runs.arguments(policy, run_dir, *bindings)) == ''
  assert runs.lines(run_dir) == runs.lines(finished)
  spec = runs.load(policy, *bindings)
  ours, theirs = (
      saved_policy.newest_policy(spec, folder)[1]
      for folder in (run_dir, finished)
  )
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)
