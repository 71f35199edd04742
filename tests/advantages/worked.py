"""Small groups whose advantages were worked out by hand."""

from __future__ import annotations

from hgpo_jax import types
from tests.advantages import rows


def episodes(
    paths: list[list[str]],
    outcomes: list[float],
    groups: list[int] | None = None,
    success: list[bool] | None = None,
) -> types.AdvantageInputs:
  """Inputs from 'state-action' texts; the last entry is the state at the end.

  Args:
    paths: an episode each; actions may be left out ('A' is 'A-').
    outcomes: reward of each episode's last step.
    groups: task group of each episode; all 0 by default.
    success: of each episode; whether its outcome is positive by default.
  """
  columns: dict[str, list[float]] = {}
  states: dict[str, int] = {}
  actions: dict[str, int] = {}
  groups = groups or [0] * len(paths)
  for trajectory, path in enumerate(paths):
    pairs = [(entry + '-').split('-')[:2] for entry in path]
    for step, (state, action) in enumerate(pairs[:-1]):
      last = step == len(pairs) - 2
      outcome = outcomes[trajectory]
      row = {
          'reward_N': outcome if last else 0.0,
          'outcome_N': outcome,
          'success_N': success[trajectory] if success else outcome > 0.0,
          'group_N': groups[trajectory],
          'trajectory_N': trajectory,
          'step_N': step,
          'state_N': states.setdefault(state, len(states)),
          'action_N': actions.setdefault(action, len(actions)),
          'valid_N': True,
      }
      after = pairs[step + 1][0]
      row['next_state_N'] = states.setdefault(after, len(states))
      for name, value in row.items():
        columns.setdefault(name, []).append(value)
  return rows.make_inputs(columns, tuple(states))


def two_successes_and_a_failure() -> types.AdvantageInputs:
  """A detour in a success, and a recovery in a failure; b looks like B."""
  return episodes(
      [
          ['A-go1', 'B-take', 'C-put', 'won'],
          ['A-go1', 'B-look', 'b-take', 'C-wait', 'lost'],
          ['A-go2', 'D-go1', 'B-take', 'C-put', 'won'],
      ],
      [10.0, 0.0, 10.0],
  )


def three_failures() -> types.AdvantageInputs:
  """Some go in circles, one explores; a second group solved its task."""
  return episodes(
      [
          ['A', 'B', 'A', 'B', 'N', 'N'],
          ['A', 'N', 'N', 'N', 'N', 'N'],
          ['A', 'B', 'C', 'N', 'D', 'C'],
          ['A', 'B'],
          ['A', 'C'],
      ],
      [0.0, 0.0, 0.0, 10.0, 0.0],
      groups=[0, 0, 0, 1, 1],
  )
