"""The fidelity study on real games with the packaged policy."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from hgpo_jax import config
from hgpo_jax.advantages import g2po
from hgpo_jax.advantages import grpo
from hgpo_jax.batch import pack
from hgpo_jax.credit import continuations
from hgpo_jax.credit import fidelity
from hgpo_jax.credit import gradients
from hgpo_jax.credit import probes
from hgpo_jax.experiment import runtime
from hgpo_jax.experiment import spec as spec_lib
from hgpo_jax.learner import scorer

_DESIGN = probes.Design(tasks=2, probes=2, continuations=4, pool=3, seed=1)


@pytest.fixture(scope='module', name='spec')
def _spec():
  bindings = ['Workers.slots = 16', 'AlfworldEnv.max_steps = 8']
  return config.load(['runs/quickstart.gin'], bindings, spec_lib.Experiment)


@pytest.fixture(scope='module', name='played')
def _played(spec, tmp_path_factory):
  """(sample, player, params); the sample went through the disk."""
  folder = tmp_path_factory.mktemp('rollouts')
  split = spec.env.split(spec.split)
  with runtime.open_player(spec) as player:
    params = player.put(spec.policy.load(player.model))
    play = continuations.CollectorPlay(player.collector, params, 0, 1.0)
    saved = continuations.Saved(play, folder, episodes_a_part=8)
    yield probes.sample(_DESIGN, [split[0], split[5]], saved), player, params


def test_continuations_begin_with_the_recorded_steps(played):
  sample, _, _ = played
  assert len(sample.probes) == 4
  for probe, before, after in zip(
      sample.probes, sample.before, sample.after, strict=True
  ):
    through = (*probe.opening, probe.step)
    assert len(before) == len(after) == 4
    for episode in after:
      for step, recorded in zip(episode.steps, through):
        assert step.action == recorded.action
        assert step.next_state_key == recorded.next_state_key
    for episode in before:
      # What the policy is asked after the replay is what it was asked then.
      asked = episode.steps[len(probe.opening)].prompt_ids
      np.testing.assert_array_equal(asked, probe.step.prompt_ids)
  actions = {
      tuple(s.action for s in t.steps) for some in sample.before for t in some
  }
  assert len(actions) > 8, 'continuations must differ'


def test_inner_products_are_those_of_the_gradients(played, spec):
  sample, player, params = played
  steps = [probe.step for probe in sample.probes[:3]]
  found_PP = gradients.gram(
      player.model, params, steps, 1.0, spec.minibatches, rows=2
  )
  batch = pack.pad_steps(
      steps,
      length_buckets=spec.minibatches.length_buckets,
      response_buckets=spec.minibatches.response_buckets,
  )

  def total(params, weight_P):
    logprobs_BR, _ = scorer.response_logprobs(player.model, params, batch, 1.0)
    return logprobs_BR.sum(1) @ weight_P

  weight_P = np.array([1.0, -2.0, 0.5], np.float32)
  gradient = jax.grad(total)(params, weight_P)
  norm = sum(
      float((np.asarray(g) ** 2).sum()) for g in jax.tree.leaves(gradient)
  )
  assert weight_P @ found_PP @ weight_P == pytest.approx(norm, rel=1e-3)


def test_the_whole_study_gives_figures(played):
  sample, _, _ = played
  table = fidelity.compare(
      fidelity.Study(group_sizes=(2, 4), replicates=2, draws=5),
      sample,
      {'grpo': grpo.GRPO(), 'g2po': g2po.G2PO()},
      np.eye(len(sample.probes)),
  ).figures
  assert list(table) == ['grpo', 'g2po', fidelity.CEILING]
  for size in (2, 4):
    assert -1.0 <= table['g2po'][size]['rank'].value <= 1.0
    assert table['g2po'][size]['bias'].value >= 0.0
