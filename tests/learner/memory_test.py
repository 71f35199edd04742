"""Memory of an update by the compiler's own account; nothing is allocated."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from hgpo_jax import types
from hgpo_jax.learner import update as update_lib
from hgpo_jax.losses import ppo
from hgpo_jax.models import configs
from hgpo_jax.models import qwen2


def _temporary_bytes(model, rows, length, response, chunk_tokens) -> int:
  """Of the loss and gradient of one micro-batch, beside the gradient."""
  params = jax.eval_shape(model.init, jax.random.key(0))
  of = jax.ShapeDtypeStruct
  whole, scored = (rows, length), (rows, response)
  rollout = types.RolloutBatch(
      tokens_BT=of(whole, jnp.int32),
      positions_BT=of(whole, jnp.int32),
      segment_ids_BT=of(whole, jnp.int32),
      target_BR=of(scored, jnp.int32),
      action_mask_BR=of(scored, bool),
      step_BR=of(scored, jnp.int32),
      sampler_logprobs_BR=of(scored, jnp.float32),
      row_weight_B=of((rows,), jnp.float32),
  )
  per_token = of(scored, jnp.float32)
  batch = types.PolicyBatch(rollout, per_token, per_token, per_token)
  loss = ppo.PPOLoss()
  counted = jax.eval_shape(
      loss.denominators, rollout.action_mask_BR, rollout.row_weight_B
  )
  share = functools.partial(
      update_lib.micro_batch_loss,
      *(model, loss, 1.0),
      chunk_tokens=chunk_tokens,
  )
  step = jax.jit(jax.value_and_grad(share, has_aux=True))
  compiled = step.lower(params, batch, counted).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def test_half_a_billion_parameters_need_4_gb_for_32_rows_of_320():
  """With every position scored. All logits at once are 6.2 GB, many times."""
  model = qwen2.Qwen2(configs.CONFIGS['0.5b'], keep_attention=False)
  assert _temporary_bytes(model, 32, 320, 320, 1024) < 4e9
