"""Every gin file of a run passes a dry run, which reads no weights."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import shutil

import jax
import pytest

from hgpo_jax import assets
from hgpo_jax import config
from hgpo_jax import gin_source
from hgpo_jax.envs import alfworld
from hgpo_jax.envs import household
from hgpo_jax.envs import household_pddl
from hgpo_jax.experiment import arithmetic
from hgpo_jax.experiment import spec as spec_lib
from hgpo_jax.models import configs
from hgpo_jax.models import hf_config

ROOT = pathlib.Path(__file__).resolve().parent.parent
RUNS = sorted(p.name for p in (ROOT / 'gin' / 'runs').glob('*.gin'))
TOKENIZER = ROOT / 'tests' / 'golden' / 'tokenizer' / 'reduced'


@pytest.fixture
def one_device(monkeypatch):
  first = jax.devices()[:1]
  monkeypatch.setattr(jax, 'devices', lambda *unused: list(first))
  monkeypatch.setattr(jax, 'device_count', lambda *unused: 1)


@pytest.fixture(scope='module')
def official_folder(tmp_path_factory):
  """As many games as training takes, in the official layout."""
  root = tmp_path_factory.mktemp('json_2.1.1')
  game = household.generate(0, household.KINDS[0], household.Layout())
  for split in alfworld.OFFICIAL_COUNTS:
    for i in range(16 if split == 'train' else 4):
      household_pddl.save(
          game, root / split / f'{game.goal.kind}-X-None-Y-1' / f'trial_{i}'
      )
  return root


@pytest.fixture(scope='module')
def no_weights(tmp_path_factory):
  """Config and tokenizer of Qwen2.5-1.5B-Instruct, and nothing else."""
  folder = tmp_path_factory.mktemp('models') / 'Qwen2.5-1.5B-Instruct'
  shutil.copytree(TOKENIZER, folder)
  shapes = hf_config.to_json(configs.CONFIGS['1.5b'], 'bfloat16')
  (folder / 'config.json').write_text(json.dumps(shapes))
  return folder


def _bindings(name, official_folder, no_weights) -> list[str]:
  if name.startswith('alfworld'):
    return [
        f'OfficialGames.folder = {str(official_folder)!r}',
        'OfficialGames.any_count = True',
        f'PolicySource.folder = {str(no_weights)!r}',
    ]
  return []


def _dry_run(name, official_folder, no_weights) -> tuple[object, str]:
  packaged = pathlib.Path(assets.__file__).parent / 'tiny_household'
  if 'quickstart' in name and not packaged.is_dir():
    pytest.skip('the tiny policy is not in the tree')
  bindings = _bindings(name, official_folder, no_weights)
  spec = config.load([f'runs/{name}'], bindings, root=spec_lib.Experiment)
  return spec, arithmetic.check(spec)


@pytest.mark.parametrize('name', RUNS)
def test_dry_run(name, official_folder, no_weights, one_device):
  spec, text = _dry_run(name, official_folder, no_weights)
  assert f'run          {spec.iterations} iterations, seed 0' in text
  assert 'mesh         data=1 fsdp=1 tensor=1' in text


def test_an_adapter_can_be_added_to_a_run(one_device):
  files = ['runs/quickstart.gin', 'models/lora.gin']
  spec = config.load(files, [], root=spec_lib.Experiment)
  assert spec.lora.rank == 16 and spec.optimizer.learning_rate == 1e-5
  text = arithmetic.check(spec)
  assert 'adapters of rank 16 on q, k, v, o, gate, up, down' in text


def test_rollouts_ahead_can_be_added_to_a_run(one_device):
  files = ['runs/quickstart.gin', 'training/ahead.gin']
  spec = config.load(files, [], root=spec_lib.Experiment)
  assert (spec.rollout_lag, spec.loss.tis_clip) == (1, 2.0)
  assert 'ahead        10 of 12 iterations are played' in arithmetic.check(spec)


def test_there_are_runs():
  algorithms = {name.split('_')[1] for name in RUNS if 'alfworld' in name}
  assert algorithms >= {'grpo', 'gigpo', 'hgpo', 'g2po', 'graphgpo'}
  assert 'quickstart.gin' in RUNS


# Of the published scripts: steps, rows of a pass, longest prompt.
PUBLISHED = {
    'grpo': (150, 32, 2048),
    'gigpo': (150, 32, 2048),
    'hgpo': (160, 16, 4096),
    'g2po': (100, 32, 2048),
    'graphgpo': (150, 32, 2048),
}


@pytest.mark.parametrize('algorithm', PUBLISHED)
def test_published_arithmetic_on_eight_devices(
    algorithm, official_folder, no_weights
):
  iterations, micro_batch, prompt = PUBLISHED[algorithm]
  name = f'alfworld_{algorithm}_qwen2p5_1p5b.gin'
  spec, text = _dry_run(name, official_folder, no_weights)
  assert type(spec.estimator).__name__.lower() == algorithm
  assert text.splitlines() == [
      f'policy       {no_weights}, trained: all weights',
      f'estimator    {spec.estimator}',
      "tasks        16 in 'train', 4 in 'valid_seen'",
      'iteration    16 tasks x 8 members = 128 episodes of at most 50 steps ='
      ' at most 6400 steps',
      f'tokens       at most {prompt} prompt + 512 response = {prompt + 512} a'
      ' step',
      'sampling     at temperature 1',
      'updates      256 steps each: at most 25 x 1 epochs = 25 an iteration,'
      f' in passes of {8 * micro_batch} rows, one step each',
      'learning     rate 1e-06, constant',
      'mesh         data=1 fsdp=8 tensor=1, sampling on data=8 fsdp=1'
      ' tensor=1',
      'evaluation   4 games x 1 seeds at temperature 0.4',
      f'run          {iterations} iterations, seed 0, a checkpoint'
      f' every {spec.save_every}',
  ]


@pytest.mark.parametrize('algorithm', PUBLISHED)
def test_published_settings(algorithm, official_folder, no_weights, one_device):
  name = f'alfworld_{algorithm}_qwen2p5_1p5b.gin'
  spec, _ = _dry_run(name, official_folder, no_weights)
  assert (spec.tasks_per_iteration, spec.group_size) == (16, 8)
  assert spec.temperature == 1.0 and spec.evaluation.temperature == 0.4
  assert spec.optimizer.learning_rate == 1e-6
  assert spec.loss.kl_coef == 0.01 and spec.loss.kl_kind == 'k3'
  assert spec.loss.entropy_coef == 0.001
  assert spec.loss.clip_low == spec.loss.clip_high == 0.2
  assert spec.minibatches.minibatch_steps == 256
  assert spec.collector.history_length == 2
  assert spec.estimator.invalid_action_penalty == 0.1
  gamma = {'gigpo': 0.95, 'hgpo': 0.95, 'g2po': 0.95, 'graphgpo': 0.1}
  assert getattr(spec.estimator, 'gamma', None) == gamma.get(algorithm)
  states = {'g2po': 'admissible', 'graphgpo': 'inventory'}
  assert spec.env.state_key == states.get(algorithm, 'observation')


@pytest.mark.parametrize(
    'like, name', [('gigpo', 'progpo'), ('grpo', 'covgpo')]
)
def test_a_run_without_published_settings_differs_in_the_estimator_alone(
    like, name, official_folder, no_weights, one_device
):
  ours, theirs = (
      _dry_run(f'alfworld_{x}_qwen2p5_1p5b.gin', official_folder, no_weights)[0]
      for x in (name, like)
  )
  assert type(ours.estimator).__name__.lower() == name
  same = dataclasses.replace(ours, estimator=theirs.estimator)
  assert same == theirs
  if name == 'covgpo':
    assert ours.estimator.base == theirs.estimator


@pytest.mark.parametrize('name', [n for n in RUNS if 'alfworld' in n])
def test_a_published_run_asks_for_its_folders(name):
  given = {
      'PolicySource.folder': "PolicySource.folder = '/models/x'",
      'OfficialGames.folder': "OfficialGames.folder = '/data/x'",
  }
  for missing in given:
    bindings = [line for knob, line in given.items() if knob != missing]
    with pytest.raises(config.ConfigError) as refused:
      config.load([f'runs/{name}'], bindings, root=spec_lib.Experiment)
    assert all(word in str(refused.value) for word in missing.split('.'))


def test_games_and_weights_that_are_missing_are_named_at_once(one_device):
  bindings = ["PolicySource.folder = '/w'", "OfficialGames.folder = '/g'"]
  spec = config.load(
      ['runs/alfworld_hgpo_qwen2p5_1p5b.gin'],
      bindings,
      root=spec_lib.Experiment,
  )
  with pytest.raises(ValueError) as refused:
    arithmetic.check(spec)
  assert "OfficialGames.folder = '/g' does not exist" in str(refused.value)
  assert "PolicySource.folder = '/w' is not a folder" in str(refused.value)


@pytest.mark.parametrize(
    'name', sorted(p.name for p in (ROOT / 'gin' / 'algorithms').glob('*.gin'))
)
def test_every_algorithm_fits_the_quickstart(
    name, official_folder, no_weights, one_device
):
  packaged = pathlib.Path(assets.__file__).parent / 'tiny_household'
  if not packaged.is_dir():
    pytest.skip('the tiny policy is not in the tree')
  parts = ['base', 'envs/household_mini', 'models/tiny_household']
  files = [f'{part}.gin' for part in parts] + [f'algorithms/{name}']
  spec = config.load(files, [], root=spec_lib.Experiment)
  text = (ROOT / 'gin' / 'algorithms' / name).read_text()
  for included in re.findall(r"^include '(.+)'$", text, re.M):
    text += (ROOT / 'gin' / included).read_text()
  assert f'estimator = @{type(spec.estimator).__name__}()' in text
  assert 'iteration    16 tasks' in arithmetic.check(spec)


@pytest.mark.parametrize(
    'name', sorted(p.name for p in (ROOT / 'gin' / 'algorithms').glob('*.gin'))
)
def test_an_algorithm_takes_the_place_of_the_quick_starts(name):
  files = ['runs/quickstart.gin', f'algorithms/{name}']
  spec = config.load(files, [], root=spec_lib.Experiment)
  alone = config.load(
      ['training/tiny_household.gin', 'envs/household_mini.gin', files[1]],
      ['Experiment.iterations = 1'],
      root=spec_lib.Experiment,
  )
  assert spec.estimator == alone.estimator and spec.loss == alone.loss


@pytest.mark.parametrize('earlier', ['gigpo', 'covgpo_hgpo', 'covgpo_grpo'])
@pytest.mark.parametrize('last', ['hgpo', 'hgpo_inverse_variance', 'g2po'])
def test_the_last_of_several_algorithms_is_trained(earlier, last):
  load = lambda *names: config.load(
      # It has read hgpo.gin already.
      ['runs/quickstart.gin', *(f'algorithms/{x}.gin' for x in names)],
      root=spec_lib.Experiment,
  )
  assert load(earlier, last) == load(last)


@pytest.mark.parametrize(
    'reads, not_reads, field',
    [
        ('remat = True', 'remat = False', 'keep_attention = False'),
        ('remat = True', 'remat = False', 'mlp_parts = 2'),
    ],
)
def test_remat_is_what_its_settings_need(reads, not_reads, field):
  _check_needed('PolicySource', reads, not_reads, field)


@pytest.mark.parametrize('source', ['trainer', 'sampler'])
def test_only_auto_knows_an_allowed_gap(source):
  sources = "source = 'auto'", f'source = {source!r}'
  _check_needed('OldLogprobs', *sources, 'allowed_gap = 0.5')


def _check_needed(part, reads, not_reads, field):
  load = lambda *fields: config.load(
      ['runs/quickstart.gin'],
      [f'{part}.{line}' for line in fields],
      root=spec_lib.Experiment,
  )
  load(reads, field)
  load(not_reads)
  text = rf'^{part}.{field} \(bound at .*\) has no effect where {part}\.'
  with pytest.raises(config.ConfigError, match=text):
    load(not_reads, field)


@pytest.mark.parametrize(
    'name', ['grpo', 'gigpo', 'hgpo', 'g2po', 'graphgpo', 'progpo']
)
def test_coverage_is_added_to_the_estimator_as_it_is_alone(name):
  alone, over = (
      config.load(
          ['runs/quickstart.gin', f'algorithms/{file}.gin'],
          root=spec_lib.Experiment,
      ).estimator
      for file in (name, f'covgpo_{name}')
  )
  assert over.base == alone
  assert over.level == ('traj' if name == 'grpo' else 'step')


def test_a_part_that_was_not_imported_names_its_file(tmp_path, monkeypatch):
  (tmp_path / 'base.gin').write_text('import a\nExperiment.env = @NotYet()\n')
  (tmp_path / 'notyet.gin').write_text(
      'import a\nExperiment.env = @train/NotYet()\n'
  )
  monkeypatch.setattr(gin_source, 'SEARCH_PATH', (tmp_path,))
  with pytest.raises(config.ConfigError) as error:
    config.load([], ['Experiment.env = @NotYet()'], root=spec_lib.Experiment)
  assert str(error.value).endswith(
      'NotYet is in no gin file given so far; give --gin_file=notyet.gin too,'
      ' or include it'
  )
