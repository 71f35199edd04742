"""Samples responses: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import collections
from collections.abc import Sequence
import dataclasses
import itertools

import jax
import numpy as np

from hgpo_jax import config
from hgpo_jax.models import base
from hgpo_jax.rollout import compiled as compiled_lib
from hgpo_jax.rollout import engine as engine_lib
from hgpo_jax.rollout import requests

AdmissibleError = requests.AdmissibleError
Completion = requests.Completion
NotFiniteError = engine_lib.NotFiniteError
Request = requests.Request


@config.configurable
@dataclasses.dataclass(frozen=True)
class Sampler:
  """How responses are sampled.

  Everything is compiled before the first response: one program for decoding
  for each pair of a prompt bucket and a row bucket, one for prefill for each
  pair of a prompt bucket and a number of prefill tokens. So keep lists short.

  Attributes:
    max_new_tokens: length limit of a response.
    prompt_buckets: prompt lengths, increasing, that the cache is made for: it
      is as long as the longest prompt so far needs, and all rows attend to
      that many entries.
    row_buckets: numbers of rows that decoding computes, increasing. The last
      is how many responses are decoded side by side; smaller ones save work
      when few are left, at the price of other rounding. On a mesh, multiples
      of its data axes.
    prefill_tokens: numbers of prompt tokens that one call computes,
      increasing, multiples of `prefill_block`. On a mesh every data-parallel
      share computes as many blocks: numbers of blocks are rounded up.
    prefill_block: prompts are computed in blocks of so many tokens.
    chunk_steps: tokens decoded before ended rows are refilled.
    top_k: how many of the likeliest tokens may be drawn; 0 for all.
    top_p: the likeliest tokens that together have this probability may be
      drawn; 1 for all. The log-probs recorded are those of what was sampled
      from, while the learner scores all tokens: for evaluation, then.
    min_p: tokens with this share of the likeliest one's probability may be
      drawn; 0 for all.
    admissible: (sequences, tokens) that a request may bind its response to at
      most; (0, 0) where none does.
  """

  max_new_tokens: int
  prompt_buckets: tuple[int, ...]
  row_buckets: tuple[int, ...]
  prefill_tokens: tuple[int, ...] = (128, 512)
  prefill_block: int = 32
  chunk_steps: int = 8
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  admissible: tuple[int, int] = (0, 0)

  def __post_init__(self):
    for name in ('max_new_tokens', 'prefill_block', 'chunk_steps'):
      if getattr(self, name) < 1:
        raise ValueError(
            f'Sampler.{name} is {getattr(self, name)}; expected 1 or more'
        )
    for name in ('prompt_buckets', 'row_buckets', 'prefill_tokens'):
      _check_buckets(name, getattr(self, name))
    if any(n % self.prefill_block for n in self.prefill_tokens):
      raise ValueError(
          f'Sampler.prefill_tokens is {self.prefill_tokens}; expected multiples'
          f' of Sampler.prefill_block={self.prefill_block}'
      )
    requests.check_filters(self, 'Sampler.')
    if min(self.admissible) < 1 and self.admissible != (0, 0):
      raise ValueError(
          f'Sampler.admissible is {self.admissible}; expected two counts of at'
          ' least 1, or (0, 0)'
      )

  def bind(
      self,
      model: base.LanguageModel,
      stop_ids: Sequence[int],
      mesh: jax.sharding.Mesh | None = None,
  ) -> BoundSampler:
    """The sampler of `model`, whose responses end at any of `stop_ids`.

    It samples on `mesh`; None: on the one in force, `jax.set_mesh`, if any.
    """
    return BoundSampler(self, model, stop_ids, mesh)

  @property
  def entries(self) -> tuple[int, ...]:
    """Entries of the cache for each prompt bucket, multiples of 64."""
    unit = int(np.lcm(64, self.prefill_block))
    needed = [n + self.max_new_tokens - 1 for n in self.prompt_buckets]
    return tuple(sorted({-(-n // unit) * unit for n in needed}))


class BoundSampler:
  """Samples from one model. Results do not depend on batching or padding.

  Attributes:
    spec: buckets and limits.
  """

  def __init__(
      self,
      spec: Sampler,
      model: base.LanguageModel,
      stop_ids: Sequence[int],
      mesh: jax.sharding.Mesh | None = None,
  ):
    """See `Sampler.bind`.

    Raises:
      ValueError: the largest prompt and a response exceed the positions of
        the model, or a stop id is outside its vocabulary.
    """
    _check_fits(spec, model.config, stop_ids)
    self.spec = spec
    self._model = model
    self._stop_ids = tuple(sorted(stop_ids))
    self._mesh = mesh
    self._counts: collections.Counter[str] = collections.Counter()

  @property
  def compilations(self) -> int:
    """Programs traced so far; constant once the first engine is open.

    Samplers with the same spec and model share their programs.
    """
    return self._compiled.compilations

  @property
  def mesh(self) -> jax.sharding.Mesh | None:
    """Where it samples; None on one device without a mesh."""
    mesh = jax.sharding.get_mesh() if self._mesh is None else self._mesh
    return None if mesh.empty else mesh

  @property
  def counts(self) -> dict[str, int]:
    """What has been computed so far, and what was reused instead."""
    return dict(self._counts)

  def prepare(self, params: base.Params) -> base.Params:
    """Parameters as `generate` is fastest with; make them once a policy.

    Arrays of their own, on the sampler's mesh: they stay good when `params`
    are donated to an update. What is laid out already is given back.
    """
    if isinstance(params['layers'], tuple):
      return params
    return self._compiled.lay_out(params)

  def open(self, params: base.Params) -> engine_lib.Engine:
    """An engine that serves requests with these parameters, cache empty.

    The first one compiles all there is to compile.
    """
    params = self.prepare(params)
    self._compiled.warm_up(params)
    return engine_lib.Engine(
        self._compiled, params, self._stop_ids, self._counts
    )

  def request(
      self,
      prompt: np.ndarray,
      key: Sequence[int],
      temperature: float,
      **changes: object,
  ) -> Request:
    """A request for the engine, checked, with what the spec says.

    Args:
      prompt: ids.
      key: integers in 0..2**32-1 that name the response.
      temperature: of sampling; 0 is greedy.
      **changes: other fields of `Request`.

    Raises:
      ValueError: it does not fit into the cache, or makes no sense.
      AdmissibleError: of these, it is bound to more than the spec allows.
    """
    spec = self.spec
    fields = dict(
        max_new_tokens=spec.max_new_tokens,
        top_k=spec.top_k,
        top_p=spec.top_p,
        min_p=spec.min_p,
    )
    request = Request(prompt, key, temperature, **(fields | changes))
    requests.check(request, spec, self._stop_ids, self._model.config.vocab_size)
    return request

  def generate(
      self,
      params: base.Params,
      prompts: Sequence[np.ndarray],
      row_keys: np.ndarray,
      temperature: float | np.ndarray,
  ) -> list[Completion]:
    """One response for each prompt, in order.

    Args:
      params: parameters of the model, best from `prepare`.
      prompts: ids of each prompt, of any lengths up to the last bucket.
      row_keys: integers [rows, any number]; a response depends on its row's
        numbers, prompt and temperature, and on nothing else.
      temperature: one, or one a row; 0 is greedy.

    Raises:
      ValueError: an empty or too long prompt, or arguments of wrong shape.
      NotFiniteError: the policy gives no probabilities.
    """
    rows = len(prompts)
    keys_BK = _checked_keys(row_keys, rows)
    temperature_B = _checked_temperature(temperature, rows)
    if empty := [i for i, prompt in enumerate(prompts) if not len(prompt)]:
      raise ValueError(f'prompt {empty[0]} is empty')
    wanted = [
        self.request(prompt, key, temp)
        for prompt, key, temp in zip(prompts, keys_BK, temperature_B)
    ]
    if not wanted:
      return []
    engine = self.open(params)
    tickets = [engine.submit(request) for request in wanted]
    found: dict[int, Completion] = {}
    while engine.busy:
      found |= dict(engine.step())
    return [found[ticket] for ticket in tickets]

  @property
  def _compiled(self) -> compiled_lib.Compiled:
    spec = self.spec
    return compiled_lib.shared(
        self.mesh,
        self._model,
        self._stop_ids,
        min(spec.chunk_steps, spec.max_new_tokens),
        tuple(spec.row_buckets),
        spec.entries,
        tuple(n // spec.prefill_block for n in spec.prefill_tokens),
        spec.prefill_block,
        tuple(spec.admissible),
    )


def _check_buckets(name: str, buckets: Sequence[int]) -> None:
  rising = all(a < b for a, b in itertools.pairwise((0, *buckets)))
  if not buckets or not rising:
    raise ValueError(
        f'Sampler.{name} is {buckets}; expected at least one positive number, '
        'in strictly increasing order'
    )


def _check_fits(
    spec: Sampler, shapes: base.ModelConfig, stop_ids: Sequence[int]
) -> None:
  needed = spec.prompt_buckets[-1] + spec.max_new_tokens
  if needed > shapes.max_position_embeddings:
    raise ValueError(
        f'the last of Sampler.prompt_buckets ({spec.prompt_buckets[-1]}) and '
        f'Sampler.max_new_tokens ({spec.max_new_tokens}) make {needed} '
        'positions, but the model has max_position_embeddings='
        f'{shapes.max_position_embeddings}; lower one of the two'
    )
  if not stop_ids or not all(0 <= i < shapes.vocab_size for i in stop_ids):
    raise ValueError(
        f'stop ids are {tuple(stop_ids)}; expected at least one, all below '
        f'vocab_size={shapes.vocab_size}; check the eos_token_id of '
        'generation_config.json'
    )


def _checked_keys(row_keys: np.ndarray, rows: int) -> np.ndarray:
  keys = np.asarray(row_keys)
  if keys.ndim != 2 or len(keys) != rows or keys.dtype.kind not in 'iu':
    raise ValueError(
        f'row_keys are {keys.dtype} of shape {keys.shape}; expected integers '
        f'of shape ({rows}, numbers a row)'
    )
  return keys


def _checked_temperature(
    temperature: float | np.ndarray, rows: int
) -> np.ndarray:
  values = np.asarray(temperature, np.float32)
  if values.shape not in ((), (rows,)):
    raise ValueError(
        f'temperature has shape {values.shape}; expected one number or '
        f'({rows},), one a row'
    )
  return np.broadcast_to(values, (rows,))
