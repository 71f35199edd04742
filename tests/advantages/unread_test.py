"""Fields that the other settings leave without effect: told, and refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from hgpo_jax import config
from hgpo_jax import types
from hgpo_jax.advantages import covgpo
from hgpo_jax.advantages import gigpo
from hgpo_jax.advantages import graphgpo
from hgpo_jax.advantages import grpo
from hgpo_jax.advantages import hgpo
from hgpo_jax.advantages import pass_at_k
from hgpo_jax.advantages import progpo
from hgpo_jax.advantages import reinforce_pp
from hgpo_jax.advantages import rloo
from hgpo_jax.experiment import spec as spec_lib
from tests import golden_check
from tests.advantages import rows

CovGPO, GiGPO = covgpo.CovGPO, gigpo.GiGPO
# An estimator; what it does not read, and another value of that; with which
# settings it does.
FIELDS = (
    (
        hgpo.HGPO(weighting='inverse_variance'),
        {'alpha': 2.0},
        {'weighting': 'length'},
    ),
    (
        grpo.GRPO(),
        {'visit_order': 'row', 'divide_flat': True},
        {'stats_over_steps': False},
    ),
    (
        grpo.GRPO(stats_over_steps=False, norm_by_std=False),
        {'divide_flat': True},
        {'norm_by_std': True},
    ),
    (rloo.RLOO(), {'visit_order': 'row'}, {'stats_over_steps': False}),
    (
        reinforce_pp.ReinforcePlusPlus(baseline=True),
        {'visit_order': 'row'},
        {'stats_over_steps': False},
    ),
    (
        reinforce_pp.ReinforcePlusPlus(),
        {'visit_order': 'row', 'stats_over_steps': False},
        {'baseline': True},
    ),
    (
        pass_at_k.PassAtK(),
        {'visit_order': 'row'},
        {'compared': 'first_row'},
    ),
    (
        GiGPO(),
        {'similarity_threshold': 0.5, 'visit_order': 'row'},
        {'enable_similarity': True, 'similarity_threshold': 0.7},
    ),
    (
        graphgpo.GraphGPO(),
        {
            'similarity_threshold': 0.5,
            'visit_order': 'row',
            'similar_step_groups': False,
        },
        {'enable_similarity': True, 'similarity_threshold': 0.7},
    ),
    (
        progpo.ProGPO(),
        {'similarity_threshold': 0.5},
        {'classes': 'difflib'},
    ),
    (
        progpo.ProGPO(classes='none'),
        {'similarity_threshold': 0.5},
        {'classes': 'hash'},
    ),
    (
        progpo.ProGPO(history_length=0),
        {'depth_penalty': 1.0, 'shrinkage': 3.0, 'variance_floor': 0.1},
        {'history_length': 2},
    ),
    (
        progpo.ProGPO(history_length=0, reliability_gate=True),
        {'depth_penalty': 1.0},
        {'history_length': 2},
    ),
    (
        progpo.ProGPO(history_length=0),
        {'shrinkage': 3.0, 'variance_floor': 0.1},
        {'reliability_gate': True},
    ),
    (
        CovGPO(base=GiGPO(), fixed=True),
        {'score_threshold': 100.0},
        {'gate': 'score'},
    ),
    (
        CovGPO(base=GiGPO(), level='step_anchor', fixed=True),
        {'epsilon': 1.0},
        {'level': 'step'},
    ),
)
each = pytest.mark.parametrize(
    'estimator, values, others', FIELDS, ids=lambda x: str(x)[:40]
)


def test_every_estimator_with_such_fields_is_in_the_list():
  every = golden_check.estimators().values()
  assert {type(estimator) for estimator, _, _ in FIELDS} == {
      cls for cls in every if hasattr(cls, 'unread')
  }


def _inputs(seed: int):
  inputs = rows.random_inputs(seed)
  # In no order, so that the first row of an episode is not its first step; no
  # task of every other seed is solved; texts are more or less alike.
  order = np.random.default_rng(seed).permutation(len(inputs.step_N))
  if seed % 2:
    nothing_N = np.zeros_like(inputs.outcome_N)
    inputs = dataclasses.replace(
        inputs, outcome_N=nothing_N, success_N=nothing_N > 0
    )
  texts = ('a b c d e f', 'a b c d e g', 'a b x y z f', 'no')
  return dataclasses.replace(rows.take(inputs, order), state_texts=texts)


def _differ(first: Any, second: Any) -> bool:
  """Whether advantages or metrics of any of some inputs do."""

  def differ(inputs):
    (one_N, report), (other_N, other) = first(inputs), second(inputs)
    moved = not np.array_equal(one_N, other_N)
    return moved or not _equal_metrics(report, other)

  return any(map(differ, map(_inputs, range(20))))


def _equal_metrics(first: types.Metrics, second: types.Metrics) -> bool:
  return first.keys() == second.keys() and all(
      np.array_equal(first[name], second[name], equal_nan=True)
      for name in first
  )


@each
def test_unread_fields_change_nothing_and_are_read_otherwise(
    estimator, values, others
):
  assert set(values) <= set(estimator.unread())
  assert not _differ(estimator, dataclasses.replace(estimator, **values))
  reads = dataclasses.replace(estimator, **others)
  for name, value in values.items():
    other = dataclasses.replace(reads, **{name: value})
    if name not in reads.unread():
      assert _differ(reads, other), name


def _load(*bindings: str) -> Any:
  return config.load(
      ['runs/quickstart.gin'], bindings, root=spec_lib.Experiment
  ).estimator


@each
def test_to_bind_them_is_refused(estimator, values, others):
  del others
  name = type(estimator).__name__
  lines = [
      f'import {type(estimator).__module__}',
      f'Experiment.estimator = @{name}()',
  ]
  for field in dataclasses.fields(estimator):
    value = getattr(estimator, field.name)
    if field.name == 'base':
      lines.append('CovGPO.base = @GiGPO()')
    elif value != field.default:
      lines.append(f'{name}.{field.name} = {value!r}')
  assert _load(*lines) == estimator
  for field, value in values.items():
    with pytest.raises(config.ConfigError) as error:
      _load(*lines, f'{name}.{field} = {value!r}')
    setting = f'{name}.{estimator.unread()[field]}'
    text = str(error.value)
    assert text.startswith(f'{name}.{field} = {value!r} (bound at --gin_b')
    assert f' has no effect where {setting} is ' in text
    usual = getattr(type(estimator), field)
    assert text.endswith(
        f'Remove the binding or bind the default, {usual!r}; or change {setting}'
    )


def test_a_loaded_part_may_be_replaced():
  loaded = _load('HGPO.alpha = 0.5')
  other = dataclasses.replace(loaded, weighting='inverse_variance')
  assert other.alpha == 0.5


def test_a_default_may_be_spelt_out():
  lines = 'import hgpo_jax.advantages.hgpo', 'Experiment.estimator = @HGPO()'
  weighting = "HGPO.weighting = 'inverse_variance'"
  assert _load(*lines, weighting, 'HGPO.alpha = 1.0').alpha == 1.0


def test_a_run_that_bound_one_goes_on_without_it(tmp_path):
  _load("HGPO.weighting = 'inverse_variance'")
  config.write(tmp_path)
  path, alpha = tmp_path / 'run.json', 'Experiment.estimator.alpha'
  record = json.loads(path.read_text())
  assert record['config'][alpha] == 1.0
  # As a version wrote it that let the binding pass.
  record['config'][alpha] = 2.0
  path.write_text(json.dumps(record | {'fingerprint': 'of more fields'}))
  assert config.check_resume(tmp_path)
  _load()
  with pytest.raises(config.ConfigError, match='weighting: .* in the run'):
    config.check_resume(tmp_path)
