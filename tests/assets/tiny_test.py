"""The tiny policy: how it is made, and the one that is packaged."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import pytest

from hgpo_jax import assets
from hgpo_jax import config
from hgpo_jax.assets import demonstrations
from hgpo_jax.assets import tiny_lessons
from hgpo_jax.assets import tiny_tokenizer
from hgpo_jax.assets import train_tiny
from hgpo_jax.envs import pool as pool_lib
from hgpo_jax.experiment import spec as spec_lib
from hgpo_jax.models import configs
from hgpo_jax.models import hf
from hgpo_jax.models import qwen2
from hgpo_jax.rollout import metrics
from hgpo_jax.rollout import tokenizer as tokenizer_lib

FOLDER = pathlib.Path(assets.__file__).parent / 'tiny_household'


@pytest.fixture(scope='module')
def examples():
  recipe = demonstrations.Recipe(games=2, episodes=1)
  return demonstrations.collect(recipe, workers=1)


def test_training_learns_and_writes_a_folder(tmp_path, examples, capsys):
  phase = train_tiny.Phase(30, 3e-3, 0.02, 1.0)
  settings = train_tiny.Settings(copying=phase, imitating=phase, rows=8)
  train_tiny.make(tmp_path / 'policy', examples, settings)
  shapes = hf.read_config(tmp_path / 'policy')
  params = hf.load_params(tmp_path / 'policy', shapes)
  tokenizer = tokenizer_lib.ChatTokenizer(tmp_path / 'policy')
  tokens = tiny_lessons.tokenize(examples, tokenizer)[0]
  model = qwen2.Qwen2(shapes, remat=False)
  _, response = train_tiny.loss_fn(
      params, model, 0.0, tokens.ids_BT[:8], tokens.ends_B2[:8]
  )
  assert response < 0.8 * np.log(shapes.vocab_size)
  assert 'imitating 30/30' in capsys.readouterr().out


def test_one_head_starts_out_looking_at_the_previous_token():
  shapes = configs.CONFIGS['tiny']
  model = qwen2.Qwen2(shapes, remat=False)
  params = train_tiny.initial_params(model, jax.random.key(0))
  attention = params['layers']['attention']
  query, key = (
      np.asarray(attention[name]['bias'])[0, : shapes.head_dim] for name in 'qk'
  )
  angle = shapes.rope_theta ** -(
      np.arange(0, shapes.head_dim, 2) / shapes.head_dim
  )

  def turned(x, position):
    low, high = np.split(x, 2)
    cos, sin = np.cos(position * angle), np.sin(position * angle)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin])

  scores = [turned(query, 60) @ turned(key, 60 - lag) for lag in range(60)]
  assert int(np.argmax(scores)) == 1


def test_drill_repeats_with_each_row_s_own_period():
  ids_BT, ends_B2 = next(tiny_lessons.drill(4, 100, 0))
  for row, (first, end) in zip(ids_BT, ends_B2):
    period = first - 1
    np.testing.assert_array_equal(row[period:end], row[: end - period])


def test_only_response_tokens_count_as_response(examples):
  tokenizer = tokenizer_lib.ChatTokenizer(FOLDER)
  tokens = next(
      t for t in tiny_lessons.tokenize(examples, tokenizer) if len(t.ids_BT)
  )
  prompt, end = tokens.ends_B2[0]
  text = tokenizer.decode(tokens.ids_BT[0, prompt:end], skip_special=False)
  assert text == examples_response(tokenizer, tokens, examples) + '<|im_end|>'


def examples_response(tokenizer, tokens, examples):
  prompt = tokens.ends_B2[0][0]
  shown = tokenizer.decode(tokens.ids_BT[0, :prompt], skip_special=False)
  return next(e.response for e in examples if e.prompt in shown)


def test_words_and_tags_are_single_tokens(tmp_path, examples):
  texts = [t for e in examples for t in (e.prompt, e.response)]
  tiny_tokenizer.save(tiny_tokenizer.train(texts, 1024), tmp_path)
  tokenizer = tokenizer_lib.ChatTokenizer(tmp_path)
  ids = tokenizer.encode('<think>find mug</think>')
  assert len(tokenizer.encode('<think>')) == 1
  assert tokenizer.decode(ids) == '<think>find mug</think>'
  assert len(tokenizer.encode(' 1')) == 1
  assert tokenizer.chat('Task: x')[:1] == tokenizer.encode('<|im_start|>')


def test_the_packaged_folder_is_small_complete_and_plain():
  files = sorted(p.name for p in FOLDER.iterdir())
  assert 'model.safetensors' in files and 'tokenizer.json' in files
  assert sum(p.stat().st_size for p in FOLDER.iterdir()) <= 6_000_000
  assert json.loads((FOLDER / 'config.json').read_text())['model_type'] == (
      'qwen2'
  )
  tokenizer = tokenizer_lib.ChatTokenizer(FOLDER)
  tokenizer_lib.check_vocab(tokenizer, hf.read_config(FOLDER).vocab_size)


def test_the_quick_start_plays_the_games_the_policy_was_made_for():
  spec = config.load(['runs/quickstart.gin'], root=spec_lib.Experiment)
  config.reset()
  assert spec.env.games.layout == demonstrations.MINI
  recipe = demonstrations.Recipe()
  assert spec.collector.history_length == recipe.history_length
  assert spec.env.max_steps == recipe.max_steps
  assert recipe.games <= len(spec.env.split('train'))


def test_the_packaged_policy_points_at_admissible_things():
  spec = config.load(['runs/quickstart.gin'], root=spec_lib.Experiment)
  config.reset()
  model, tokenizer = spec.policy.check()
  sampler = spec.sampler.bind(model, tokenizer.stop_ids)
  split = spec.env.split('heldout')
  with pool_lib.EnvPool(spec.env, num_slots=16, num_workers=2) as pool:
    collector = spec.collector.bind(pool, tokenizer, sampler)
    played = collector.collect(
        jax.tree.map(jax.numpy.asarray, spec.policy.load(model)),
        [split[i] for i in range(16)],
        1,
        seed=0,
        iteration=0,
        temperature=spec.evaluation.temperature,
    )
  seen = metrics.rollout_metrics(played)
  assert seen['rollout/invalid'] + seen['rollout/invalid_cut'] < 0.02
  assert seen['rollout/inadmissible'] < 0.2
