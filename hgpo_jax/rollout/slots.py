"""The books of the cache: which tokens each row holds, and what can be reused.

No device here. A row ('slot') is live while a response is decoded in it; after
that it keeps its tokens until another prompt takes it, so that a prompt which
begins alike need only be computed from where the two part.
"""

from __future__ import annotations

from collections.abc import Hashable
import dataclasses
import itertools

import numpy as np

# A copy of a row is worth it from so many tokens on.
_MIN_COPIED = 8


@dataclasses.dataclass(frozen=True)
class Placement:
  """Where a prompt goes.

  Attributes:
    slot: the row.
    source: the row that its first tokens are copied from; `slot` for none.
    kept: how many of its first tokens the row then holds.
  """

  slot: int
  source: int
  kept: int


class Slots:
  """The books of `count` rows of at most `entries` tokens.

  Where devices have shares of them, rows not yet used are taken from each share
  in turn: what their prompts need is computed by their share.

  Attributes:
    live_S: bool, rows in which a response is decoded.
  """

  def __init__(self, count: int, entries: int, shares: int = 1):
    self.live_S = np.zeros(count, bool)
    self._tokens_SA = np.zeros((count, entries), np.int32)
    self._length_S = np.zeros(count, np.int64)
    # Leading tokens that prefill wrote. Those that decoding wrote differ from
    # them in rounding, so they serve their own session only: what others get
    # must not depend on who was there before.
    self._pure_S = np.zeros(count, np.int64)
    # Before any time, in the order in which they are to be taken.
    self._used_S = np.arange(count) % (count // shares) - count
    # Sessions are numbered; 0 is nobody.
    self._owner_S = np.zeros(count, np.int64)
    self._sessions: dict[Hashable, int] = {}
    self._numbers = itertools.count(1)
    self._clock = 0

  @property
  def free(self) -> int:
    """How many rows are not live."""
    return int((~self.live_S).sum())

  def kept_for(self, session: Hashable | None) -> bool:
    """Whether a free row still has what this session left there."""
    owner = self._sessions.get(session, -1)
    return bool((~self.live_S & (self._owner_S == owner)).any())

  def place(self, prompt: np.ndarray, session: Hashable | None) -> Placement:
    """The best row for a prompt, of which at least one must be free.

    Its own session's row; else one that no session owns, the likest first;
    else the one that has been idle longest. All tokens but the last may be
    reused: that one is computed in any case, its logits are wanted.
    """
    owner = self._sessions.get(session, -1)
    usable_S = self._usable(prompt[:-1], owner)
    free_S = ~self.live_S
    own_S = free_S & (self._owner_S == owner)
    unowned_S = free_S & (self._owner_S == 0)
    if own_S.any():
      slot = int(own_S.argmax())
    elif unowned_S.any():
      best_S = unowned_S & (usable_S == usable_S[unowned_S].max())
      slot = self._oldest(best_S)
    else:
      slot = self._oldest(free_S)
    source = int(usable_S.argmax())
    if usable_S[source] < usable_S[slot] + _MIN_COPIED:
      source = slot
    return Placement(slot, source, int(usable_S[source]))

  def take(
      self, placement: Placement, prompt: np.ndarray, session: Hashable | None
  ) -> None:
    """Books a prompt, all but its last token, into its row, which is live."""
    slot, held = placement.slot, len(prompt) - 1
    copied = placement.source != slot
    if copied or placement.kept <= self._pure_S[slot]:
      self._pure_S[slot] = held
    self._tokens_SA[slot, :held] = prompt[:-1]
    self._length_S[slot] = held
    self._owner_S[slot] = self._number(session)
    self.live_S[slot] = True
    self._touch(slot)

  def finish(self, slot: int, prompt: np.ndarray, ids: np.ndarray) -> None:
    """Books a response, all but its last token; the row is free again."""
    held = len(prompt) - 1
    end = held + len(ids)
    self._tokens_SA[slot, held] = prompt[-1]
    self._tokens_SA[slot, held + 1 : end] = ids[:-1]
    self._length_S[slot] = end
    self.live_S[slot] = False
    self._touch(slot)

  def release(self, session: Hashable) -> None:
    """A session is over: its row is nobody's."""
    number = self._sessions.pop(session, -1)
    self._owner_S[self._owner_S == number] = 0

  def _number(self, session: Hashable | None) -> int:
    if session is None:
      return 0
    return self._sessions.setdefault(session, next(self._numbers))

  def _oldest(self, among_S: np.ndarray) -> int:
    return int(np.where(among_S, self._used_S, np.iinfo(np.int64).max).argmin())

  def _usable(self, held: np.ndarray, owner: int) -> np.ndarray:
    """How many of the first tokens of `held` each row can give."""
    same_SA = self._tokens_SA[:, : len(held)] == held
    differs_SA = np.pad(~same_SA, ((0, 0), (0, 1)), constant_values=True)
    own_S = self._owner_S == owner
    limit_S = np.where(own_S, self._length_S, self._pure_S)
    return np.minimum(differs_SA.argmax(axis=1), limit_S)

  def _touch(self, slot: int) -> None:
    self._clock += 1
    self._used_S[slot] = self._clock
