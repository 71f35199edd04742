"""The sampler against full forwards of a tiny random model."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax import types
from hgpo_jax.models import base
from hgpo_jax.models import qwen2
from hgpo_jax.rollout import sampler as sampler_lib

_VOCAB = 40
_STOPS = (1, 3, 5, 7)
_MODEL = qwen2.Qwen2(
    base.ModelConfig(
        vocab_size=_VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        max_position_embeddings=64,
    )
)
_TEMPERATURES = np.array([0.0, 0.6, 1.0, 1.7, 0.0, 1.0, 1.0, 0.3])


@pytest.fixture(scope='module', name='params')
def _params():
  params = _MODEL.init(jax.random.key(0))
  # Wide enough for distributions that are far from uniform.
  params['embed']['embedding'] *= 10
  return params


@pytest.fixture(scope='module', name='prompts')
def _prompts():
  rng = np.random.default_rng(0)
  lengths = [1, 5, 8, 3, 8, 7, 2, 6]
  return [rng.integers(8, _VOCAB, n).astype(np.int32) for n in lengths]


def _sampler(new_tokens=12, prompt_buckets=(8, 16), row_buckets=(1, 8)):
  spec = sampler_lib.Sampler(new_tokens, prompt_buckets, row_buckets)
  return spec.bind(_MODEL, _STOPS)


@pytest.fixture(scope='module', name='sampler')
def _shared_sampler():
  return _sampler()


def _keys(rows, seed=0):
  return np.stack([np.full(rows, seed), np.arange(rows)], axis=1)


@jax.jit
def _all_logits(params, tokens_1T):
  positions_1T = jnp.arange(tokens_1T.shape[1])[None]
  ones_1T = jnp.ones_like(tokens_1T)
  hidden = _MODEL.hidden(params, tokens_1T, positions_1T, ones_1T)
  return _MODEL.logits(params, hidden)


def _scored(params, prompt, completion):
  """Logits [response length, V] of one full forward, without a cache."""
  tokens_1T = np.zeros((1, 20), np.int32)
  last = len(prompt) + len(completion.ids)
  tokens_1T[0, :last] = np.concatenate([prompt, completion.ids])
  logits = _all_logits(params, tokens_1T)
  return np.asarray(logits[0, len(prompt) - 1 : last - 1])


def test_a_broken_policy_samples_nothing(params, prompts, sampler):
  broken = jax.tree.map(lambda x: x, params)
  broken['final_norm'] = {'scale': jnp.full(32, jnp.nan)}
  with pytest.raises(sampler_lib.NotFiniteError, match='has diverged. Give'):
    sampler.generate(broken, prompts, _keys(8), _TEMPERATURES)


def test_logprobs_are_those_of_a_full_forward(params, prompts, sampler):
  completions = sampler.generate(params, prompts, _keys(8), _TEMPERATURES)
  for prompt, completion, temp in zip(prompts, completions, _TEMPERATURES):
    logits = _scored(params, prompt, completion)
    if temp == 0:
      np.testing.assert_array_equal(completion.ids, logits.argmax(axis=-1))
    expected = jax.nn.log_softmax(logits / (temp or 1.0))
    expected = np.take_along_axis(expected, completion.ids[:, None], 1)[:, 0]
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
    assert completion.logprobs.dtype == np.float32


def test_responses_end_at_the_first_stop_or_the_limit(params, prompts, sampler):
  completions = []
  for seed in range(4):
    completions += sampler.generate(params, prompts, _keys(8, seed), 1.0)
  reasons = collections.Counter(c.finish_reason for c in completions)
  assert reasons[types.STOP] > 3 and reasons[types.LENGTH] > 3
  for completion in completions:
    stops = [i in _STOPS for i in completion.ids]
    assert not any(stops[:-1])
    if completion.finish_reason == types.STOP:
      assert stops[-1]
    else:
      assert not stops[-1] and len(stops) == 12


def test_a_row_does_not_depend_on_batch_or_padding(params, prompts, sampler):
  together = sampler.generate(params, prompts, _keys(8), _TEMPERATURES)
  others = [
      [
          sampler.generate(params, [prompt], _keys(8)[i : i + 1], temp)[0]
          for i, (prompt, temp) in enumerate(zip(prompts, _TEMPERATURES))
      ],
      _sampler(prompt_buckets=(16,), row_buckets=(11,)).generate(
          params, prompts, _keys(8), _TEMPERATURES
      ),
      _sampler(row_buckets=(5,)).generate(
          params, prompts[::-1], _keys(8)[::-1], _TEMPERATURES[::-1]
      )[::-1],
  ]
  for other in others:
    for a, b in zip(together, other, strict=True):
      np.testing.assert_array_equal(a.ids, b.ids)
      np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_tokens_follow_the_keys(params, prompts, sampler):
  same = [prompts[1]] * 8
  first = sampler.generate(params, same, _keys(8, seed=2), 1.7)
  again = sampler.generate(params, same, _keys(8, seed=2), 1.7)
  other = sampler.generate(params, same, _keys(8, seed=3), 1.7)
  texts = [tuple(c.ids) for c in first]
  assert texts == [tuple(c.ids) for c in again]
  assert len(set(texts)) == 8 and set(texts).isdisjoint(
      tuple(c.ids) for c in other
  )
  assert any(len(set(text)) > 1 for text in texts)


def test_sampled_frequencies_are_the_tempered_softmax(params, prompts):
  rows = 4096
  sampler = _sampler(1, (8,), (rows,))
  drawn = sampler.generate(params, [prompts[1]] * rows, _keys(rows), 0.6)
  counts = np.bincount([c.ids[0] for c in drawn], minlength=_VOCAB)
  logits = _scored(params, prompts[1], drawn[0])[0]
  expected = rows * np.asarray(jax.nn.softmax(logits / 0.6))
  common = expected > 5
  assert common.sum() > 3
  chi2 = np.sum((counts - expected)[common] ** 2 / expected[common])
  # Mean k, deviation sqrt(2k) with k cells; keys are fixed.
  assert chi2 < common.sum() + 4 * np.sqrt(2 * common.sum())


def test_decoding_stops_when_every_row_has(params, prompts):
  sampler = sampler_lib.Sampler(12, (8,), (8,)).bind(_MODEL, range(_VOCAB))
  completions = sampler.generate(params, prompts, _keys(8), 1.0)
  assert [len(c.ids) for c in completions] == [1] * 8
  assert sampler.counts['decode_steps'] == 1


def test_no_compilation_after_warm_up(params):
  longer = dataclasses.replace(_MODEL.config, max_position_embeddings=96)
  sampler = sampler_lib.Sampler(2, (4, 70), (3,)).bind(
      dataclasses.replace(_MODEL, config=longer), _STOPS
  )
  rng = np.random.default_rng(1)
  events = []
  listen = lambda name, *unused, **kwargs: events.append(name)
  for i in range(8):
    lengths = rng.integers(1, 62, rng.integers(1, 11))
    prompts = [np.full(n, 9, np.int32) for n in lengths]
    sampler.generate(params, prompts, _keys(len(prompts)), 1.0)
    if not i:
      # In each of two lengths of cache: making it, two sizes of prefill,
      # copying, decoding; and growing from the one to the other.
      assert sampler.compilations == 2 * 5 + 1
      jax.monitoring.register_event_duration_secs_listener(listen)
  jax.monitoring.unregister_event_duration_listener(listen)
  assert sampler.compilations == 2 * 5 + 1
  assert not [name for name in events if 'compile' in name]


def test_completions_cannot_be_changed(params, prompts, sampler):
  completion = sampler.generate(params, prompts[:1], _keys(1), 0.0)[0]
  for array in (completion.ids, completion.logprobs):
    with pytest.raises(ValueError, match='read-only'):
      array[0] = 0


def test_prepared_parameters_give_the_same(params, prompts, sampler):
  plain = sampler.generate(params, prompts, _keys(8), _TEMPERATURES)
  prepared = sampler.prepare(params)
  other = sampler.generate(prepared, prompts, _keys(8), _TEMPERATURES)
  for a, b in zip(plain, other):
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_works_on_a_mesh(params, prompts, sampler):
  mesh = jax.make_mesh(
      (1, 1, 1),
      ('data', 'fsdp', 'tensor'),
      axis_types=(jax.sharding.AxisType.Auto,) * 3,
  )
  plain = sampler.generate(params, prompts, _keys(8), 1.0)
  with jax.set_mesh(mesh):
    meshed = _sampler().generate(params, prompts, _keys(8), 1.0)
  for a, b in zip(plain, meshed):
    np.testing.assert_array_equal(a.ids, b.ids)


@pytest.mark.parametrize('buckets', [(), (8, 8), (16, 8), (0, 8)])
def test_bad_buckets_are_refused(buckets):
  with pytest.raises(ValueError, match='Sampler.prompt_buckets is .*strictly'):
    sampler_lib.Sampler(4, buckets, (8,))
  with pytest.raises(ValueError, match='Sampler.row_buckets is .*strictly'):
    sampler_lib.Sampler(4, (8,), buckets)


def test_no_new_tokens_is_refused():
  with pytest.raises(ValueError, match='max_new_tokens is 0; expected 1 or'):
    sampler_lib.Sampler(0, (8,), (8,))


def test_more_positions_than_the_model_has_are_refused():
  sampler_lib.Sampler(16, (48,), (8,)).bind(_MODEL, _STOPS)
  with pytest.raises(ValueError, match='make 65 .*max_position_embeddings=64'):
    sampler_lib.Sampler(17, (48,), (8,)).bind(_MODEL, _STOPS)


@pytest.mark.parametrize('stops', [(), (40,), (-1,)])
def test_bad_stop_ids_are_refused(stops):
  with pytest.raises(ValueError, match='stop ids are .*vocab_size=40'):
    sampler_lib.Sampler(4, (8,), (8,)).bind(_MODEL, stops)


@pytest.mark.parametrize(
    'change, message',
    [
        (dict(prompts=[np.ones(17, np.int32)]), '17 tokens, more than the'),
        (dict(prompts=[np.ones(0, np.int32)]), 'prompt 0 is empty'),
        (dict(row_keys=np.zeros((2, 3), int)), r'expected integers of shape'),
        (dict(row_keys=np.zeros((1, 3))), r'float64 .*expected integers'),
        (dict(row_keys=np.array([[-1]])), r'-1..-1; expected 0..2\*\*32-1'),
        (dict(temperature=-1.0), r'is -1.0; expected 0 \(greedy\) or more'),
        (dict(temperature=np.nan), 'is nan; expected 0'),
        (dict(temperature=np.ones(2)), 'one number or'),
    ],
)
def test_bad_arguments_are_refused(params, sampler, change, message):
  arguments = dict(
      prompts=[np.ones(3, np.int32)],
      row_keys=np.zeros((1, 3), int),
      temperature=1.0,
  )
  with pytest.raises(ValueError, match=message):
    sampler.generate(params, **(arguments | change))


def test_no_prompts_give_no_completions(params, sampler):
  assert sampler.generate(params, [], np.zeros((0, 2), int), 1.0) == []
