"""The engine: rows that share a cache do not know of each other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax import types
from hgpo_jax.models import base
from hgpo_jax.models import qwen2
from hgpo_jax.rollout import requests
from hgpo_jax.rollout import sampler as sampler_lib

_VOCAB = 40
_STOPS = (1, 3, 5, 7)
_LIMIT = 12
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
        max_position_embeddings=160,
    )
)
_SPEC = sampler_lib.Sampler(
    max_new_tokens=_LIMIT,
    prompt_buckets=(40, 110),
    row_buckets=(4,),
    prefill_tokens=(64,),
    prefill_block=16,
    chunk_steps=4,
    admissible=(4, 6),
)
# Two lengths of cache, each with: the cache, prefill, copy, decode; one growth.
_PROGRAMS = 9


@pytest.fixture(scope='module', name='params')
def _params():
  params = _MODEL.init(jax.random.key(0))
  params['embed']['embedding'] *= 10
  return params


@pytest.fixture(scope='module', name='sampler')
def _sampler(params):
  sampler = _SPEC.bind(_MODEL, _STOPS)
  sampler.open(params)
  yield sampler
  # Whatever the tests asked for, in whatever order.
  assert sampler.compilations == _PROGRAMS


def _prompt(length, seed=0):
  return np.random.default_rng(seed).integers(8, _VOCAB, length, np.int32)


def _requests(sampler, lengths, **changes):
  return [
      sampler.request(_prompt(n, seed=n), (7, i), 1.0, **changes)
      for i, n in enumerate(lengths)
  ]


def _serve(engine, wanted):
  """Completions in the order of the requests."""
  tickets = [engine.submit(request) for request in wanted]
  found = {}
  while engine.busy:
    found |= dict(engine.step())
  return [found[ticket] for ticket in tickets]


def _equal(ours, theirs):
  """The same to the bit, log-probs included."""
  for a, b in zip(ours, theirs, strict=True):
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_array_equal(a.logprobs, b.logprobs)
    np.testing.assert_array_equal(a.model_logprobs, b.model_logprobs)


def _close(ours, theirs):
  for a, b in zip(ours, theirs, strict=True):
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


@jax.jit
def _all_logits(params, tokens_1T):
  positions_1T = jnp.arange(tokens_1T.shape[1])[None]
  hidden = _MODEL.hidden(
      params, tokens_1T, positions_1T, jnp.ones_like(tokens_1T)
  )
  return _MODEL.logits(params, hidden)[0]


def _scored(params, prompt, ids):
  """Logits [response length, V] of one full forward, without a cache."""
  tokens_1T = np.zeros((1, 124), np.int32)
  tokens_1T[0, : len(prompt) + len(ids)] = np.concatenate([prompt, ids])
  span = slice(len(prompt) - 1, len(prompt) + len(ids) - 1)
  return np.asarray(_all_logits(params, tokens_1T), np.float64)[span]


def _logprobs(logits_RV, ids):
  shifted = logits_RV - logits_RV.max(axis=1, keepdims=True)
  log_p = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
  return np.take_along_axis(log_p, ids[:, None], 1)[:, 0]


def test_equals_the_full_forward_at_every_edge(params, sampler):
  """Of blocks, of calls, of the two lengths of the cache, and of the last."""
  lengths = [1, 2, 16, 17, 18, 33, 40, 41, 53, 54, 64, 65, 66, 109, 110]
  wanted = _requests(sampler, lengths, max_new_tokens=_LIMIT)
  wanted = [
      sampler.request(r.prompt, r.key, temperature)
      for r, temperature in zip(wanted, [0.7, 1.0, 0.0] * 5)
  ]
  found = _serve(sampler.open(params), wanted)
  for request, completion in zip(wanted, found):
    logits = _scored(params, request.prompt, completion.ids)
    model = _logprobs(logits, completion.ids)
    np.testing.assert_allclose(completion.model_logprobs, model, atol=1e-5)
    scaled = logits / (request.temperature or 1.0)
    sampled = _logprobs(scaled, completion.ids)
    np.testing.assert_allclose(completion.logprobs, sampled, atol=1e-5)
    if not request.temperature:
      np.testing.assert_array_equal(completion.ids, logits.argmax(axis=1))


def test_a_response_is_the_same_alone_in_company_and_after_a_refill(
    params, sampler
):
  wanted = _requests(sampler, [3, 70, 20, 9, 33, 108, 50, 12, 5, 27])
  alone = [_serve(sampler.open(params), [request])[0] for request in wanted]
  engine = sampler.open(params)
  _equal(_serve(engine, wanted), alone)
  # The rows hold other tokens by now, and others come first.
  _equal(_serve(engine, wanted[::-1])[::-1], alone)


def test_arrivals_in_any_order_give_the_same(params, sampler):
  wanted = _requests(sampler, [30] * 9)
  want = _serve(sampler.open(params), wanted)
  engine, found, tickets = sampler.open(params), {}, {}
  for i in np.random.default_rng(0).permutation(9):
    tickets[i] = engine.submit(wanted[i])
    found |= dict(engine.step())
  while engine.busy:
    found |= dict(engine.step())
  _equal([found[tickets[i]] for i in range(9)], want)


def test_short_responses_do_not_wait_for_a_long_one(params, sampler):
  engine = sampler.open(params)
  stop = [_STOPS[0]]
  bind = lambda n: [[*_prompt(n, seed=n), *stop]]
  first = engine.submit(
      sampler.request(_prompt(9), (0,), 1.0, admissible=bind(5))
  )
  rest = [
      engine.submit(sampler.request(_prompt(9), (i,), 1.0, admissible=bind(1)))
      for i in range(1, 7)
  ]
  # Four steps a chunk: three short ones beside the long one, then the others.
  assert [t for t, _ in engine.step()] == rest[:3]
  assert sorted(t for t, _ in engine.step()) == sorted([first, *rest[3:]])
  assert not engine.busy and engine.step() == []


def test_a_group_is_prefilled_once_and_equals_separate_prefill(params, sampler):
  prompt = _prompt(61)
  wanted = [sampler.request(prompt, (3, i), 1.0) for i in range(4)]
  alone = [_serve(sampler.open(params), [request])[0] for request in wanted]
  before = sampler.counts
  _equal(_serve(sampler.open(params), wanted), alone)
  after = sampler.counts
  assert after['prefilled_tokens'] - before['prefilled_tokens'] == 60
  assert after['copied_rows'] - before.get('copied_rows', 0) == 3
  assert len({tuple(completion.ids) for completion in alone}) == 4


def test_members_share_the_head_of_prompts_that_part_later(params, sampler):
  head = _prompt(40)
  prompts = [np.append(head, _prompt(10 + i, seed=i)) for i in range(4)]
  wanted = [sampler.request(p, (i,), 1.0) for i, p in enumerate(prompts)]
  alone = [_serve(sampler.open(params), [request])[0] for request in wanted]
  before = sampler.counts
  _equal(_serve(sampler.open(params), wanted), alone)
  reused = sampler.counts['reused_tokens'] - before['reused_tokens']
  assert reused >= 3 * 40


def test_a_session_goes_on_where_it_was(params, sampler):
  engine = sampler.open(params)
  prompt = _prompt(30)
  (answer,) = _serve(
      engine, [sampler.request(prompt, (0,), 1.0, session='mine')]
  )
  # Others come and go; only the session's own row keeps what was decoded.
  _serve(engine, _requests(sampler, [20, 21, 22]))
  longer = np.concatenate([prompt, answer.ids, _prompt(25, seed=5)])
  before = sampler.counts
  second = sampler.request(longer, (1,), 1.0, session='mine')
  (reused,) = _serve(engine, [second])
  kept = sampler.counts['reused_tokens'] - before['reused_tokens']
  assert kept == len(prompt) + len(answer.ids) - 1
  _close([reused], _serve(sampler.open(params), [second]))
  # What prefill computed serves others, what decoding did does not.
  before = sampler.counts
  other = sampler.request(longer, (2,), 1.0, session='other')
  _serve(engine, [other])
  kept = sampler.counts['reused_tokens'] - before['reused_tokens']
  assert kept == len(prompt) - 1


def test_a_session_keeps_its_row_until_it_is_released(params, sampler):
  engine = sampler.open(params)
  prompts = [_prompt(30, seed=i) for i in range(5)]
  ask = lambda i, key: sampler.request(prompts[i], (key,), 1.0, session=i)
  again = lambda i, key: _reused(sampler, engine, ask(i, key))
  for i in range(4):
    assert again(i, 0) == 0
  assert again(0, 1) == 29
  engine.release(2)
  # The fifth takes the row that nobody owns, not the one idle longest.
  assert again(4, 1) == 0
  assert [again(i, 2) for i in (0, 1, 3)] == [29] * 3


def _reused(sampler, engine, request):
  before = sampler.counts.get('reused_tokens', 0)
  _serve(engine, [request])
  return sampler.counts['reused_tokens'] - before


def test_rows_with_different_rules_share_a_batch(params, sampler):
  prompt = _prompt(20)
  ask = lambda **rules: sampler.request(
      prompt, (1,), rules.pop('temperature', 1.5), **rules
  )
  wanted = [ask(), ask(top_k=1), ask(temperature=0.0), ask(min_p=1.0)]
  together = _serve(sampler.open(params), wanted)
  _equal(together, [_serve(sampler.open(params), [r])[0] for r in wanted])
  for certain in (together[1], together[3]):
    np.testing.assert_array_equal(certain.ids, together[2].ids)
    np.testing.assert_array_equal(certain.logprobs, 0.0)
    np.testing.assert_allclose(
        certain.model_logprobs, together[2].model_logprobs, atol=1e-6
    )


def test_bound_responses_are_admissible_and_scored_among_themselves(
    params, sampler
):
  sequences = [[10, 11, 1], [10, 12, 13, 1], [14, 3], [10, 11, 15, 16, 1]]
  prompt = _prompt(25)
  wanted = [
      sampler.request(prompt, (i,), 1.3, admissible=sequences)
      for i in range(48)
  ]
  found = _serve(sampler.open(params), wanted)
  assert {tuple(c.ids) for c in found} == {tuple(s) for s in sequences}
  for completion in found:
    ids, logits = completion.ids, _scored(params, prompt, completion.ids)
    masked = np.full_like(logits, -np.inf)
    for place in range(len(ids)):
      ways = {
          s[place]
          for s in sequences
          if len(s) > place and s[:place] == list(ids[:place])
      }
      masked[place, list(ways)] = logits[place, list(ways)] / 1.3
    want = _logprobs(masked, ids)
    np.testing.assert_allclose(completion.logprobs, want, atol=1e-5)
    np.testing.assert_allclose(
        completion.model_logprobs, _logprobs(logits, ids), atol=1e-5
    )
  # A free response beside bound ones is free.
  free = sampler.request(prompt, (0,), 1.0)
  _equal(
      _serve(sampler.open(params), [wanted[0], free, wanted[1]])[1:2],
      _serve(sampler.open(params), [free]),
  )


@pytest.mark.parametrize(
    'length, changes, message',
    [
        (0, {}, 'the prompt is empty; expected at least one'),
        (111, {}, r'111 tokens, more than the last of Sampler.prompt_buckets'),
        (
            110,
            dict(max_new_tokens=13),
            r'max_new_tokens=13 make 123, and the cache has room for 122: .*'
            r'Sampler.prompt_buckets \(110\) and Sampler.max_new_tokens \(12\)',
        ),
        (9, dict(max_new_tokens=0), 'max_new_tokens=0 make 9, and'),
        (9, dict(top_k=-1), 'are -1, 1.0 and 0.0; expected 0 <= top_k <'),
        (9, dict(top_k=2**31), 'are 2147483648, 1.0 and 0.0; expected 0 <='),
        (9, dict(top_p=0.0), 'are 0, 0.0 and 0.0; expected .* 0 < top_p'),
        (9, dict(min_p=1.5), r'are 0, 1.0 and 1.5; expected .* min_p <= 1'),
        (9, dict(admissible=[]), '0 admissible sequences .*1 to 4 of up to 6'),
        (9, dict(admissible=[[9] * 6 + [1]]), r'raise Sampler.admissible=\(4,'),
        (9, dict(admissible=[[9, 10]]), 'end with its only stop id, one of'),
        (9, dict(admissible=[[40, 1]]), 'consist of ids below 40'),
    ],
)
def test_what_does_not_fit_is_refused(sampler, length, changes, message):
  with pytest.raises(ValueError, match=message):
    sampler.request(_prompt(length), (0,), 1.0, **changes)


def test_a_long_response_fits_where_the_prompt_is_short(params, sampler):
  request = sampler.request(_prompt(20), (5,), 1.0, max_new_tokens=100)
  (found,) = _serve(sampler.open(params), [request])
  assert len(found.ids) == 100 or found.finish_reason == types.STOP
  logits = _scored(params, request.prompt, found.ids)
  want = _logprobs(logits, found.ids)
  np.testing.assert_allclose(found.logprobs, want, atol=1e-5)


def test_a_shape_beyond_the_list_is_an_error_not_a_compilation(params, sampler):
  compiled = sampler._compiled  # pylint: disable=protected-access
  rows = requests.empty_rows(2, _SPEC.admissible)
  with pytest.raises(RuntimeError, match='decode met a shape .*warm_up had'):
    compiled.decode(compiled.lay_out(params), compiled.init_cache(64), rows)


def test_two_lots_of_rows_differ_in_rounding_only(params, sampler):
  spec = sampler_lib.Sampler(_LIMIT, (40,), (1, 4), (64,), 16)
  other = spec.bind(_MODEL, _STOPS)
  wanted = _requests(sampler, [3, 20, 9, 33, 12])
  _close(
      _serve(other.open(params), wanted), _serve(sampler.open(params), wanted)
  )
