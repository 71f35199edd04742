"""The benchmark of rollouts ahead: its environment, and what it prints."""

from __future__ import annotations

import time

from benchmarks import ahead
from benchmarks import waiting
from tests.envs import toy


def test_only_steps_wait_and_results_are_those_of_the_environment(monkeypatch):
  waits = []
  monkeypatch.setattr(time, 'sleep', lambda seconds: waits.append(seconds))
  plain = toy.ToySpec()
  spec = waiting.Waiting(env=plain, step_ms=30.0)
  spec.check()
  spec.prepare(plain.split('train')[0])
  assert spec.max_steps == plain.max_steps
  assert len(spec.split('valid')) == len(plain.split('valid'))
  task = spec.split('train')[0]
  waits.clear()
  env, other = spec.make(), plain.make()
  waits.clear()
  assert env.reset(task) == other.reset(task)
  action = toy.solution(plain, task)[0]
  assert not waits
  assert env.step(action) == other.step(action)
  assert waits == [0.03]
  env.close()
  other.close()


def test_the_table_compares_seconds_of_a_step():
  def rows(lag, *walls):
    row = {'cpu_s': 2.0, 'rollout_s': 3.0, 'wait_s': 1.0, 'learn_s': 4.0}
    return [{**row, 'wall_s': w, 'steps': 100.0, 'lag': lag} for w in walls]

  text = ahead.table({0: rows(0.0, 8.0, 9.0, 10.0), 1: rows(1.0, 6.0)})
  assert (
      '| 0 | 9.00 | 2.00 | 3.00 | 1.00 | 4.00 | 100 | 90.00 | 20.00 |' in text
  )
  assert '| 1 | 6.00 | 2.00 |' in text
  assert '1 over 0, a step: 0.67 of the wall time, 1.00 of the CPU' in text
