"""GraphGPO: steps compared by how near to the goal they lead."""

from __future__ import annotations

import dataclasses

import numpy as np

from hgpo_jax import config
from hgpo_jax import types
from hgpo_jax.advantages import episode
from hgpo_jax.advantages import graph
from hgpo_jax.advantages import grouping
from hgpo_jax.advantages import metrics
from hgpo_jax.advantages import segments

GOALS = ('success', 'positive_outcome')


@config.configurable
@dataclasses.dataclass(frozen=True)
class GraphGPO:
  """Graph-based group policy optimization.

  The steps of a task are the edges of one directed graph: from the state
  before to the state after, and from the last state of a solved episode to
  the goal. d(x) is the number of edges on the shortest path from x to the
  goal; states without a path have the largest d of the task plus 1. The
  return of a step x -> x' is

    q = 10 gamma^d(x')                 or, with normalize_distance,
    q = 10 gamma^(d(x') - d(x) + 1),   less c (1 - v).

  A = w_S S + w_E E: S compares q with the steps of the task that start from
  the same state (ddof 1; a state met once gives 0), E is GRPO's term. Rewards
  enter through E alone. A task that nobody solved has equal returns, but for
  the penalty. A step stands once in the statistics, however many rows repeat
  it.

  Paths are as true as states are told apart. Where a state is only what is
  seen, such as a shelf before and after the mug in hand was heated, paths lead
  through what was never done: set the environment's state key, in ALFWorld
  `AlfworldEnv.state_key = 'inventory'`.

  Attributes:
    gamma: discount an edge, in (0, 1].
    mode: 'mean_std_norm' divides both terms by their std, 'mean_norm' does
      not.
    step_advantage_weight: w_S above.
    episode_advantage_weight: w_E above.
    normalize_distance: rate a step by the progress it makes rather than by
      where it leads.
    goal: which episodes end at the goal: 'success', those that solved their
      task, or 'positive_outcome', those whose rewards add up to more than 0.
    enable_similarity: states with similar texts are one node
      (`grouping.similar_states`). Much slower.
    similarity_threshold: smallest difflib ratio of similar texts, in (0, 1].
    similar_step_groups: with similarity, compare steps of similar states too;
      if False only the graph merges states.
    invalid_action_penalty: c above; 0 for none.
    visit_order: the order in which similar states form clusters: 'step', by
      step index and texts, or 'row', as the rows come.
  """

  gamma: float = 0.1
  mode: str = 'mean_std_norm'
  step_advantage_weight: float = 1.0
  episode_advantage_weight: float = 1.0
  normalize_distance: bool = False
  goal: str = 'success'
  enable_similarity: bool = False
  similarity_threshold: float = 0.95
  similar_step_groups: bool = True
  invalid_action_penalty: float = 0.1
  visit_order: str = 'step'

  def __post_init__(self):
    episode.check_range('GraphGPO.gamma', self.gamma, 1e-6, 1.0)
    episode.check_choice('GraphGPO.mode', self.mode, episode.MODES)
    episode.check_choice('GraphGPO.goal', self.goal, GOALS)
    for name in (
        'step_advantage_weight',
        'episode_advantage_weight',
        'invalid_action_penalty',
    ):
      episode.check_range(f'GraphGPO.{name}', getattr(self, name), 0.0)
    episode.check_range(
        'GraphGPO.similarity_threshold', self.similarity_threshold, 1e-6, 1.0
    )
    episode.check_choice(
        'GraphGPO.visit_order', self.visit_order, episode.VISIT_ORDERS
    )

  def unread(self) -> dict[str, str]:
    """Fields without effect, each with the setting that leaves it so."""
    if self.enable_similarity:
      return {}
    fields = 'similarity_threshold', 'similar_step_groups', 'visit_order'
    return dict.fromkeys(fields, 'enable_similarity')

  def __call__(
      self, inputs: types.AdvantageInputs
  ) -> tuple[np.ndarray, types.Metrics]:
    """Returns (float32 [N] advantages, metrics)."""
    episode.check_inputs(inputs)
    table = grouping.index_steps(inputs)
    row_U = table.row_U
    divide_by_std = self.mode == 'mean_std_norm'
    penalty_U = episode.penalty(inputs, self.invalid_action_penalty)[row_U]
    outcome = episode.normalise_scores(
        inputs.outcome_N[row_U] - penalty_U,
        inputs.group_N[row_U],
        divide_by_std=divide_by_std,
    )
    state_U, next_U = self._states(inputs, table)
    before_U, after_U = self.distances(inputs, table, state_U, next_U)
    if self.enable_similarity and not self.similar_step_groups:
      state_U = inputs.state_N[row_U]
    return_U = self._returns(before_U, after_U)
    step = segments.normalise(
        return_U - penalty_U,
        grouping.pair_ids(inputs.group_N[row_U], state_U),
        ddof=1,
        divide_by_std=divide_by_std,
        keep_singletons=False,
        scale_N=return_U + penalty_U,
    )
    weights = self.step_advantage_weight, self.episode_advantage_weight
    advantage_U = (
        np.float32(weights[0]) * step.value_N
        + np.float32(weights[1]) * outcome.value_N
    )
    advantage_N = advantage_U[table.inverse_N]
    return advantage_N, {
        **metrics.level('episode', outcome),
        **metrics.level('step', step),
        **metrics.overall(inputs, advantage_N),
    }

  def distances(
      self,
      inputs: types.AdvantageInputs,
      table: grouping.StepTable,
      state_U: np.ndarray,
      next_U: np.ndarray,
  ) -> tuple[np.ndarray, np.ndarray]:
    """d of the states before and after each distinct step; next_U -1: goal."""
    num = len(state_U)
    group_U = grouping.pair_ids(inputs.group_N[table.row_U])
    group_X = np.concatenate([group_U, group_U])
    node_X = grouping.pair_ids(group_X, np.concatenate([state_U, next_U]))
    # The goals come after the states, one a task.
    states = int(node_X.max(initial=-1)) + 1
    goals = int(group_U.max(initial=-1)) + 1
    node_X = np.where(node_X < 0, states + group_X, node_X)
    distance_X = graph.distances_to(
        np.arange(states, states + goals),
        node_X[:num],
        node_X[num:],
        states + goals,
    )[node_X]
    far_G = np.zeros(goals, int)
    np.maximum.at(far_G, group_X, distance_X)
    distance_X = np.where(distance_X < 0, far_G[group_X] + 1, distance_X)
    return distance_X[:num], distance_X[num:]

  def _returns(self, before_U: np.ndarray, after_U: np.ndarray) -> np.ndarray:
    left_U = after_U - before_U + 1 if self.normalize_distance else after_U
    return (10.0 * self.gamma**left_U).astype(np.float32)

  def _states(
      self, inputs: types.AdvantageInputs, table: grouping.StepTable
  ) -> tuple[np.ndarray, np.ndarray]:
    """States before and after each distinct step, the goal as -1."""
    row_U = table.row_U
    reached_U = (
        inputs.success_N[row_U].astype(bool)
        if self.goal == 'success'
        else inputs.outcome_N[row_U] > 0.0
    )
    reached_U[:-1] &= np.diff(table.trajectory_U) != 0
    state_N, next_N = inputs.state_N, inputs.next_state_N
    if self.enable_similarity:
      state_N, next_N = self._merge(inputs, reached_U[table.inverse_N])
    return state_N[row_U], np.where(reached_U, -1, next_N[row_U])

  def _merge(
      self, inputs: types.AdvantageInputs, reached_N: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """Similar states made one, each step's state before ahead of its next."""
    # What is replaced by the goal must not open a cluster.
    next_N = np.where(reached_N, inputs.state_N, inputs.next_state_N)
    visit_N = episode.visit_order(inputs, self.visit_order)
    merged_X = grouping.similar_states(
        np.repeat(inputs.group_N, 2),
        np.stack([inputs.state_N, next_N], axis=1).ravel(),
        np.stack([2 * visit_N, 2 * visit_N + 1], axis=1).ravel(),
        inputs.state_texts,
        self.similarity_threshold,
    )
    return merged_X[::2], merged_X[1::2]
