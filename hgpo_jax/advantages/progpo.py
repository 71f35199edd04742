"""ProGPO: peers with the same past, and progress between pooled potentials."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from hgpo_jax import config
from hgpo_jax import types
from hgpo_jax.advantages import episode
from hgpo_jax.advantages import grouping
from hgpo_jax.advantages import metrics
from hgpo_jax.advantages import potentials
from hgpo_jax.advantages import segments
from hgpo_jax.advantages import semantic

PREFIXES = ('full', 'states')
COMBINATIONS = ('fill', 'add')


@config.configurable
@dataclasses.dataclass(frozen=True)
class ProGPO:
  """Progress-based group policy optimization (arXiv 2607.04242), derived.

  The abstract fixes the parts: comparison of actions after exactly the same
  past, transition credit from potentials of states pooled over rollouts, with
  semantic classes and inverse-variance fusion over history depths. It has no
  formulas; those below are ours. With y = R / max_return and T steps in the
  episode, G_t = gamma^(T-1-t) y (t from 0), and

    E: GRPO's term over all steps of the task (ddof 1), of R - c (1 - v).
    P = (G - mean) / (std + 1e-6) over the steps with the same prefix (states
      and actions so far), std with ddof 0. It counts if they took at least
      two distinct actions and their returns differ: a peer signal.
    T = (d - mean) / (std + 1e-6) over all steps of the task, ddof 0, of
      d_t = r_t + gamma F_{t+1} - F_t, where r is y at the last step and 0
      before, F is the potential (`potentials.fuse`), 0 after the end.
    A = w_E E + w_P P + w_T m T.

  Where no state is met twice F = G, so d = 0: there is transition credit
  only where other episodes say something. A task of one episode has none, nor
  one whose returns are all the same. A step stands once in the statistics,
  however many rows repeat it.

  Attributes:
    history_length: K; potentials look at the last 0..K states besides.
    gamma: discount a step, in [0, 1].
    mode: 'mean_std_norm' as above; 'mean_norm' divides by no std, and P and T
      are times max_return, the unit of E.
    classes: which states share a potential, one of `semantic.KINDS`.
    similarity_threshold: of the classes 'hash', 'difflib' and 'embed', in
      (0, 1]. For 'embed' 0.98: below, the packaged policy's embeddings take
      picking a thing up for putting it down.
    prefix: 'full', or 'states' for a past without the actions.
    combine: 'fill', m is 1 for steps without a peer signal, else 0; 'add', m
      is 1.
    reliability_gate: multiplies m by s02 / (s02 + var F_t + gamma^2 var
      F_{t+1}), s02 being the variance of G in the task.
    episode_weight: w_E.
    peer_weight: w_P.
    transition_weight: w_T.
    shrinkage: `nu` of `potentials.fuse`.
    depth_penalty: `beta` of `potentials.fuse`.
    variance_floor: of `potentials.fuse`.
    max_return: the outcome of a solved task.
    invalid_action_penalty: c above; 0 for none.
  """

  history_length: int = 2
  gamma: float = 0.95
  mode: str = 'mean_std_norm'
  classes: str = 'norm'
  similarity_threshold: float = 0.95
  prefix: str = 'full'
  combine: str = 'fill'
  reliability_gate: bool = False
  episode_weight: float = 1.0
  peer_weight: float = 1.0
  transition_weight: float = 1.0
  shrinkage: float = 1.0
  depth_penalty: float = 0.0
  variance_floor: float = 1e-4
  max_return: float = 10.0
  invalid_action_penalty: float = 0.1

  def __post_init__(self):
    lowest = {
        'history_length': 0,
        'similarity_threshold': 1e-6,
        'variance_floor': 1e-12,
        'max_return': 1e-6,
    }
    highest = {
        'history_length': grouping.LONGEST_HISTORY,
        'gamma': 1.0,
        'similarity_threshold': 1.0,
    }
    choices = {
        'mode': episode.MODES,
        'classes': semantic.KINDS,
        'prefix': PREFIXES,
        'combine': COMBINATIONS,
    }
    for field in dataclasses.fields(self):
      name, value = f'ProGPO.{field.name}', getattr(self, field.name)
      if field.name in choices:
        episode.check_choice(name, value, choices[field.name])
      elif not isinstance(value, bool):
        low = lowest.get(field.name, 0.0)
        episode.check_range(name, value, low, highest.get(field.name, math.inf))

  def unread(self) -> dict[str, str]:
    """Fields without effect, each with the setting that leaves it so."""
    fields = {}
    if self.classes not in semantic.MERGING:
      fields['similarity_threshold'] = 'classes'
    if not self.history_length:  # One depth has all the weight.
      fields['depth_penalty'] = 'history_length'
      if not self.reliability_gate:
        fields |= dict.fromkeys(
            ('shrinkage', 'variance_floor'), 'history_length'
        )
    return fields

  def __call__(
      self, inputs: types.AdvantageInputs
  ) -> tuple[np.ndarray, types.Metrics]:
    """Returns (float32 [N] advantages, metrics)."""
    episode.check_inputs(inputs)
    table = grouping.index_steps(inputs)
    group_U = grouping.pair_ids(inputs.group_N[table.row_U])
    score_N = episode.scores(inputs, self.invalid_action_penalty)
    outcome = episode.normalise_scores(
        score_N[table.row_U], group_U, divide_by_std=self._divide
    )
    last_U = np.append(table.step_U[1:] == 0, True)[: len(group_U)]
    reward_U = last_U * inputs.outcome_N[table.row_U].astype(np.float64)
    reward_U /= self.max_return
    return_U = _returns(reward_U, last_U, self.gamma)
    peer, has_peer_U = self._peers(inputs, table, group_U, return_U)
    potential, class_U = self._potentials(inputs, table, group_U, return_U)
    step = self._transitions(potential, table, group_U, reward_U, last_U)
    share_U = np.ones(len(group_U))
    if self.combine == 'fill':
      share_U = ~has_peer_U * share_U
    if self.reliability_gate:
      share_U = share_U * _reliability(potential, last_U, self.gamma)
    advantage_U = (
        self.episode_weight * outcome.value_N
        + self.peer_weight * peer.value_N
        + self.transition_weight * share_U * step.value_N
    )
    advantage_N = advantage_U.astype(np.float32)[table.inverse_N]
    state_U = inputs.state_N[table.row_U]
    return advantage_N, {
        **metrics.level('episode', outcome),
        **metrics.level('peer', peer),
        **metrics.level('transition', step),
        **metrics.depths(potential.weight_KU, potential.members_KU),
        'advantage/peer_signal_share': metrics.mean(has_peer_U),
        'advantage/transition_share': metrics.mean(share_U),
        'advantage/merged_state_share': _merged(group_U, state_U, class_U),
        **metrics.overall(inputs, advantage_N),
    }

  @property
  def _divide(self) -> bool:
    return self.mode == 'mean_std_norm'

  def _compare(
      self, value_U: np.ndarray, segment_U: np.ndarray
  ) -> segments.Normalised:
    """(x - mean) [/ (std + eps)] with ddof 0; in rewards if not divided."""
    return segments.normalise(
        value_U if self._divide else value_U * self.max_return,
        segment_U,
        ddof=0,
        divide_by_std=self._divide,
        keep_singletons=False,
    )

  def _peers(
      self,
      inputs: types.AdvantageInputs,
      table: grouping.StepTable,
      group_U: np.ndarray,
      return_U: np.ndarray,
  ) -> tuple[segments.Normalised, np.ndarray]:
    """The term P, and who has a peer signal."""
    action_U = inputs.action_N[table.row_U]
    prefix_U = grouping.prefix_ids(
        group_U,
        inputs.state_N[table.row_U],
        action_U if self.prefix == 'full' else None,
        table.step_U,
    )
    result = self._compare(return_U, prefix_U)
    pair_U = grouping.pair_ids(prefix_U, action_U)
    prefix_P = np.zeros(int(pair_U.max(initial=-1)) + 1, int)
    prefix_P[pair_U] = prefix_U
    actions_U = np.bincount(prefix_P)[prefix_U]
    has_peer_U = (actions_U >= 2) & ~result.degenerate_N
    value_U = np.where(has_peer_U, result.value_N, np.float32(0.0))
    return dataclasses.replace(result, value_N=value_U), has_peer_U

  def _potentials(
      self,
      inputs: types.AdvantageInputs,
      table: grouping.StepTable,
      group_U: np.ndarray,
      return_U: np.ndarray,
  ) -> tuple[potentials.Potentials, np.ndarray]:
    """Potentials, and the class of each state."""
    class_U = semantic.classes(
        self.classes,
        self.similarity_threshold,
        group_U,
        inputs.state_N[table.row_U],
        inputs.state_texts,
        inputs.embed_texts,
    )
    keys = grouping.history_ids(
        group_U, class_U, table.step_U, self.history_length + 1
    )
    result = potentials.fuse(
        return_U,
        group_U,
        table.trajectory_U,
        keys,
        shrinkage=self.shrinkage,
        depth_penalty=self.depth_penalty,
        variance_floor=self.variance_floor,
    )
    return result, class_U

  def _transitions(
      self,
      potential: potentials.Potentials,
      table: grouping.StepTable,
      group_U: np.ndarray,
      reward_U: np.ndarray,
      last_U: np.ndarray,
  ) -> segments.Normalised:
    """The term T; a task of one episode has nothing to compare it with."""
    after_U = _after(potential.value_U, last_U)
    credit_U = reward_U + self.gamma * after_U - potential.value_U
    episodes = np.bincount(group_U[table.step_U == 0])
    alone_U = episodes[group_U] < 2
    return self._compare(credit_U, np.where(alone_U, -1, group_U))


def _after(value_U: np.ndarray, last_U: np.ndarray) -> np.ndarray:
  """The next step's value; 0 after the last step of an episode."""
  return np.where(last_U, 0.0, np.roll(value_U, -1))


def _returns(
    reward_U: np.ndarray, last_U: np.ndarray, gamma: float
) -> np.ndarray:
  """Returns of episodes with a reward at the end only, float64."""
  end_U = np.flatnonzero(last_U)[np.cumsum(last_U) - last_U]
  return gamma ** (end_U - np.arange(len(end_U))) * reward_U[end_U]


def _reliability(
    potential: potentials.Potentials, last_U: np.ndarray, gamma: float
) -> np.ndarray:
  noise_U = potential.variance_U + gamma**2 * _after(
      potential.variance_U, last_U
  )
  return potential.spread_U / (potential.spread_U + noise_U)


def _merged(
    group_U: np.ndarray, state_U: np.ndarray, class_U: np.ndarray
) -> float:
  """Of the (task, state) pairs, the share that a class took in."""
  states = int(grouping.pair_ids(group_U, state_U).max(initial=-1)) + 1
  classes = int(grouping.pair_ids(group_U, class_U).max(initial=-1)) + 1
  return (states - classes) / max(states, 1)
