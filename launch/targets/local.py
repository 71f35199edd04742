"""This machine: one training process, restarted when it is preempted."""

from __future__ import annotations

from launch import plan as plan_lib
from launch import supervise


def make_plan(request: plan_lib.Request) -> plan_lib.Plan:
  """One process that uses every local device."""
  process = plan_lib.Process(
      argv=request.argv(),
      env=(('PYTHONUNBUFFERED', '1'),),
      log=request.run_dir / 'logs' / 'process_0.log',
  )
  return plan_lib.Plan('local', (process,), request.max_restarts)


def submit(plan: plan_lib.Plan) -> int:
  """Runs the plan here, in the foreground; returns its exit code."""
  for process in plan.processes:
    print(f'launch: follow the run with: tail -f {process.log}', flush=True)
  return supervise.run(plan)
