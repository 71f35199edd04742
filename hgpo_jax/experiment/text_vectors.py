"""Vectors of texts, from the policy's own table of token embeddings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from hgpo_jax import sharding
from hgpo_jax.advantages import segments


def embed(
    table_VD: jax.Array,
    encode: Callable[[str], Sequence[int]],
    texts: Sequence[str],
) -> np.ndarray:
  """The mean embedding of each text's tokens, float64 [texts, D].

  The mean of the whole table is taken off first: what all tokens have in common
  would make all texts similar (Mu and Viswanath 2018, arXiv 1702.01417). A text
  without tokens is 0. A text's vector does not depend on the other texts.

  Args:
    table_VD: token embeddings, wherever they lie.
    encode: token ids of a text.
    texts: what to embed.
  """
  ids = [np.asarray(encode(text), np.int32) for text in texts]
  used = np.array(
      sorted(set(itertools.chain(*map(np.ndarray.tolist, ids)))), int
  )
  # Padded, so that few shapes are compiled.
  padded = np.zeros(segments.bucket(len(used)), np.int32)
  padded[: len(used)] = used
  with sharding.launching():
    centred_UD = _centred(table_VD, padded)
  rows_UD = np.asarray(jax.device_get(centred_UD), np.float64)
  vectors = np.zeros((len(texts), table_VD.shape[1]))
  for vector_D, own in zip(vectors, ids):
    if len(own):
      vector_D[:] = rows_UD[np.searchsorted(used, own)].mean(0)
  return vectors


@jax.jit
def _centred(table_VD: jax.Array, ids_U: jax.Array) -> jax.Array:
  mean_D = jnp.mean(table_VD.astype(jnp.float32), axis=0)
  return table_VD[ids_U].astype(jnp.float32) - mean_D
