"""Causal attention of whole rows by segment: one function, three kernels.

'xla' runs everywhere; 'cudnn' and 'splash' are the flash kernels of GPUs and
TPUs. They multiply in 16 bits, so float32 stays with 'xla'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from absl import logging
import jax
import jax.numpy as jnp

from hgpo_jax import sharding
from hgpo_jax.models import blockwise

KERNELS = ('auto', 'xla', 'cudnn', 'splash')
# The flash kernel of each backend.
_FLASH = {'cuda': 'cudnn', 'gpu': 'cudnn', 'tpu': 'splash'}
_HALVES = (jnp.bfloat16, jnp.float16)
_CUDNN_WIDEST = 256  # Of a head; 128 before Hopper, which jax refuses itself.
_LANES = 128  # Splash takes lengths in multiples of a TPU's lanes.
_SPLASH_BLOCKS = (512, 256, 128)
_SPLASH_HEAD = 64  # Narrower heads are padded to a multiple of this.


def attention(
    q_BTHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    segment_ids_BT: jax.Array,
    kernel: str = 'auto',
) -> jax.Array:
  """softmax(q k / sqrt(h)) v over the keys up to a query, of its segment.

  Each key head serves H / K query heads. Padding is segment 0: no other
  segment sees it, and what it gets is finite.

  Args:
    q_BTHh: queries.
    k_BTKh: keys.
    v_BTKh: values.
    segment_ids_BT: a row may hold several segments, one after another.
    kernel: one of `KERNELS`; 'auto' takes the flash kernel of the backend
      where it takes these arrays, else 'xla'.

  Returns:
    [B, T, H, h] in the dtype of q.

  Raises:
    ValueError: the kernel that was named does not take these arrays.
  """
  chosen = choose(kernel, jax.default_backend(), q_BTHh.shape, q_BTHh.dtype)
  run = {'xla': _xla, 'cudnn': cudnn, 'splash': split_splash}[chosen]
  return run(q_BTHh, k_BTKh, v_BTKh, segment_ids_BT)


def choose(
    kernel: str, backend: str, shape_BTHh: Sequence[int], dtype: jnp.dtype
) -> str:
  """The kernel that runs, by name; raises as `attention` does."""
  if kernel not in KERNELS:
    raise ValueError(
        f'PolicySource.attention is {kernel!r}; expected one of {KERNELS}'
    )
  wanted = _FLASH.get(backend, 'xla') if kernel == 'auto' else kernel
  reason = _refusal(wanted, backend, shape_BTHh, dtype)
  if reason is None:
    return wanted
  if kernel == 'auto':
    logging.log_first_n(
        logging.INFO, 'attention by xla, since %s %s', 1, wanted, reason
    )
    return 'xla'
  raise ValueError(
      f'PolicySource.attention = {kernel!r} {reason}; got heads of'
      f' {shape_BTHh[3]}, rows of {shape_BTHh[1]} and {jnp.dtype(dtype)} on'
      f" {backend!r}. Set PolicySource.attention = 'auto' or 'xla', or change"
      ' what it refuses'
  )


def _refusal(
    kernel: str, backend: str, shape_BTHh: Sequence[int], dtype: jnp.dtype
) -> str | None:
  """Why a kernel does not take such queries; None if it does."""
  if kernel == 'xla':
    return None
  if _FLASH.get(backend) != kernel:
    where = {'cudnn': 'an NVIDIA GPU', 'splash': 'a TPU'}[kernel]
    return f'needs {where}'
  if dtype not in _HALVES:
    return (
        'multiplies in 16 bits: it needs PolicySource.compute_dtype ='
        " 'bfloat16'"
    )
  _, length, _, head = shape_BTHh
  if kernel == 'cudnn' and (head % 8 or head > _CUDNN_WIDEST):
    return f'needs heads of a multiple of 8, at most {_CUDNN_WIDEST}'
  if kernel == 'cudnn' and length % 2:
    return 'needs rows of an even length (Minibatches.length_buckets)'
  return None


def _xla(q_BTHh, k_BTKh, v_BTKh, segment_ids_BT):
  batch, length, heads, head = q_BTHh.shape
  groups = (batch, k_BTKh.shape[2], -1, length, head)  # B, K, H / K, T, h
  # Accelerators multiply float32 in fewer bits unless told otherwise.
  exact = q_BTHh.dtype == jnp.float32
  out_BKGTh = blockwise.attend(
      q_BTHh.swapaxes(1, 2).reshape(groups),
      k_BTKh.swapaxes(1, 2),
      v_BTKh.swapaxes(1, 2),
      segment_ids_BT,
      jax.lax.Precision.HIGHEST if exact else None,
  )
  return out_BKGTh.reshape(batch, heads, length, head).swapaxes(1, 2)


def cudnn(
    q_BTHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    segment_ids_BT: jax.Array,
) -> jax.Array:
  """cuDNN's flash attention; segments are a mask [B, 1, T, T]."""
  queries, keys = segment_ids_BT[:, :, None], segment_ids_BT[:, None, :]
  return jax.nn.dot_product_attention(
      *(q_BTHh, k_BTKh, v_BTKh),
      mask=(queries == keys)[:, None],
      is_causal=True,
      implementation='cudnn',
  )


def splash(
    q_BTHh: jax.Array,
    k_BTKh: jax.Array,
    v_BTKh: jax.Array,
    segment_ids_BT: jax.Array,
    interpret: bool = False,
) -> jax.Array:
  """Splash attention of one device; lengths and heads are padded to fit.

  `interpret` runs the kernel without a TPU, to test it.
  """
  length, heads, head = q_BTHh.shape[1:]
  more, wider = -length % _LANES, -head % _SPLASH_HEAD
  run = _splash_kernel(length + more, heads, interpret)

  def of_row(q_THh, k_TKh, v_TKh, ids_T):
    fill = lambda x: jnp.pad(x, ((0, more), (0, 0), (0, wider))).swapaxes(0, 1)
    ids_T = jnp.pad(ids_T, (0, more))
    out_HTh = run(fill(q_THh * head**-0.5), fill(k_TKh), fill(v_TKh), ids_T)
    return out_HTh.swapaxes(0, 1)[:length, :, :head]

  return jax.vmap(of_row)(q_BTHh, k_BTKh, v_BTKh, segment_ids_BT)


def _splash_kernel(
    length: int, heads: int, interpret: bool
) -> Callable[..., jax.Array]:
  """(q_HTh, k_KTh, v_KTh, segment ids [T]) -> out_HTh."""
  # Here, since importing Pallas takes long and most runs don't need it.
  from jax.experimental.pallas.ops.tpu import splash_attention

  block = next(b for b in _SPLASH_BLOCKS if not length % b)
  names = ('block_q', 'block_kv')
  sizes = {f'{n}{part}': block for n in names for part in ('', '_dkv', '_dq')}
  causal = splash_attention.CausalMask((length, length))
  kernel = splash_attention.make_splash_mha_single_device(
      splash_attention.MultiHeadMask([causal] * heads),
      block_sizes=splash_attention.BlockSizes(
          **sizes, block_kv_compute=block, block_kv_dkv_compute=block
      ),
      residual_checkpoint_name=blockwise.RESIDUALS,
      interpret=interpret,
  )
  return lambda q, k, v, ids: kernel(
      q, k, v, splash_attention.SegmentIds(ids, ids)
  )


def split_splash(q_BTHh, k_BTKh, v_BTKh, segment_ids_BT, interpret=False):
  """`splash` of each device's rows and heads: the compiler cannot split it."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return splash(q_BTHh, k_BTKh, v_BTKh, segment_ids_BT, interpret)
  fits = lambda axis, size: None if size % sharding.ways(mesh, axis) else axis
  rows = fits('batch', q_BTHh.shape[0])
  queries = sharding.spec((rows, None, 'heads', None))
  keys = sharding.spec((rows, None, 'kv_heads', None))
  return jax.shard_map(
      lambda *arrays: splash(*arrays, interpret),
      in_specs=(queries, keys, keys, sharding.spec((rows, None))),
      out_specs=queries,
      check_vma=False,
  )(q_BTHh, k_BTKh, v_BTKh, segment_ids_BT)
