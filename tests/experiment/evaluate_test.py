"""Evaluation: every game once a seed, intervals, records, tables."""

from __future__ import annotations

import collections
import dataclasses
import json

import pytest

from hgpo_jax import types
from hgpo_jax.experiment import evaluate
from hgpo_jax.experiment import runtime
from hgpo_jax.experiment import saved_policy
from hgpo_jax.experiment import spec as spec_lib
from tests.experiment import runs


def _task(index: int, kind: str = 'open') -> types.Task:
  return types.Task('valid', index, f'toy/{kind}-{index}', index, kind)


def _played(task: types.Task, success: bool, **changes) -> types.Trajectory:
  trajectory = types.Trajectory(
      task=task,
      group=task.index,
      trajectory=task.index,
      steps=(),
      success=success,
      score=float(success),
      end_reason=types.SOLVED if success else types.MAX_STEPS,
  )
  return dataclasses.replace(trajectory, **changes)


def _spec(**changes) -> spec_lib.Evaluation:
  return spec_lib.Evaluation(split='valid', **changes)


@pytest.mark.parametrize(
    'successes, games, low, high',
    [
        # Newcombe (1998), Statistics in Medicine 17, table I: method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        # Solved by hand: 1 / (1 + z2 / n) and its mirror image.
        (20, 20, 0.8389, 1.0),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_interval(successes, games, low, high):
  found = evaluate.wilson(successes, games)
  assert found == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_narrows_with_games():
  widths = [
      high - low
      for low, high in (evaluate.wilson(0.7 * n, n) for n in (10, 100, 1000))
  ]
  assert widths == sorted(widths, reverse=True)
  assert widths[2] == pytest.approx(2 * 1.96 * (0.21 / 1000) ** 0.5, rel=1e-2)


def test_134_games_in_16_slots_are_each_played_once_a_seed(
    policy, one_device, monkeypatch
):
  spec = runs.load(
      policy,
      'Boxes.valid_size = 134',
      'Boxes.max_steps = 2',
      'Workers.slots = 16',
      'Evaluation.seeds = (0, 1)',
      'Evaluation.temperature = 1.0',
  )
  reset_tasks = collections.Counter()
  with runtime.open_player(spec) as player:
    assert player.pool.num_slots == 16
    submit = player.pool.submit

    def counted(acts):
      tasks = [act for act in acts.values() if isinstance(act, types.Task)]
      reset_tasks.update(task.index for task in tasks)
      submit(acts)

    monkeypatch.setattr(player.pool, 'submit', counted)
    params = player.put(spec.policy.load(player.model))
    split = spec.env.split('valid')
    result = evaluate.evaluate(spec.evaluation, split, player.collector, params)
    first = evaluate.evaluate(
        dataclasses.replace(spec.evaluation, seeds=(1,), games=7),
        split,
        player.collector,
        params,
    )
  once_a_seed = {index: 2 for index in range(134)}
  first_again = {index: 1 for index in range(7)}
  assert reset_tasks == collections.Counter(once_a_seed) + collections.Counter(
      first_again
  )
  assert result.overall.games == 134 and result.seeds == (0, 1)
  # A box out of three, twice, with a wrong one never taken back.
  assert 0.3 < result.overall.mean < 0.8
  assert result.by_seed['0'] != result.by_seed['1']
  mean = sum(result.by_seed.values()) / 2
  assert result.overall.mean == pytest.approx(mean)
  # A game of one seed is the same whatever else is played.
  assert first.overall.games == 7


def test_summary_counts_games_by_kind_and_seed():
  tasks = [_task(0), _task(1), _task(2, 'put'), _task(3, 'put')]
  played = {
      5: [_played(t, success=t.index in (0, 2)) for t in tasks],
      6: [_played(t, success=t.index == 0) for t in tasks],
  }
  played[6][3] = _played(tasks[3], False, end_reason=types.TIMEOUT)
  found = evaluate.summarize(_spec(seeds=(5, 6)), tasks, played)
  assert found.overall.mean == pytest.approx(3 / 8)
  assert found.by_kind['open'].mean == pytest.approx(0.5)
  assert found.by_kind['put'].mean == pytest.approx(0.25)
  assert found.by_kind['put'].games == 2
  assert found.by_seed == {'5': 0.5, '6': 0.25}
  assert found.aborted == pytest.approx(1 / 8)
  low, high = evaluate.wilson(1.5, 4)  # Not of 8: seeds are not games.
  assert (found.overall.low, found.overall.high) == (low, high)


def test_spread_over_seeds_is_in_the_record_and_the_table():
  tasks = [_task(index) for index in range(4)]
  played = {
      seed: [_played(t, t.index < won) for t in tasks]
      for seed, won in ((0, 1), (1, 2), (2, 4))
  }
  found = evaluate.summarize(_spec(seeds=(0, 1, 2)), tasks, played)
  # By hand: 0.25, 0.5, 1.0; deviations from 7/12: -1/3, -1/12, 5/12.
  expected = ((16 + 1 + 25) / 144 / 2) ** 0.5
  assert found.spread == pytest.approx(expected)
  assert found.metrics()['eval/success_rate_spread'] == found.spread
  line = f'| mean ± deviation over seeds (seeds) | | 58.3 ± {100 * expected:.1f} (3) |'
  assert line in evaluate.table({'x': found}).splitlines()


def test_draws_are_counted_an_episode_each():
  tasks = [_task(0), _task(1, 'put'), _task(2, 'put')]
  drawn = [tasks[0], tasks[2], tasks[2], tasks[2]]
  played = {0: [_played(t, t.index == 2) for t in drawn]}
  found = evaluate.summarize(_spec(draws=4), tasks, played)
  assert found.overall.games == 4 and found.overall.mean == 0.75
  assert found.by_kind['put'] == evaluate._rate([1.0] * 3)
  assert found.draws == 4
  line = '| games drawn with replacement, a seed | | 4 |'
  assert line in evaluate.table({'x': found}).splitlines()


def test_draws_depend_on_the_seed_and_repeat_games():
  tasks = [_task(index) for index in range(134)]
  drawn = evaluate.draw(tasks, 128, 0)
  assert drawn == evaluate.draw(tasks, 128, 0) != evaluate.draw(tasks, 128, 1)
  # Expected different games: 134 (1 - (133 / 134)^128) = 82.7.
  assert 70 < len(set(drawn)) < 96


@pytest.mark.parametrize('played', [[0], [0, 0], [0, 1, 1], [0, 2]])
def test_a_game_left_out_or_played_twice_is_refused(played):
  tasks = [_task(0), _task(1)]
  episodes = [_played(_task(index), True) for index in played]
  with pytest.raises(ValueError, match='expected each of 2 tasks once'):
    evaluate.summarize(_spec(), tasks, {0: episodes})


def test_result_as_json_and_back(tmp_path):
  tasks = [_task(0), _task(1, 'put')]
  found = evaluate.summarize(
      _spec(), tasks, {0: [_played(t, t.index == 0) for t in tasks]}
  )
  path = tmp_path / 'deep' / 'result.json'
  evaluate.save(path, found, iteration=3)
  assert evaluate.load(path) == found
  record = json.loads(path.read_text())
  assert record['iteration'] == 3 and record['split'] == 'valid'
  assert record['overall']['games'] == 2
  assert [p.name for p in path.parent.iterdir()] == ['result.json']


def test_table_and_metrics():
  tasks = [_task(0), _task(1), _task(2, 'put')]
  before, after = (
      evaluate.summarize(
          _spec(), tasks, {0: [_played(t, t.index in won) for t in tasks]}
      )
      for won in ((), (0, 2))
  )
  assert evaluate.table({'before': before, 'after': after}).splitlines() == [
      '| held-out success, % | games | before | after |',
      '|---|---|---|---|',
      '| open | 2 | 0.0 | 50.0 |',
      '| put | 1 | 0.0 | 100.0 |',
      '| **all** (95 % interval) | 3 | **0.0** (0.0 to 56.1) | **66.7** (20.8'
      ' to 93.9) |',
      '| invalid format, % | | 0.0 | 0.0 |',
      '| inadmissible actions, % | | 0.0 | 0.0 |',
      '| steps an episode | | 0.0 | 0.0 |',
  ]
  metrics = after.metrics()
  assert metrics['eval/success_rate'] == pytest.approx(2 / 3)
  assert metrics['eval/success_rate_put'] == 1.0
  assert metrics['eval/games'] == 3.0


def test_evaluating_a_run_repeats_its_last_evaluation(
    policy, finished, one_device
):
  spec = runs.load(policy, 'Experiment.iterations = 2')
  name, iteration, result = saved_policy.evaluate(spec, finished)
  assert (name, iteration) == ('finished', 2)
  assert result == evaluate.load(finished / 'eval' / 'iteration_000002.json')
  name, iteration, result = saved_policy.evaluate(spec, None)
  assert (name, iteration) == (str(policy), 0)
  assert result == evaluate.load(finished / 'eval' / 'iteration_000000.json')


@pytest.mark.parametrize(
    'name, expected',
    [
        ('result.md', 'expected a name that ends in .json'),
        ('.', 'expected a name that ends in .json'),
        ('folder.json', 'is a folder; give a file in it'),
        ('file/result.json', 'cannot be written to'),
        ('table.json', 'table.md is a folder; give a file in it'),
    ],
)
def test_places_that_take_no_result(tmp_path, name, expected):
  (tmp_path / 'folder.json').mkdir()
  (tmp_path / 'table.md').mkdir()
  (tmp_path / 'file').touch()
  with pytest.raises(OSError, match=f'--out={tmp_path}.*{expected}'):
    evaluate.check_out(tmp_path / name)


def test_eval_refuses_such_a_place_before_playing(policy, tmp_path):
  arguments = [*runs.arguments(policy, None), f'--out={tmp_path}/result.md']
  process = runs.Process('eval', arguments, tmp_path / 'log')
  assert process.wait() == 1
  said = [x for x in process.output.splitlines() if not x.startswith('I')]
  assert len(said) == 1 and said[0].startswith('error: --out=')


def test_eval_command(policy, finished, tmp_path):
  out = tmp_path / 'result.json'
  process = runs.Process(
      'eval',
      [
          *runs.arguments(policy, finished, 'Experiment.iterations = 2'),
          f'--out={out}',
      ],
      tmp_path / 'log',
  )
  assert process.wait() == 0, process.output
  expected = evaluate.load(finished / 'eval' / 'iteration_000002.json')
  assert evaluate.load(out) == expected
  table = evaluate.table({'finished': expected})
  assert table in process.output
  assert out.with_suffix('.md').read_text() == table + '\n'


def test_eval_command_draws_as_verl_agent_does(policy, finished, tmp_path):
  out = tmp_path / 'drawn.json'
  process = runs.Process(
      'eval',
      [
          *runs.arguments(policy, finished, 'Experiment.iterations = 2'),
          f'--out={out}',
          '--compat=verl_agent',
      ],
      tmp_path / 'log',
  )
  assert process.wait() == 0, process.output
  found = evaluate.load(out)
  assert found.draws == found.overall.games == 128
