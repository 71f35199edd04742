"""How long each estimator takes, and how much longer plain loops take.

  python -m benchmarks.advantages

From trajectories (strings) to advantages, so `advantage_inputs.build` is
part of it, on 3,840 and 38,400 rows: 16 and 160 tasks of 8 episodes of 30
steps, 25 distinct observations a task. The loops of reference_advantages get
their columns of strings for nothing. Both run in this process, one after the
other; an estimator takes the least of several runs, after one that compiles.
Seconds are of CPU time, over all threads, which other work on the machine
disturbs less than the clock on the wall (--wall for that).
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import math
import sys
import time
from typing import Any

from absl import app
from absl import flags
import numpy as np

from benchmarks import reference_advantages as reference
from benchmarks import reference_potentials
from hgpo_jax import types
from hgpo_jax.advantages import base
from hgpo_jax.advantages import covgpo
from hgpo_jax.advantages import g2po
from hgpo_jax.advantages import gigpo
from hgpo_jax.advantages import graphgpo
from hgpo_jax.advantages import grpo
from hgpo_jax.advantages import hgpo
from hgpo_jax.advantages import pass_at_k
from hgpo_jax.advantages import progpo
from hgpo_jax.advantages import reinforce_pp
from hgpo_jax.advantages import rloo
from hgpo_jax.batch import advantage_inputs
from hgpo_jax.io import metrics

MEMBERS, STEPS, OBSERVATIONS, MAX_TOKENS = 8, 30, 25, 512
_SENTENCE = (
    'You arrive at {} {}. On it you see a mug {}, a {} and nothing else.'
)

# Seconds that the original PyTorch functions took for rows of this shape, 38,400
# of them: returns, penalty and advantage. One run on one CPU thread (PyTorch
# 2.13), so +-30 %; a yardstick beside the loops, which this script can time.
_ORIGINAL_S = {
    'GRPO': 7.88,
    'GiGPO': 66.33,
    'HGPO K=2': 72.64,
    'HGPO K=4': 73.81,
    'G2PO': 17.16,
    'GraphGPO': 63.71,
}

# Name -> (estimator, loops that give the same advantages, or None).
Loops = Callable[[reference.Rows], np.ndarray]
ESTIMATORS: dict[str, tuple[base.Estimator, Loops | None]] = {
    'GRPO': (grpo.GRPO(), reference.grpo),
    'Dr. GRPO': (
        grpo.GRPO(norm_by_std=False),
        lambda rows: reference.grpo(rows, norm_by_std=False),
    ),
    'RLOO': (rloo.RLOO(), reference.rloo),
    'REINFORCE++': (
        reinforce_pp.ReinforcePlusPlus(),
        lambda rows: reference.reinforce_pp(rows, baseline=False),
    ),
    'REINFORCE++ baseline': (
        reinforce_pp.ReinforcePlusPlus(baseline=True),
        reference.reinforce_pp,
    ),
    'pass@k by row': (
        pass_at_k.PassAtK(compared='row'),
        reference.pass_at_k,
    ),
    'GiGPO': (gigpo.GiGPO(), reference.gigpo),
    'HGPO K=2': (hgpo.HGPO(), reference.hgpo),
    'HGPO K=4': (
        hgpo.HGPO(history_length=4),
        lambda rows: reference.hgpo(rows, history_length=4),
    ),
    'HGPO inverse variance': (hgpo.HGPO(weighting='inverse_variance'), None),
    'G2PO': (g2po.G2PO(), reference.g2po),
    'G2PO shrinkage': (g2po.G2PO(shrinkage=1.0), None),
    'GraphGPO': (graphgpo.GraphGPO(), reference.graphgpo),
    'GiGPO similar texts': (gigpo.GiGPO(enable_similarity=True), None),
    'ProGPO': (progpo.ProGPO(), reference_potentials.progpo),
    'ProGPO similar texts': (progpo.ProGPO(classes='hash'), None),
    'CovGPO over GRPO': (
        covgpo.CovGPO(base=grpo.GRPO()),
        reference_potentials.covgpo,
    ),
    'CovGPO over HGPO': (
        covgpo.CovGPO(base=hgpo.HGPO(), level='step'),
        lambda rows: reference_potentials.covgpo(
            rows, base=reference.hgpo, level='step'
        ),
    ),
}


@dataclasses.dataclass(frozen=True)
class Timing:
  """Seconds an estimator and its loops took on the same rows."""

  rows: int
  estimator_s: float
  loops_s: float | None = None

  @property
  def ratio(self) -> float | None:
    """How many times longer the loops took."""
    return self.loops_s and self.loops_s / self.estimator_s


def make_trajectories(tasks: int, seed: int = 0) -> list[types.Trajectory]:
  """Random walks over the observations of each task.

  Half are solved, but none of every fourth task.
  """
  rng = np.random.default_rng(seed)
  result = []
  for task in range(tasks):
    texts = [
        _SENTENCE.format('shelf', i, task, i * 7) for i in range(OBSERVATIONS)
    ]
    for _ in range(MEMBERS):
      result.append(_walk(rng, texts, task, len(result)))
  return result


def _walk(
    rng: np.random.Generator, texts: list[str], task: int, index: int
) -> types.Trajectory:
  solved = bool(rng.random() < 0.5) and task % 4 < 3
  place = rng.integers(0, len(texts), STEPS + 1)
  steps = tuple(
      types.Step(
          group=task,
          trajectory=index,
          step=t,
          prompt_ids=np.zeros(8, np.int32),
          response_ids=np.zeros(rng.integers(1, MAX_TOKENS + 1), np.int32),
          sampler_logprobs=np.zeros(0, np.float32),
          finish_reason=types.STOP,
          action=f'go to shelf {place[t + 1]}',
          action_valid=bool(rng.random() < 0.9),
          action_admissible=True,
          observation=texts[place[t]],
          # Every step has its own string, as when they come from workers.
          state_key=''.join(list(texts[place[t]])),
          next_state_key=''.join(list(texts[place[t + 1]])),
          reward=10.0 * (solved and t == STEPS - 1),
      )
      for t in range(STEPS)
  )
  return types.Trajectory(
      task=types.Task('train', task, f'task {task}', 0, 'walk'),
      group=task,
      trajectory=index,
      steps=steps,
      success=solved,
      score=float(solved),
      end_reason=types.SOLVED if solved else types.MAX_STEPS,
  )


def measure(
    name: str,
    trajectories: list[types.Trajectory],
    repeats: int,
    with_loops: bool,
    clock: Callable[[], float] = time.process_time,
) -> Timing:
  """Times one estimator and its loops, and checks that they agree."""
  estimator, loops = ESTIMATORS[name]
  run = lambda: estimator(advantage_inputs.build(trajectories)[0])[0]
  got = run()
  seconds = min(_time(run, clock)[0] for _ in range(repeats))
  if loops is None or not with_loops:
    return Timing(len(got), seconds)
  rows = reference.from_trajectories(trajectories)
  loops_s, want = _time(lambda: loops(rows), clock)
  error = np.abs(got - want) / (1.0 + np.abs(want))
  if error.max() > 1e-3:
    raise AssertionError(
        f'{name}: the loops give {want[error.argmax()]} at row'
        f' {error.argmax()}, the estimator {got[error.argmax()]}'
    )
  return Timing(len(got), seconds, loops_s)


def reading_seconds(
    trajectories: list[types.Trajectory],
    clock: Callable[[], float] = time.process_time,
) -> float:
  """From trajectories to interned columns: no estimator can take less."""
  read = lambda: advantage_inputs.build(trajectories)
  return min(_time(read, clock)[0] for _ in range(5))


def _time(
    run: Callable[[], Any], clock: Callable[[], float]
) -> tuple[float, Any]:
  start = clock()
  result = run()
  return clock() - start, result


def table(
    timings: dict[str, list[Timing]], iteration_s: float | None = None
) -> str:
  """Markdown; growth is the exponent p of time ~ rows^p.

  Args:
    timings: of each estimator, at few rows and at many.
    iteration_s: of a training iteration, for the share that few rows have.
  """
  few, many = next(iter(timings.values()))
  n_log_n = [t.rows * math.log(t.rows) for t in (few, many)]
  bound = _exponent(few.rows, many.rows, *n_log_n)
  lines = [
      f'| estimator | ms at {few.rows:,} | ms at {many.rows:,} | growth'
      f' (n log n: {bound:.2f}) | of an iteration | loops, s at {many.rows:,} |'
      f' ratio at {few.rows:,} | ratio at {many.rows:,} | originals |',
      '|---|---|---|---|---|---|---|---|---|',
  ]
  for name, (small, large) in timings.items():
    growth = _exponent(
        small.rows, large.rows, small.estimator_s, large.estimator_s
    )
    original = _ORIGINAL_S.get(name)
    original = original and original / large.estimator_s
    share = iteration_s and small.estimator_s / iteration_s
    lines.append(
        f'| {name} | {1e3 * small.estimator_s:.1f} |'
        f' {1e3 * large.estimator_s:.1f} | {growth:.2f} |'
        f' {_cell(share, "{:.2%}")} | {_cell(large.loops_s, "{:.2f}")} |'
        f' {_cell(small.ratio, "{:.0f}x")} | {_cell(large.ratio, "{:.0f}x")} |'
        f' {_cell(original, "{:.0f}x")} |'
    )
  return '\n'.join(lines)


def _exponent(few: int, many: int, before: float, after: float) -> float:
  return math.log(after / before) / math.log(many / few)


def iteration_seconds(run_dir: str) -> float:
  """Median seconds of play and learning in an iteration of a run.

  The first iteration compiles; the median leaves out what stands out.
  """
  lines = metrics.read(run_dir)
  names = 'time/rollout_s', 'time/learn_s'
  played = [x for x in lines if all(name in x for name in names)]
  if not played:
    raise ValueError(
        f'--run_dir={run_dir} has no iteration yet; expected a run that trained'
    )
  return float(np.median([sum(x[name] for name in names) for x in played]))


def _cell(value: float | None, form: str) -> str:
  return '-' if value is None else form.format(value)


def main(argv: list[str]) -> None:
  """Measures and prints."""
  del argv
  clock = time.perf_counter if flags.FLAGS.wall else time.process_time
  names = flags.FLAGS.only or list(ESTIMATORS)
  run_dir = flags.FLAGS.run_dir
  try:
    iteration_s = iteration_seconds(run_dir) if run_dir else None
  except (OSError, ValueError) as error:  # Not after minutes of timing.
    sys.exit(f'error: {error}; give the folder of a run as --run_dir')
  sizes = [make_trajectories(tasks) for tasks in (16, 160)]
  timings = {}
  for name in names:
    timings[name] = [
        measure(name, size, flags.FLAGS.repeats, flags.FLAGS.loops, clock)
        for size in sizes
    ]
    print(name, timings[name], flush=True)
  print(table(timings, iteration_s))
  read_ms = [1e3 * reading_seconds(size, clock) for size in sizes]
  print(
      '\nReading the rows, which is in every figure of ours and in none of the'
      f' loops: {read_ms[0]:.1f} and {read_ms[1]:.1f} ms'
  )


def define_flags() -> None:
  """Not at import: other programs have flags of these names."""
  flags.DEFINE_integer(
      'repeats', 5, 'runs of an estimator, the least counts', lower_bound=1
  )
  flags.DEFINE_bool('loops', True, 'time the loops too; minutes in all')
  flags.DEFINE_bool('wall', False, 'seconds on the wall, not of CPU time')
  flags.DEFINE_string('run_dir', None, 'a run, for the share of an iteration')
  flags.DEFINE_list('only', [], 'names of estimators, all by default')
  flags.register_validator(
      'only',
      lambda given: set(given) <= set(ESTIMATORS),
      f'expected some of {", ".join(ESTIMATORS)}',
  )


if __name__ == '__main__':
  define_flags()
  app.run(main)
