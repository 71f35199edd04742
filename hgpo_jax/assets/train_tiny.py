"""Makes the tiny policy: `python -m hgpo_jax.assets.train_tiny --out DIR`.

Imitates the demonstrator of `demonstrator.py` on generated training games,
from random weights: the loss is the mean cross-entropy of the response tokens
plus a smaller weight on the prompt's own tokens, which makes the copying that
pointing at admissible actions needs come sooner. About an hour on two cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import pathlib
import time

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
import optax

from hgpo_jax.assets import demonstrations
from hgpo_jax.assets import tiny_tokenizer
from hgpo_jax.models import base
from hgpo_jax.models import hf
from hgpo_jax.models import qwen2
from hgpo_jax.rollout import tokenizer as tokenizer_lib

_OUT = flags.DEFINE_string('out', None, 'Folder to write; must not exist.')
_STEPS = flags.DEFINE_integer('steps', 5000, 'Updates.')
_ROWS = flags.DEFINE_integer('rows', 64, 'Examples an update.')
_GAMES = flags.DEFINE_integer('games', 2000, 'Training games to demonstrate.')
_RATE = flags.DEFINE_float('learning_rate', 3e-3, 'Peak learning rate.')
_SEED = flags.DEFINE_integer('seed', 0, 'Of demonstrations, weights, order.')
_WORKERS = flags.DEFINE_integer('workers', 2, 'Processes that demonstrate.')

VOCAB_SIZE = 1024
PROMPT_WEIGHT = 0.3
_BUCKETS = (128, 160, 224)


@dataclasses.dataclass(frozen=True)
class Tokens:
  """Tokenized examples of one length bucket.

  Attributes:
    ids: int32 [n, T], prompt then response, 0 after the end.
    lengths: int32 [n, 2], where the prompt and the response end.
  """

  ids: np.ndarray
  lengths: np.ndarray


def tokenize(
    examples: Sequence[demonstrations.Example],
    tokenizer: tokenizer_lib.ChatTokenizer,
) -> list[Tokens]:
  """Examples sorted into length buckets.

  Raises:
    ValueError: an example is longer than the last bucket.
  """
  rows: dict[int, list[tuple[list[int], int]]] = {t: [] for t in _BUCKETS}
  for example in examples:
    prompt = tokenizer.chat(example.prompt)
    ids = prompt + tokenizer.encode(example.response + '<|im_end|>')
    fits = [t for t in _BUCKETS if len(ids) <= t]
    if not fits:
      raise ValueError(
          f'an example has {len(ids)} tokens, more than the last bucket'
          f' {_BUCKETS[-1]}; show less history'
      )
    rows[fits[0]].append((ids, len(prompt)))
  result = []
  for length, members in rows.items():
    ids = np.zeros((len(members), length), np.int32)
    for i, (row, _) in enumerate(members):
      ids[i, : len(row)] = row
    ends = [(prompt, len(row)) for row, prompt in members]
    result.append(Tokens(ids, np.asarray(ends, np.int32).reshape(-1, 2)))
  return result


def loss_fn(
    params: base.Params,
    model: qwen2.Qwen2,
    ids_BT: jax.Array,
    lengths_B2: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """(training loss, mean cross-entropy of response tokens)."""
  index_T = jnp.arange(ids_BT.shape[1])
  real_BT = index_T < lengths_B2[:, 1:]
  hidden = model.hidden(
      params,
      ids_BT,
      jnp.broadcast_to(index_T, ids_BT.shape),
      real_BT.astype(jnp.int32),
  )
  logits = model.logits(params, hidden[:, :-1])
  # A one-hot product: its gradient is several times faster on CPUs than the
  # scatter of take_along_axis.
  target = jax.nn.one_hot(ids_BT[:, 1:], logits.shape[-1])
  nll = jax.nn.logsumexp(logits, -1) - jnp.sum(target * logits, -1)
  response = real_BT[:, 1:] & (index_T[1:] >= lengths_B2[:, :1])
  prompt = real_BT[:, 1:] & ~response
  mean = lambda mask: jnp.sum(nll * mask) / jnp.maximum(jnp.sum(mask), 1)
  return mean(response) + PROMPT_WEIGHT * mean(prompt), mean(response)


def batches(
    buckets: Sequence[Tokens], rows: int, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Endless batches, each from one bucket, buckets in proportion to size."""
  rng = np.random.default_rng(seed)
  while True:
    order = []
    for b, bucket in enumerate(buckets):
      chosen = rng.permutation(len(bucket.ids))
      for first in range(0, len(chosen) - rows + 1, rows):
        order.append((b, chosen[first : first + rows]))
    for i in rng.permutation(len(order)):
      b, chosen = order[i]
      yield buckets[b].ids[chosen], buckets[b].lengths[chosen]


def train(
    model: qwen2.Qwen2, buckets: Sequence[Tokens], steps: int, on_step=None
) -> base.Params:
  """Parameters after `steps` updates of AdamW with a cosine schedule."""
  params = model.init(jax.random.key(_SEED.value))
  schedule = optax.warmup_cosine_decay_schedule(
      0.0, _RATE.value, min(100, steps // 10 + 1), steps, 0.03 * _RATE.value
  )
  optimizer = optax.chain(
      optax.clip_by_global_norm(1.0),
      optax.adamw(schedule, b2=0.98, weight_decay=0.01),
  )
  state = optimizer.init(params)

  @jax.jit
  def update(params, state, ids_BT, lengths_B2):
    grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (_, response), grads = grad_fn(params, model, ids_BT, lengths_B2)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, response

  start, recent = time.monotonic(), []
  for step, batch in zip(
      range(1, steps + 1), batches(buckets, _ROWS.value, _SEED.value)
  ):
    params, state, response = update(params, state, *batch)
    recent.append(response)
    if step % 100 == 0 or step == steps:
      print(
          f'step {step}/{steps}  response nll {np.mean(recent):.4f} '
          f' {time.monotonic() - start:.0f} s',
          flush=True,
      )
      recent = []
      if on_step is not None:
        on_step(step, params)
  return params


def main(argv: Sequence[str]) -> None:
  del argv
  out = pathlib.Path(_OUT.value)
  recipe = demonstrations.Recipe(games=_GAMES.value, seed=_SEED.value)
  examples = demonstrations.collect(recipe, _WORKERS.value)
  print(f'{len(examples)} examples of {recipe.games} games', flush=True)
  texts = (t for e in examples for t in (e.prompt, e.response))
  tokenizer_folder = out.with_name(out.name + '.tokenizer')
  tiny_tokenizer.save(tiny_tokenizer.train(texts, VOCAB_SIZE), tokenizer_folder)
  tokenizer = tokenizer_lib.ChatTokenizer(tokenizer_folder)
  model = qwen2.Qwen2(configs_tiny(tokenizer.size), remat=False)
  buckets = tokenize(examples, tokenizer)
  params = train(model, buckets, _STEPS.value)
  hf.save_folder(out, model.config, params, tokenizer_folder, 'float32')


def configs_tiny(vocab_size: int) -> base.ModelConfig:
  return base.ModelConfig(
      vocab_size=vocab_size,
      hidden_size=96,
      intermediate_size=256,
      num_layers=4,
      num_heads=4,
      num_kv_heads=2,
      head_dim=24,
      rope_theta=10000.0,
      tie_word_embeddings=True,
      max_position_embeddings=4096,
  )


if __name__ == '__main__':
  flags.mark_flag_as_required('out')
  app.run(main)
