"""Samples responses: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import itertools

import jax
import numpy as np

from hgpo_jax import config
from hgpo_jax import types
from hgpo_jax.models import base
from hgpo_jax.rollout import decode


@dataclasses.dataclass(frozen=True)
class Completion:
  """One response.

  Attributes:
    ids: int32 [response length], the stop token included; read-only.
    logprobs: float32 [response length], log-probability of each id at the
      sampling temperature, or at temperature 1 where that was 0; read-only.
    finish_reason: `types.STOP` or `types.LENGTH`.
  """

  ids: np.ndarray
  logprobs: np.ndarray
  finish_reason: str


@config.configurable
@dataclasses.dataclass(frozen=True)
class Sampler:
  """How responses are sampled.

  One program is compiled for each pair of buckets that occurs, so keep both
  lists short.

  Attributes:
    max_new_tokens: length limit of a response.
    prompt_buckets: lengths that prompts are padded to, increasing.
    row_buckets: numbers of rows that batches are padded to, increasing; a
      batch above the last one is split. On a mesh, multiples of its data axes.
  """

  max_new_tokens: int
  prompt_buckets: tuple[int, ...]
  row_buckets: tuple[int, ...]

  def __post_init__(self):
    if self.max_new_tokens < 1:
      raise ValueError(
          f'Sampler.max_new_tokens is {self.max_new_tokens}; expected 1 or more'
      )
    _check_buckets('prompt_buckets', self.prompt_buckets)
    _check_buckets('row_buckets', self.row_buckets)

  def bind(
      self, model: base.LanguageModel, stop_ids: Sequence[int]
  ) -> BoundSampler:
    """The sampler of `model`, whose responses end at any of `stop_ids`."""
    return BoundSampler(self, model, stop_ids)


class NotFiniteError(RuntimeError):
  """The policy makes nan or inf of a prompt; what it samples is noise."""


class BoundSampler:
  """Samples from one model. Results do not depend on batching or padding.

  Attributes:
    spec: buckets and limits.
    compilations: programs traced so far; constant once warm.
    decode_steps: decoding steps run so far, over all batches.
  """

  def __init__(
      self, spec: Sampler, model: base.LanguageModel, stop_ids: Sequence[int]
  ):
    """See `Sampler.bind`.

    Raises:
      ValueError: the largest prompt and a response exceed the positions of
        the model, or a stop id is outside its vocabulary.
    """
    _check_fits(spec, model.config, stop_ids)
    self.spec = spec
    self.compilations = 0
    self.decode_steps = 0
    self._model = model
    self._stop_ids = np.asarray(sorted(stop_ids), np.int32)
    self._program = jax.jit(self._sample)
    self._decode_params = jax.jit(model.decode_params)

  def prepare(self, params: base.Params) -> base.Params:
    """Parameters as `generate` is fastest with; make them once a policy."""
    return self._decode_params(params)

  def generate(
      self,
      params: base.Params,
      prompts: Sequence[np.ndarray],
      row_keys: np.ndarray,
      temperature: float | np.ndarray,
  ) -> list[Completion]:
    """One response for each prompt, in order.

    Rows are sorted by length before a batch is split, so a smaller last row
    bucket saves padding.

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
    row_keys_BK = _checked_keys(row_keys, rows)
    temperature_B = _checked_temperature(temperature, rows)
    lengths = self._checked_lengths(prompts)
    completions: list[Completion] = [None] * rows
    order = np.argsort(lengths, kind='stable')
    for start in range(0, rows, self.spec.row_buckets[-1]):
      chosen = order[start : start + self.spec.row_buckets[-1]]
      batch = self._pad(
          [prompts[i] for i in chosen],
          row_keys_BK[chosen],
          temperature_B[chosen],
      )
      responses = jax.device_get(self._program(params, *batch))
      _check_finite(responses.logprobs_BR)
      self.decode_steps += int(responses.steps)
      for row, index in enumerate(chosen):
        completions[index] = self._completion(responses, row)
    return completions

  def _checked_lengths(self, prompts: Sequence[np.ndarray]) -> np.ndarray:
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int64)
    if lengths.size and lengths.min() < 1:
      raise ValueError(f'prompt {int(lengths.argmin())} is empty')
    if lengths.size and lengths.max() > self.spec.prompt_buckets[-1]:
      raise ValueError(
          f'a prompt has {lengths.max()} tokens, more than the last of '
          f'Sampler.prompt_buckets={self.spec.prompt_buckets}; add a larger '
          'bucket or lower Collector.max_prompt_tokens'
      )
    return lengths

  def _pad(
      self,
      prompts: Sequence[np.ndarray],
      row_keys_BK: np.ndarray,
      temperature_B: np.ndarray,
  ) -> tuple[np.ndarray, ...]:
    """Left-pads prompts to a bucket and adds empty rows up to a bucket."""
    rows = _bucket(self.spec.row_buckets, len(prompts))
    length = _bucket(self.spec.prompt_buckets, max(map(len, prompts)))
    tokens_BT = np.zeros((rows, length), np.int32)
    length_B = np.zeros(rows, np.int32)
    for row, prompt in enumerate(prompts):
      tokens_BT[row, length - len(prompt) :] = prompt
      length_B[row] = len(prompt)
    extra = rows - len(prompts)
    return (
        tokens_BT,
        length_B,
        np.pad(row_keys_BK, ((0, extra), (0, 0))),
        np.pad(temperature_B, (0, extra)),
    )

  def _completion(self, responses: decode.Responses, row: int) -> Completion:
    length = int(responses.length_B[row])
    # Copies, so that a record does not keep the whole batch alive.
    ids = responses.ids_BR[row, :length].copy()
    logprobs = responses.logprobs_BR[row, :length].copy()
    ids.flags.writeable = logprobs.flags.writeable = False
    stopped = ids[-1] in self._stop_ids
    return Completion(ids, logprobs, types.STOP if stopped else types.LENGTH)

  def _sample(self, params: base.Params, *batch: jax.Array) -> decode.Responses:
    self.compilations += 1  # Runs when traced, that is once for each shape.
    return decode.sample(
        self._model, params, *batch, self._stop_ids, self.spec.max_new_tokens
    )


def _bucket(buckets: Sequence[int], size: int) -> int:
  return next(bucket for bucket in buckets if bucket >= size)


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


def _check_finite(logprobs_BR: np.ndarray) -> None:
  if not np.isfinite(logprobs_BR).all():
    raise NotFiniteError(
        'the log-probs of sampled tokens are not finite: the weights of the'
        ' policy are broken, or training has diverged. Give a whole'
        ' PolicySource.folder, or lower AdamW.learning_rate and start in'
        ' another --run_dir'
    )


def _checked_keys(row_keys: np.ndarray, rows: int) -> np.ndarray:
  keys = np.asarray(row_keys)
  if keys.ndim != 2 or len(keys) != rows or keys.dtype.kind not in 'iu':
    raise ValueError(
        f'row_keys are {keys.dtype} of shape {keys.shape}; expected integers '
        f'of shape ({rows}, numbers a row)'
    )
  if keys.size and (keys.min() < 0 or keys.max() >= 2**32):
    raise ValueError(
        f'row_keys lie in {keys.min()}..{keys.max()}; expected 0..2**32-1; '
        'check the seed'
    )
  return keys.astype(np.uint32)


def _checked_temperature(
    temperature: float | np.ndarray, rows: int
) -> np.ndarray:
  values = np.asarray(temperature, np.float32)
  if values.shape not in ((), (rows,)):
    raise ValueError(
        f'temperature has shape {values.shape}; expected one number or '
        f'({rows},), one a row'
    )
  if not np.all(np.isfinite(values) & (values >= 0)):
    raise ValueError(
        f'temperature is {temperature}; expected 0 (greedy) or more'
    )
  return np.broadcast_to(values, (rows,))
