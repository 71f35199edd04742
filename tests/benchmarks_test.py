"""The table of the quick start: what is read, averaged and shown."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import quickstart
from hgpo_jax.experiment import evaluate


def result(rate, games=256, inadmissible=0.1):
  low, high = evaluate.wilson(rate * games, games)
  return evaluate.Result(
      split='heldout',
      temperature=0.4,
      seeds=(0,),
      overall=evaluate.Rate(games, rate, low, high),
      by_kind={},
      by_seed={'0': rate},
      steps=10.0,
      invalid=0.0,
      inadmissible=inadmissible,
      aborted=0.0,
  )


def _write_run(run_dir, iterations, before, after):
  for iteration, rate in ((0, before), (iterations, after)):
    evaluate.save(
        quickstart.eval_path(run_dir, iteration), result(rate), iteration
    )
  lines = [
      {'iteration': i, 'time/rollout_s': 40.0, 'time/learn_s': 20.0, 'x/y_s': 9}
      for i in range(iterations)
  ]
  lines.append({'iteration': iterations, 'time/evaluate_s': 60.0})
  text = ''.join(json.dumps(line) + '\n' for line in lines)
  (run_dir / 'metrics.jsonl').write_text(text)


def test_a_finished_run_is_read(tmp_path):
  _write_run(tmp_path, 2, 0.25, 0.75)
  run = quickstart.read(tmp_path, 1)
  assert (run.before.overall.mean, run.after.overall.mean) == (0.25, 0.75)
  # 2 x (40 + 20) + 60 seconds; what is no time is not added.
  assert run.minutes == pytest.approx(3.0)


def test_interval_over_seeds_is_students():
  # By hand: mean 0.7, s = 0.1, t_{0.975, 2} = 4.302653.
  mean, low, high = quickstart.over_seeds([0.6, 0.7, 0.8])
  assert mean == pytest.approx(0.7)
  half = 4.302653 * 0.1 / np.sqrt(3)
  assert (low, high) == pytest.approx((0.7 - half, 0.7 + half), abs=1e-6)
  assert quickstart.over_seeds([0.5])[1:] == (-np.inf, np.inf)


def test_pooling_counts_each_game_once():
  results = [result(0.5), result(0.7)]
  expected = evaluate.wilson(0.6 * 256, 256)
  assert quickstart.pooled(results) == pytest.approx((0.6, *expected))
  with pytest.raises(ValueError, match='different numbers of games'):
    quickstart.pooled([result(0.5), result(0.5, games=128)])


def test_table():
  runs = [
      quickstart.Run(seed, result(0.25), result(after, inadmissible=0.02), 9)
      for seed, after in ((0, 0.6), (1, 0.7), (2, 0.8))
  ]
  lines = quickstart.table(runs).splitlines()
  assert len({line.count('|') for line in lines}) == 1
  assert len(lines) == 2 + 3 + 2
  low, high = evaluate.wilson(0.25 * 256, 256)
  assert lines[2] == (
      f'| 0 | 25.0 ({100 * low:.1f} to {100 * high:.1f}) | 60.0 (53.9 to 65.8)'
      ' | +35.0 | 10.0 | 2.0 | 9.0 |'
  )
  # The start is the same for all seeds, so it has no interval over seeds.
  assert lines[-1] == (
      '| mean, t-interval over seeds | 25.0 | 70.0 (45.2 to 94.8) | +45.0 |'
      ' 10.0 | 2.0 | 9.0 |'
  )
  assert 't-interval' not in quickstart.table(runs[:1])
