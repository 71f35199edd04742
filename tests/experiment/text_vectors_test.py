"""Vectors of texts against the mean over the whole table, and in a run."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax import sharding
from hgpo_jax.advantages import progpo
from hgpo_jax.experiment import loop
from hgpo_jax.experiment import text_vectors
from tests.experiment import runs

TABLE = np.random.default_rng(0).normal(3.0, 1.0, (128, 16)).astype(np.float32)
TEXTS = ('ab', 'b', '', 'aab')


def _encode(text):
  return [ord(letter) for letter in text]


def _want(text, table=TABLE):
  centred = table.astype(np.float64) - table.mean(0, dtype=np.float64)
  return centred[_encode(text)].mean(0) if text else np.zeros(table.shape[1])


def test_a_text_is_the_mean_of_its_tokens():
  got = text_vectors.embed(jnp.asarray(TABLE), _encode, TEXTS)
  assert got.dtype == np.float64
  np.testing.assert_allclose(got, [_want(t) for t in TEXTS], atol=1e-5)
  assert not got[2].any()


def test_a_texts_vector_does_not_depend_on_the_others():
  table = jnp.asarray(TABLE)
  alone = text_vectors.embed(table, _encode, ['ab'])
  among = text_vectors.embed(table, _encode, ['x', *TEXTS, 'zyxw'])
  np.testing.assert_array_equal(among[1], alone[0])
  assert text_vectors.embed(table, _encode, []).shape == (0, 16)


def test_a_table_over_eight_devices_gives_the_same():
  mesh = sharding.Mesh(data=2, fsdp=2, tensor=2).make_mesh()
  with jax.set_mesh(mesh):
    spec = jax.sharding.PartitionSpec('tensor', 'fsdp')
    where = jax.sharding.NamedSharding(mesh, spec)
    table = jax.device_put(TABLE, where)
    got = text_vectors.embed(table, _encode, TEXTS)
  np.testing.assert_allclose(got, [_want(t) for t in TEXTS], atol=1e-5)


def test_a_run_embeds_the_texts_of_its_states(
    policy, one_device, tmp_path, monkeypatch
):
  found, embed = {}, text_vectors.embed

  def spy(table_VD, encode, texts):
    vectors = embed(table_VD, encode, texts)
    found.update(zip(texts, vectors))
    assert table_VD.shape[1] == vectors.shape[1]
    return vectors

  monkeypatch.setattr(text_vectors, 'embed', spy)
  spec = runs.load(policy, 'Experiment.iterations = 1')
  estimator = progpo.ProGPO(classes='embed', similarity_threshold=0.98)
  loop.train(dataclasses.replace(spec, estimator=estimator), tmp_path)
  assert len(found) > 4 and all(vector_D.any() for vector_D in found.values())
  assert runs.lines(tmp_path)[0]['update/count'] >= 1.0
