"""The fidelity study, on a game whose advantages are known exactly."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hgpo_jax.advantages import gigpo
from hgpo_jax.advantages import grpo
from hgpo_jax.credit import continuations
from hgpo_jax.credit import fidelity
from hgpo_jax.credit import probes
from hgpo_jax.credit import truth
from tests.credit import climb

_DESIGN = probes.Design(tasks=24, probes=3, continuations=64, pool=200)
_OUTCOME = grpo.GRPO(norm_by_std=False)


@pytest.fixture(scope='module', name='sample')
def _sample():
  return probes.sample(_DESIGN, climb.tasks(24), climb.Play())


def _known(sample):
  return np.array([climb.advantage(probe.step) for probe in sample.probes])


def test_the_game_is_solved_by_hand():
  # 0.6^3 + 3 x 0.6^2 x 0.4 of 10, and after one step up 1 - 0.4^2 of it.
  assert climb.value(0, 0) == pytest.approx(6.48)
  assert climb.value(1, 1) == pytest.approx(8.4)
  assert climb.value(0, 1) == pytest.approx(3.6)
  assert climb.value(2, 3) == 10.0 and climb.value(1, 3) == 0.0


def test_brute_force_finds_the_known_advantages(sample):
  known_P, found = _known(sample), truth.measure(sample)
  z_HP = (found.other_HP - known_P) / found.error_HP
  assert np.abs(z_HP).max() < 4.5
  # The standard errors are not too large either; steps without chance in
  # what follows have no error to speak of and are left out.
  open_P = np.array([p.step.step < climb.STEPS - 1 for p in sample.probes])
  assert 0.7 < np.sqrt((z_HP[:, open_P] ** 2).mean()) < 1.3
  difference_P = found.half_HP[0] - found.half_HP[1]
  assert np.abs(difference_P).max() > 0.0, 'the halves must be independent'
  miss = ((found.mean_P - known_P) ** 2).mean()
  assert miss < 0.8
  noise = found.noise * (found.mean_P**2).mean()
  assert noise == pytest.approx(miss, rel=0.4)


def test_the_noise_of_no_advantages_is_no_number():
  assert np.isnan(truth.Truth(*np.zeros((3, 2, 5))).noise)


def test_probes_are_steps_as_the_policy_takes_them(sample):
  assert len(sample.probes) == 72
  ups = np.mean([probe.step.action == 'up' for probe in sample.probes])
  assert abs(ups - climb.UP) < 4 * np.sqrt(0.24 / 72)
  for probe, after, before in zip(sample.probes, sample.after, sample.before):
    t = len(probe.opening)
    assert probe.step.step == t
    for episode in after:
      assert episode.steps[t].next_state_key == probe.step.next_state_key
    assert {e.steps[t].state_key for e in before} == {probe.step.state_key}
    if t < climb.STEPS:
      assert len({e.steps[t].action for e in before}) == 2


@pytest.mark.parametrize('size', [4, 8])
def test_the_mean_estimate_of_grpo_is_the_formula(sample, size):
  """E[R - mean of the group | s, a] = (1 - 1/G) (Q(s, a) - V(start))."""
  found = truth.estimates(sample, {'x': _OUTCOME}, size, 120, seed=1)['x']
  wanted_P = np.array(
      [
          (1 - 1 / size) * (climb.step_value(p.step) - climb.value(0, 0))
          for p in sample.probes
      ]
  )
  miss_P = found.mean(0) - wanted_P
  # From 64 continuations and 200 free episodes, both with a spread of 4.8.
  assert np.abs(miss_P).max() < 4.5 * 4.8 * np.sqrt(1 / 64 + 1 / 200)
  assert abs(miss_P.mean()) < 0.35
  # The spread of the mean of G - 1 others is a part of the variance.
  last_P = np.array([p.step.step == 2 for p in sample.probes])
  spread = 10 * np.sqrt(0.648 * 0.352 * (size - 1)) / size
  assert found[:, last_P].std(0).mean() == pytest.approx(spread, rel=0.1)


def test_groups_are_what_a_collector_would_return(sample):
  groups = truth.Groups(sample)
  inputs, row_P = groups.batch(4, 1, np.random.default_rng(0))
  assert np.bincount(inputs.group_N).tolist() == [4 * climb.STEPS] * 72
  assert np.unique(inputs.trajectory_N).tolist() == list(range(4 * 72))
  for row, probe in zip(row_P, sample.probes):
    assert inputs.step_N[row] == probe.step.step
    texts = inputs.state_texts
    assert texts[inputs.state_N[row]] == probe.step.state_key
    assert texts[inputs.next_state_N[row]] == probe.step.next_state_key
  with pytest.raises(ValueError, match='groups of 999 need .* raise --pool'):
    groups.batch(999, 0, np.random.default_rng(0))


def _compare(estimate_RP, truth_RP, gram_PP=None, sure_RP=None):
  size = truth_RP.shape[1]
  return fidelity.figures(
      estimate_RP,
      truth_RP,
      np.ones_like(truth_RP, bool) if sure_RP is None else sure_RP,
      np.eye(size) if gram_PP is None else gram_PP,
  )


def test_figures_of_estimates_that_are_right_wrong_or_silent():
  truth_RP = np.tile([1.0, -2.0, 3.0, -4.0], (2, 1))
  right = _compare(7.0 * truth_RP, truth_RP)
  assert dataclasses.astuple(right) == pytest.approx((0, 0, 1, 1, 1))
  wrong = _compare(-truth_RP, truth_RP)
  assert (wrong.rank, wrong.sign, wrong.cosine) == pytest.approx((-1, 0, -1))
  silent = _compare(0.0 * truth_RP, truth_RP)
  assert dataclasses.astuple(silent) == pytest.approx((1, 0, 0, 0.5, 0))
  nothing_to_find = _compare(truth_RP, 0.0 * truth_RP)
  assert np.isnan([nothing_to_find.bias, nothing_to_find.variance]).all()


def test_bias_and_variance_make_up_the_error():
  rng = np.random.default_rng(0)
  truth_RP = np.tile(rng.normal(size=9), (6, 1))
  estimate_RP = truth_RP + 1.0 + rng.normal(size=(6, 9))
  found = _compare(estimate_RP, truth_RP)
  scale = (estimate_RP * truth_RP).sum() / (estimate_RP**2).sum()
  error = ((scale * estimate_RP - truth_RP) ** 2).mean() / (truth_RP**2).mean()
  assert found.bias + found.variance == pytest.approx(error)


def test_the_cosine_is_that_of_the_gradients():
  rng = np.random.default_rng(0)
  gradient_PD = rng.normal(size=(5, 3))
  estimate_RP, truth_RP = rng.normal(size=(2, 2, 5))
  found = _compare(estimate_RP, truth_RP, gradient_PD @ gradient_PD.T)
  cosines = [
      u @ v / np.linalg.norm(u) / np.linalg.norm(v)
      for u, v in zip(estimate_RP @ gradient_PD, truth_RP @ gradient_PD)
  ]
  assert found.cosine == pytest.approx(np.mean(cosines))


def test_only_sure_signs_count():
  truth_RP = np.array([[1.0, -1.0, 1.0]] * 2)
  sure_RP = np.array([[True, True, False]] * 2)
  found = _compare(np.array([[1.0, 0.0, -1.0]] * 2), truth_RP, None, sure_RP)
  assert found.sign == pytest.approx(0.75)
  none = _compare(truth_RP, truth_RP, None, np.zeros((2, 3), bool))
  assert np.isnan(none.sign) and none.rank == pytest.approx(1.0)


def test_intervals_are_as_wide_as_theory_says():
  rng = np.random.default_rng(0)
  truth_RP = np.ones((2, 200))
  estimate_RP = np.tile(np.where(rng.random(200) < 0.7, 1.0, -1.0), (2, 1))
  rest = np.ones((2, 200), bool), np.eye(200)
  single = fidelity.intervals(
      fidelity.bootstrap(
          estimate_RP, truth_RP, *rest, np.arange(200), draws=500
      )
  )['sign']
  half = 1.96 * np.sqrt(single.value * (1 - single.value) / 200)
  assert single.high - single.low == pytest.approx(2 * half, rel=0.2)
  # Probes of one task that say the same are one observation.
  copies = np.repeat(np.arange(50), 4)
  repeated_RP = np.repeat(estimate_RP[:, :50], 4, 1)
  together = fidelity.intervals(
      fidelity.bootstrap(repeated_RP, truth_RP, *rest, copies, draws=500)
  )['sign']
  assert together.high - together.low > 1.6 * (single.high - single.low)


def test_estimators_that_see_states_come_nearer(sample):
  """The only chance in this game is the player's: states tell it all."""
  comparison = fidelity.compare(
      fidelity.Study(group_sizes=(8,), replicates=4, draws=50),
      sample,
      {
          'grpo': _OUTCOME,
          'gigpo': gigpo.GiGPO(mode='mean_norm', gamma=1.0),
          'grpo_again': _OUTCOME,
      },
      np.eye(len(sample.probes)),
  )
  found, gaps = comparison.figures, comparison.gaps
  grpo_8, gigpo_8 = found['grpo'][8], found['gigpo'][8]
  ceiling = found[fidelity.CEILING][0]
  assert gigpo_8['rank'].value > grpo_8['rank'].value
  assert ceiling['rank'].value > 0.8 and ceiling['sign'].value > 0.9
  for figure in (*grpo_8.values(), *gigpo_8.values(), *ceiling.values()):
    assert (
        figure.low <= figure.value + 0.1 and figure.high >= figure.value - 0.1
    )
  # Pairs share tasks, so a difference is surer than either of its sides.
  assert list(gaps) == ['gigpo', 'grpo_again']
  gap, sides = gaps['gigpo'][8]['rank'], (gigpo_8['rank'], grpo_8['rank'])
  assert gap.value == pytest.approx(sides[0].value - sides[1].value)
  assert gap.low > 0.0
  for figure in gaps['grpo_again'][8].values():
    assert dataclasses.astuple(figure) == (0.0, 0.0, 0.0)


def test_without_the_baseline_there_are_no_differences(sample):
  found = fidelity.compare(
      fidelity.Study(group_sizes=(4,), replicates=2, draws=2),
      sample,
      {'mine': _OUTCOME},
      np.eye(len(sample.probes)),
  )
  assert found.gaps == {} and list(found.figures) == ['mine', fidelity.CEILING]


def test_a_sample_goes_on_where_it_was_stopped(tmp_path):
  design = probes.Design(tasks=4, probes=2, continuations=4, pool=3)
  args = design, climb.tasks(4)
  saved = lambda play: continuations.Saved(play, tmp_path, episodes_a_part=8)
  first = climb.Play(fail_at=5)
  with pytest.raises(KeyboardInterrupt):
    probes.sample(*args, saved(first))
  second = climb.Play()
  found = probes.sample(*args, saved(second))
  assert len(first.calls) == 5 and not set(first.calls) & set(second.calls)
  third = climb.Play()
  again = probes.sample(*args, saved(third))
  assert not third.calls
  outcome = lambda s: [t.outcome for some in s.after for t in some]
  assert outcome(again) == outcome(found)
  other = dataclasses.replace(design, seed=1)
  with pytest.raises(ValueError, match='made with other settings. Give ano'):
    probes.sample(other, climb.tasks(4), saved(climb.Play()))


def test_bad_settings_are_refused():
  with pytest.raises(ValueError, match='continuations is 5; expected an even'):
    probes.Design(continuations=5)
  with pytest.raises(ValueError, match='expected at least one of everything'):
    probes.Design(pool=0)
  with pytest.raises(ValueError, match='replicates is 3; expected an even'):
    fidelity.Study(replicates=3)
  with pytest.raises(ValueError, match='expected draws >= 1 and groups of 2'):
    fidelity.Study(group_sizes=(1, 4))
