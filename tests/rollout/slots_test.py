"""The books of the cache."""

from __future__ import annotations

import numpy as np
import pytest

from hgpo_jax.rollout import slots as slots_lib


@pytest.mark.parametrize(
    ('shares', 'order'),
    [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 3, 1, 4, 2, 5]), (3, [0, 2, 4, 1, 3, 5])],
)
def test_rows_not_yet_used_are_taken_from_each_share_in_turn(shares, order):
  slots, taken = slots_lib.Slots(6, 32, shares), []
  for first in range(6):
    prompt = np.asarray([first, 9, 9])
    place = slots.place(prompt, None)
    slots.take(place, prompt, None)
    taken.append(place.slot)
  assert taken == order
  # After that the one that has been idle longest.
  for slot in (4, 1):
    slots.finish(slot, np.asarray([order.index(slot), 9, 9]), np.asarray([7]))
  assert slots.place(np.asarray([8, 8]), None).slot == 4
