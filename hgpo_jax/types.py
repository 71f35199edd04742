"""The records that flow through the system, and the legend of shapes.

Shapes live in names: `tokens_BT` has the axes B and T.

  N steps of one iteration      B rows of a batch     T tokens of a row
  R scored (response) tokens    V vocabulary          D model width
  H query heads                 K key/value heads     F MLP width
  L layers                      S cache length        G members of a group

Every record is frozen: once handed on it is never changed. Arrays inside
records are made read-only by whoever makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses

import numpy as np

Metrics = Mapping[str, float]

# Why a trajectory ended. Exactly one of these, always.
SOLVED = 'solved'
FAILED = 'failed'
MAX_STEPS = 'max_steps'
CONTEXT = 'context'
ENV_ERROR = 'env_error'
TIMEOUT = 'timeout'
END_REASONS = (SOLVED, FAILED, MAX_STEPS, CONTEXT, ENV_ERROR, TIMEOUT)

# Why a response ended: a stop token, or the limit on new tokens.
STOP = 'stop'
LENGTH = 'length'


@dataclasses.dataclass(frozen=True)
class Task:
  """One task of a split; enough to reset an environment to it.

  Attributes:
    split: name of the split, such as 'train' or 'valid_unseen'.
    index: position in the split, 0-based.
    task_id: unique name; for a game from a file, its path in the data folder.
    seed: what a generated task is generated from; 0 for tasks from files.
    kind: task type, such as 'pick_and_place_simple'; metrics group by it.
  """

  split: str
  index: int
  task_id: str
  seed: int
  kind: str


@dataclasses.dataclass(frozen=True)
class StepResult:
  """What an environment answers to `reset` or `step`.

  Attributes:
    observation: text shown to the agent.
    state_key: text that identifies the state; equal keys are the same state.
    admissible: the commands that the environment would act on now.
    reward: reward of the step just taken; 0.0 at reset.
    terminated: the task itself ended, solved or failed.
    truncated: the step limit cut the episode. Never set with `terminated`.
    success: None until the episode ends, then whether the task was solved.
    score: task score in [0, 1]; for tasks without partial credit, success.
    instruction: the task in words; set at reset, '' afterwards.
  """

  observation: str
  state_key: str
  admissible: tuple[str, ...]
  reward: float
  terminated: bool
  truncated: bool
  success: bool | None
  score: float
  instruction: str = ''

  @property
  def done(self) -> bool:
    """The episode is over, for whatever reason; says nothing of success."""
    return self.terminated or self.truncated


@dataclasses.dataclass(frozen=True)
class Step:
  """One prompt and its response: the unit of training.

  Attributes:
    group: id of the group of trajectories that share a task.
    trajectory: id of the trajectory, unique in the iteration.
    step: 0-based index in the trajectory.
    prompt_ids: int32 [prompt length], exactly what the sampler was given.
    response_ids: int32 [response length], exactly what was sampled, the stop
      token included.
    sampler_logprobs: float32 [response length], log-probability of each
      sampled token at the sampling temperature.
    finish_reason: 'stop' or 'length'.
    action: the command sent to the environment.
    action_valid: the response had the required format.
    action_admissible: the command was one of the admissible ones.
    observation: what the agent saw before acting.
    state_key: identifies the state before acting.
    next_state_key: identifies the state after acting.
    reward: reward of the step.
    dropped_history: history items that the token budget left out.
  """

  group: int
  trajectory: int
  step: int
  prompt_ids: np.ndarray
  response_ids: np.ndarray
  sampler_logprobs: np.ndarray
  finish_reason: str
  action: str
  action_valid: bool
  action_admissible: bool
  observation: str
  state_key: str
  next_state_key: str
  reward: float
  dropped_history: int = 0


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """One episode.

  Attributes:
    task: the task played.
    group: id shared by the trajectories of the same task in this iteration.
    trajectory: unique id in the iteration.
    steps: the steps taken, in order.
    success: whether the task was solved; never derived from `done`.
    score: task score in [0, 1].
    end_reason: one of `END_REASONS`.
    error: what went wrong, for 'env_error' and 'timeout'; else ''.
  """

  task: Task
  group: int
  trajectory: int
  steps: tuple[Step, ...]
  success: bool
  score: float
  end_reason: str
  error: str = ''

  @property
  def aborted(self) -> bool:
    """The environment failed: nothing of this episode may be trained on."""
    return self.end_reason in (ENV_ERROR, TIMEOUT)

  @property
  def outcome(self) -> float:
    """Undiscounted sum of rewards."""
    return float(sum(step.reward for step in self.steps))


@dataclasses.dataclass(frozen=True)
class RolloutBatch:
  """Steps as rows of tokens, ready for the learner. NumPy on the host.

  Only the R response positions of a row are scored, so everything about
  them is [B, R]; a row may hold several steps (segments) once packed.

  Attributes:
    tokens_BT: int32, prompt then response, padded with 0 on the right.
    positions_BT: int32, position inside the segment; 0 on padding.
    segment_ids_BT: int32, 1.. for real tokens, 0 for padding.
    target_BR: int32, index in T of each response token; 0 on padding. The
      token at index t is predicted from the hidden state at t - 1.
    action_mask_BR: bool, True where `target_BR` names a response token.
    step_BR: int32, index of the step (in the list of steps the batch was
      made from) that each response token belongs to; 0 on padding.
    sampler_logprobs_BR: float32; 0 on padding.
    row_weight_B: float32, 1 for real rows, 0 for rows added as padding.
  """

  tokens_BT: np.ndarray
  positions_BT: np.ndarray
  segment_ids_BT: np.ndarray
  target_BR: np.ndarray
  action_mask_BR: np.ndarray
  step_BR: np.ndarray
  sampler_logprobs_BR: np.ndarray
  row_weight_B: np.ndarray


@dataclasses.dataclass(frozen=True)
class PolicyBatch:
  """A rollout batch with what the policy loss needs besides.

  Attributes:
    rollout: the rows of tokens.
    advantage_BR: float32, the step's advantage on each response token.
    old_logprobs_BR: float32, of the policy that the ratio is taken to, scored
      by the learner; whatever on padding.
    ref_logprobs_BR: float32, of the reference policy; None without one.
  """

  rollout: RolloutBatch
  advantage_BR: np.ndarray
  old_logprobs_BR: np.ndarray
  ref_logprobs_BR: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class AdvantageInputs:
  """What an estimator may look at: one entry a step, ids interned on the host.

  Rows may come in any order; a row is known by (group, trajectory, step).

  Attributes:
    reward_N: float32, environment reward of the step.
    outcome_N: float32, sum of rewards of the step's trajectory.
    success_N: bool, whether the step's trajectory solved its task.
    group_N: int32, 0.. dense.
    trajectory_N: int32, 0.. dense over the batch.
    step_N: int32, 0-based index in the trajectory.
    state_N: int32, id of the state before acting, dense over the batch.
    next_state_N: int32, id of the state after acting, same numbering.
    action_N: int32, id of the action text, dense.
    valid_N: bool, the action had the required format.
    state_texts: text of each state id, for estimators that compare texts.
    response_tokens_N: int32, tokens of the step's response, for estimators
      that weigh steps by their tokens; None where nobody counted them.
    embed_texts: float64 [texts, D] vectors of texts, from the policy's table of
      token embeddings; for estimators that compare meanings. None where there
      is no policy.
  """

  reward_N: np.ndarray
  outcome_N: np.ndarray
  success_N: np.ndarray
  group_N: np.ndarray
  trajectory_N: np.ndarray
  step_N: np.ndarray
  state_N: np.ndarray
  next_state_N: np.ndarray
  action_N: np.ndarray
  valid_N: np.ndarray
  state_texts: tuple[str, ...] = ()
  response_tokens_N: np.ndarray | None = None
  embed_texts: Callable[[Sequence[str]], np.ndarray] | None = None
