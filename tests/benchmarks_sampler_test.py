"""What the benchmark of the sampler plays, and the table it prints."""

from __future__ import annotations

import numpy as np

from benchmarks import sampler
from benchmarks import sampler_workload as workload


def test_a_turn_goes_on_from_the_conversation_so_far():
  asked = []

  def generate(prompts, number):
    asked.append((prompts[0], number))
    return [[workload.VOCAB - 1, 1]]

  made = workload.one_by_one(generate, seed=3, groups=2)
  calls = 2 * workload.MEMBERS * workload.TURNS
  assert made == 2 * calls and len({number for _, number in asked}) == calls
  sizes = [len(prompt) for prompt, _ in asked[: workload.TURNS]]
  grows = 2 + workload.OBSERVED
  assert sizes == [workload.FIRST + i * grows for i in range(workload.TURNS)]
  first, second = asked[0][0], asked[1][0]
  np.testing.assert_array_equal(second[: workload.FIRST], first)
  # Members of a group begin alike, groups do not.
  np.testing.assert_array_equal(asked[workload.TURNS][0], first)
  other = asked[workload.MEMBERS * workload.TURNS][0]
  assert not np.array_equal(other, first)
  for prompt, _ in asked:
    seen = prompt[-workload.OBSERVED :]
    assert not np.isin(seen, (0, *workload.STOPS)).any()


def test_the_table_compares_medians():
  rounds = lambda *seconds: [
      {'tokens': 100, 'cpu_s': s, 'wall_s': 2 * s} for s in seconds
  ]
  found = {'plain': {'ours': rounds(1, 9, 2), 'tunix': rounds(4, 4, 5)}}
  lines = sampler.table(found).splitlines()
  assert '| plain | ours | 50 | 1.00 x | 4.00 |' in lines
  assert '| plain | tunix | 25 | 2.00 x | 8.00 |' in lines
