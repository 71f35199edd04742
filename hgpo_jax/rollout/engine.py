"""Decodes many responses side by side, each in a row of one cache.

A response that ends frees its row between two chunks of decoding, and the next
request takes it: rows do not wait for each other. What a request's prompt has
in common with what some row holds is not computed again.
"""

from __future__ import annotations

import collections
from collections.abc import Hashable, Sequence
import dataclasses

import jax
import numpy as np

from hgpo_jax import sharding
from hgpo_jax import types
from hgpo_jax.models import base
from hgpo_jax.rollout import compiled as compiled_lib
from hgpo_jax.rollout import programs as programs_lib
from hgpo_jax.rollout import requests
from hgpo_jax.rollout import slots as slots_lib


class NotFiniteError(RuntimeError):
  """The policy makes nan or inf of a prompt; what it samples is noise."""


class Engine:
  """Serves requests with one set of parameters.

  `submit` requests at any time; `step` does one round: it admits what waits,
  decodes a chunk, and returns the responses that ended. `dispatch` and
  `collect` are its two halves, with time for other work between them.
  """

  def __init__(
      self,
      compiled: compiled_lib.Compiled,
      params: base.Params,
      stop_ids: Sequence[int],
      counts: collections.Counter[str],
  ):
    """See `sampler.BoundSampler.open`.

    Args:
      compiled: the compiled programs.
      params: laid out for decoding.
      stop_ids: ids that end a response.
      counts: what is computed, and what is reused, is added to these.
    """
    count = compiled.rows[-1]
    self._programs = compiled
    self._params = params
    self._stop_ids = frozenset(stop_ids)
    self._counts = counts
    shares = compiled.shares
    self._slots = slots_lib.Slots(count, compiled.entries[-1], shares)
    self._rows = requests.empty_rows(count, compiled.admissible)
    self._cache: base.KVCache | None = None
    self._entries = 0
    self._tickets = 0
    self._waiting: list[tuple[int, requests.Request]] = []
    self._running: dict[int, _Running] = {}
    self._chunk: programs_lib.Chunk | None = None

  @property
  def busy(self) -> bool:
    """Whether any request is unanswered."""
    return bool(self._waiting or self._running)

  def submit(self, request: requests.Request) -> int:
    """Queues a request; the ticket is what `step` answers under."""
    self._tickets += 1
    self._waiting.append((self._tickets, request))
    return self._tickets

  def release(self, session: Hashable) -> None:
    """A session is over: what it left in the cache is nobody's."""
    self._slots.release(session)

  def step(self) -> list[tuple[int, requests.Completion]]:
    """One round; (ticket, response) of the requests that it finished."""
    self.dispatch()
    return self.collect()

  def dispatch(self) -> None:
    """Admits what waits and starts a chunk, without waiting for its end.

    A chunk under way is left to `collect`.
    """
    if self._chunk is not None:
      return
    with sharding.launching():
      self._admit()
      if self._running:
        self._decode()

  def _decode(self) -> None:
    high = max(self._running) + 1
    count = next(n for n in self._programs.rows if n >= high)
    rows = jax.tree.map(lambda x: x[:count], self._rows)
    self._cache, self._chunk = self._programs.decode(
        self._params, self._cache, rows
    )

  def collect(self) -> list[tuple[int, requests.Completion]]:
    """Waits for the chunk; (ticket, response) of what it finished.

    Raises:
      NotFiniteError: the policy gives no probabilities.
    """
    if self._chunk is None:
      return []
    chunk, self._chunk = jax.device_get(self._chunk), None
    before_S = self._rows.drawn_B.copy()
    for name, theirs in chunk.moved.items():
      getattr(self._rows, name)[: len(theirs)] = theirs
    self._counts['decode_steps'] += int(chunk.steps)
    finished = []
    for slot, running in list(self._running.items()):
      new = slice(0, int(self._rows.drawn_B[slot] - before_S[slot]))
      self._counts['decoded_tokens'] += new.stop
      running.parts.append(
          (
              chunk.ids_BK[slot, new],
              chunk.logprobs_BK[slot, new],
              chunk.model_logprobs_BK[slot, new],
          )
      )
      if not self._rows.live_B[slot]:
        finished.append((running.ticket, self._finish(slot)))
    return finished

  def _finish(self, slot: int) -> requests.Completion:
    running = self._running.pop(slot)
    arrays = [np.concatenate(parts) for parts in zip(*running.parts)]
    for array in arrays:
      array.flags.writeable = False
    ids, logprobs, model_logprobs = arrays
    if not np.isfinite(model_logprobs).all():
      raise NotFiniteError(
          'the log-probs of sampled tokens are not finite: the weights of the'
          ' policy are broken, or training has diverged. Give a whole'
          ' PolicySource.folder, or lower AdamW.learning_rate and start in'
          ' another --run_dir'
      )
    self._slots.finish(slot, running.request.prompt, ids)
    stopped = int(ids[-1]) in self._stop_ids
    reason = types.STOP if stopped else types.LENGTH
    return requests.Completion(ids, logprobs, reason, model_logprobs)

  def _admit(self) -> None:
    """Gives free rows to waiting requests, and computes their prompts.

    Sessions that find their row come before those that would take it. In
    passes: a prompt that is best copied from one that this pass computes waits
    for the next pass.
    """
    waiting = sorted(
        self._waiting,
        key=lambda entry: not self._slots.kept_for(entry[1].session),
    )
    chosen = waiting[: self._slots.free]
    self._waiting = waiting[self._slots.free :]
    if chosen:
      self._fit(max(requests.needed(request) for _, request in chosen))
    while chosen:
      copies: list[slots_lib.Placement] = []
      blocks: list[_Block] = []
      taken: set[int] = set()
      later = []
      for ticket, request in chosen:
        place = self._slots.place(request.prompt, request.session)
        copied = place.source != place.slot
        sources = {other.source for other in copies}
        if copied and (place.source in taken or place.slot in sources):
          later.append((ticket, request))
          continue
        taken.add(place.slot)
        if copied:
          copies.append(place)
        blocks += self._blocks(place, request.prompt)
        self._start(place, ticket, request)
      self._copy(copies)
      # Those of one start go together: they attend to as many entries.
      self._prefill(sorted(blocks, key=lambda block: block.start))
      chosen = later

  def _fit(self, needed: int) -> None:
    """Makes the cache, or makes it longer."""
    entries = next(n for n in self._programs.entries if n >= needed)
    if self._cache is None:
      self._cache = self._programs.init_cache(entries)
    elif entries > self._entries:
      self._cache = self._programs.grow(self._cache, entries)
    self._entries = max(entries, self._entries)

  def _blocks(
      self, place: slots_lib.Placement, prompt: np.ndarray
  ) -> list[_Block]:
    """Cuts what the row lacks, all but the last token, into blocks.

    The last block of a prompt starts early enough to end inside the cache;
    what it computes once more comes out the same.
    """
    size, held = self._programs.block, len(prompt) - 1
    last = self._entries - size
    starts = [min(i, last) for i in range(place.kept, held, size)]
    self._counts['reused_tokens'] += place.kept
    self._counts['prefilled_tokens'] += held - place.kept
    blocks = []
    for start in starts:
      tokens_C = np.zeros(size, np.int32)
      some = prompt[start : min(start + size, held)]
      tokens_C[: len(some)] = some
      blocks.append(_Block(tokens_C, start, place.slot))
    return blocks

  def _start(
      self, place: slots_lib.Placement, ticket: int, request: requests.Request
  ) -> None:
    """Books a request into its row."""
    self._slots.take(place, request.prompt, request.session)
    self._running[place.slot] = _Running(ticket, request)
    requests.fill(self._rows, place.slot, request)

  def _copy(self, copies: Sequence[slots_lib.Placement]) -> None:
    size = self._programs.copied
    for i in range(0, len(copies), size):
      some = list(copies[i : i + size])
      # To copy a row once more changes nothing.
      some += some[-1:] * (size - len(some))
      self._counts['copied_rows'] += len(copies[i : i + size])
      self._cache = self._programs.copy(
          self._cache,
          np.asarray([place.source for place in some], np.int32),
          np.asarray([place.slot for place in some], np.int32),
      )

  def _prefill(self, blocks: Sequence[_Block]) -> None:
    """Computes blocks; in each call as many of every share of the rows."""
    sizes, shares = self._programs.blocks, self._programs.shares
    rows = self._programs.rows[-1] // shares
    queues = [
        [block for block in blocks if block.slot // rows == share]
        for share in range(shares)
    ]
    while longest := max(map(len, queues)):
      size = _fitting(sizes, shares * longest) // shares
      some: list[_Block] = []
      for share, queue in enumerate(queues):
        part, queues[share] = queue[:size], queue[size:]
        # So does computing a block once more, or one past the end.
        fill = part[-1] if part else self._nothing(share * rows)
        some += [*part, *[fill] * (size - len(part))]
      self._counts['prefill_calls'] += 1
      self._cache = self._programs.prefill(
          self._params,
          self._cache,
          np.stack([block.tokens_C for block in some]),
          np.asarray([block.start for block in some], np.int32),
          np.asarray([block.slot for block in some], np.int32),
      )

  def _nothing(self, slot: int) -> _Block:
    """A block past the end of its row, which is not written."""
    tokens_C = np.zeros(self._programs.block, np.int32)
    return _Block(tokens_C, self._entries, slot)


@dataclasses.dataclass
class _Running:
  """A request in its row, with the parts of its response so far."""

  ticket: int
  request: requests.Request
  parts: list[tuple[np.ndarray, ...]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class _Block:
  """Tokens of a prompt, where they start, and in which row."""

  tokens_C: np.ndarray
  start: int
  slot: int


def _fitting(sizes: Sequence[int], count: int) -> int:
  """The size to compute next: full, or at least half so."""
  above = next((n for n in sizes if n >= count), sizes[-1])
  full = [n for n in sizes if n <= count]
  return above if count > above / 2 or not full else full[-1]
