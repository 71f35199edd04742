"""Attention: a float64 reference, the kernels against each other, refusals."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hgpo_jax import sharding
from hgpo_jax.models import attention

_HEADS, _KV_HEADS, _HEAD = 4, 2, 8


def _segments(length):
  """Padding before, three segments, padding after; and a row of one."""
  ends = np.array([2, length // 3, length // 2, length - 3])
  first_T = np.searchsorted(ends, np.arange(length), side='right') % 4
  return np.stack([first_T, np.ones(length)]).astype(np.int32)


def _arrays(length, seed=0):
  rng = np.random.default_rng(seed)
  draw = lambda heads: rng.normal(size=(2, length, heads, _HEAD)) * 2
  arrays = (draw(_HEADS), draw(_KV_HEADS), draw(_KV_HEADS), draw(_HEADS))
  return *(np.float32(x) for x in arrays[:3]), np.float32(arrays[3])


def _reference(q, k, v, segments):
  """Loops over rows, heads and queries, in float64."""
  q, k, v = (np.float64(x) for x in (q, k, v))
  out = np.zeros(q.shape)
  for b, t, h in np.ndindex(*q.shape[:3]):
    sees = np.flatnonzero(segments[b, : t + 1] == segments[b, t])
    own = h // (_HEADS // _KV_HEADS)
    scores = k[b, sees, own] @ q[b, t, h] / np.sqrt(_HEAD)
    weights = np.exp(scores - scores.max())
    out[b, t, h] = weights / weights.sum() @ v[b, sees, own]
  return out


def _plain(q, k, v, segments):
  """The textbook form, whose gradient jax derives."""
  k, v = (jnp.repeat(x, _HEADS // _KV_HEADS, axis=2) for x in (k, v))
  scores = jnp.einsum('bthc,bshc->bhts', q, k) / np.sqrt(_HEAD)
  sees = segments[:, :, None] == segments[:, None, :]
  sees &= np.tri(q.shape[1], dtype=bool)
  scores = jnp.where(sees[:, None], scores, -1e30)
  return jnp.einsum('bhts,bshc->bthc', jax.nn.softmax(scores), v)


def _gradients(run, arrays, segments):
  """(output, gradients of q, k, v) for a fixed gradient of the output."""
  *inputs, d_out = arrays
  out, back = jax.vjp(lambda *x: run(*x, segments), *inputs)
  return out, *back(d_out)


def _assert_same(got, want, tolerance=1e-5):
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())


# One block, and several with a short last one.
@pytest.mark.parametrize('length', [24, 300])
def test_the_xla_form_equals_a_float64_reference_and_derived_gradients(length):
  arrays, segments = _arrays(length), _segments(length)
  got = jax.jit(functools.partial(_gradients, attention.attention))(
      arrays, segments
  )
  want = jax.jit(functools.partial(_gradients, _plain))(arrays, segments)
  _assert_same(got, want)
  few = _reference(*arrays[:3], segments) if length < 100 else want[0]
  _assert_same(got[:1], [few])


def test_splash_equals_the_xla_form():
  """In Pallas' interpreter; neither the length nor the head fits its tiles."""
  arrays, segments = _arrays(136), _segments(136)
  run = functools.partial(attention.splash, interpret=True)
  got = jax.jit(functools.partial(_gradients, run))(arrays, segments)
  want = jax.jit(functools.partial(_gradients, attention.attention))(
      arrays, segments
  )
  _assert_same(got, want)


def test_splash_is_split_over_rows_and_heads():
  mesh = sharding.Mesh(data=1, fsdp=2, tensor=2).make_mesh(jax.devices()[:4])
  arrays, segments = _arrays(16)[:3], _segments(16)
  run = functools.partial(attention.split_splash, interpret=True)
  with jax.set_mesh(mesh):
    got = jax.jit(run)(*arrays, segments)
  assert got.sharding.shard_shape(got.shape) == (1, 16, 2, _HEAD)
  _assert_same([got], [_reference(*arrays, segments)])


@pytest.mark.skipif(
    jax.default_backend() != 'gpu', reason='cuDNN needs an NVIDIA GPU'
)
def test_cudnn_equals_the_xla_form():
  arrays, segments = _arrays(64), _segments(64)
  half = [jnp.bfloat16(x) for x in arrays]
  got = _gradients(attention.cudnn, half, segments)
  want = _gradients(attention.attention, arrays, segments)
  _assert_same([np.float32(x) for x in got], want, 3e-2)


_SHAPE = (2, 64, 4, 64)


@pytest.mark.parametrize(
    'backend, dtype, shape, want',
    [
        ('cpu', jnp.bfloat16, _SHAPE, 'xla'),
        ('gpu', jnp.bfloat16, _SHAPE, 'cudnn'),
        ('gpu', jnp.float32, _SHAPE, 'xla'),
        ('gpu', jnp.bfloat16, (2, 64, 4, 12), 'xla'),
        ('gpu', jnp.bfloat16, (2, 63, 4, 64), 'xla'),
        ('tpu', jnp.bfloat16, (2, 63, 4, 48), 'splash'),
        ('tpu', jnp.float32, _SHAPE, 'xla'),
    ],
)
def test_auto_takes_what_the_device_has(backend, dtype, shape, want):
  assert attention.choose('auto', backend, shape, dtype) == want


@pytest.mark.parametrize(
    'kernel, backend, dtype, shape, says',
    [
        ('flash', 'cpu', jnp.float32, _SHAPE, "is 'flash'; expected one of"),
        ('cudnn', 'cpu', jnp.bfloat16, _SHAPE, 'needs an NVIDIA GPU; got'),
        ('splash', 'gpu', jnp.bfloat16, _SHAPE, 'needs a TPU; got heads of 64'),
        (
            'cudnn',
            'gpu',
            jnp.float32,
            _SHAPE,
            "needs PolicySource.compute_dtype = 'bfloat16'; got",
        ),
        (
            'cudnn',
            'gpu',
            jnp.bfloat16,
            (2, 64, 4, 12),
            'needs heads of a multiple of 8, at most 256; got heads of 12',
        ),
        (
            'cudnn',
            'gpu',
            jnp.bfloat16,
            (2, 63, 4, 64),
            'rows of an even length .Minibatches.length_buckets.; got',
        ),
    ],
)
def test_a_named_kernel_refuses_what_it_does_not_take(
    kernel, backend, dtype, shape, says
):
  with pytest.raises(ValueError, match=f'PolicySource.attention.*{says}'):
    attention.choose(kernel, backend, shape, dtype)
