"""Makes the tiny policy: `python -m hgpo_jax.assets.train_tiny --out DIR`.

Imitates the demonstrator of `demonstrator.py` on generated training games,
and first learns to copy, which pointing at admissible actions rests on: one
head attends to the previous token from the start, and the first updates are a
drill in repeating random tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import pathlib
import tempfile
import time
from typing import Any

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib

from hgpo_jax.assets import demonstrations
from hgpo_jax.assets import tiny_tokenizer
from hgpo_jax.batch import pack
from hgpo_jax.models import base
from hgpo_jax.models import configs
from hgpo_jax.models import hf
from hgpo_jax.models import qwen2
from hgpo_jax.rollout import tokenizer as tokenizer_lib

_OUT = flags.DEFINE_string('out', None, 'Folder to write; must not exist.')
_WORKERS = flags.DEFINE_integer('workers', 2, 'Processes that demonstrate.')
_STEPS = flags.DEFINE_integer('steps', 4200, 'Updates.')
_GAMES = flags.DEFINE_integer('games', 2400, 'Training games to demonstrate.')

VOCAB_SIZE = 1024
_BUCKETS = (128, 160, 224)

_DRILL_LENGTH = 96

# The previous-token head: rotary pairs that turn fast, and their bias.
_FAST_PAIRS = 6
_BIAS = 3.0


@dataclasses.dataclass(frozen=True)
class Settings:
  """How the policy is trained.

  Attributes:
    steps: updates.
    rows: examples an update.
    learning_rate: of AdamW at its peak, after a short warm-up; a cosine
      follows.
    muon_learning_rate: the same for Muon.
    prompt_weight: of the prompt's own tokens in the loss.
    drill_steps: updates on repeated random tokens that come first.
    mixed_steps: updates after them in which a few such rows stay.
    seed: of the weights and the order of examples.
  """

  steps: int = 4200
  rows: int = 32
  learning_rate: float = 3e-3
  muon_learning_rate: float = 0.015
  prompt_weight: float = 0.1
  drill_steps: int = 200
  mixed_steps: int = 400
  seed: int = 0


@dataclasses.dataclass(frozen=True)
class Tokens:
  """Tokenized examples of one length bucket.

  Attributes:
    ids_BT: int32, prompt then response, 0 after the end.
    ends_B2: int32, where the prompt and where the response ends.
  """

  ids_BT: np.ndarray
  ends_B2: np.ndarray


def tokenize(
    examples: Sequence[demonstrations.Example],
    tokenizer: tokenizer_lib.ChatTokenizer,
) -> list[Tokens]:
  """Examples sorted into length buckets.

  Raises:
    ValueError: an example is longer than the last bucket.
  """
  members: dict[int, list[tuple[list[int], int]]] = {t: [] for t in _BUCKETS}
  for example in examples:
    prompt = tokenizer.chat(example.prompt)
    ids = prompt + tokenizer.encode(example.response + tokenizer_lib.IM_END)
    length = pack.bucket('train_tiny._BUCKETS', _BUCKETS, len(ids))
    members[length].append((ids, len(prompt)))
  result = []
  for length, rows in members.items():
    ids_BT = np.zeros((len(rows), length), np.int32)
    for i, (ids, _) in enumerate(rows):
      ids_BT[i, : len(ids)] = ids
    ends = [(prompt, len(ids)) for ids, prompt in rows]
    result.append(Tokens(ids_BT, np.asarray(ends, np.int32).reshape(-1, 2)))
  return result


def loss_fn(
    params: base.Params,
    model: base.LanguageModel,
    prompt_weight: float,
    ids_BT: jax.Array,
    ends_B2: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """(training loss, mean cross-entropy of response tokens)."""
  index_T = jnp.arange(ids_BT.shape[1])
  real_BT = index_T < ends_B2[:, 1:]
  hidden_BTD = model.hidden(
      params,
      ids_BT,
      jnp.broadcast_to(index_T, ids_BT.shape),
      real_BT.astype(jnp.int32),
  )
  logits_BTV = model.logits(params, hidden_BTD[:, :-1])
  # A one-hot product: its gradient is several times faster on CPUs than the
  # scatter of take_along_axis.
  target_BTV = jax.nn.one_hot(ids_BT[:, 1:], logits_BTV.shape[-1])
  nll_BT = jax.nn.logsumexp(logits_BTV, -1) - jnp.sum(
      target_BTV * logits_BTV, -1
  )
  response_BT = real_BT[:, 1:] & (index_T[1:] >= ends_B2[:, :1])
  prompt_BT = real_BT[:, 1:] & ~response_BT
  response = jnp.mean(nll_BT, where=response_BT)
  prompt = jnp.mean(nll_BT, where=prompt_BT)
  return response + prompt_weight * prompt, response


def batches(
    buckets: Sequence[Tokens], rows: int, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Endless batches, each from one bucket, every pass in a new order."""
  rng = np.random.default_rng(seed)
  while True:
    order = []
    for bucket in buckets:
      chosen = rng.permutation(len(bucket.ids_BT))
      for first in range(0, len(chosen) - rows + 1, rows):
        order.append((bucket, chosen[first : first + rows]))
    if not order:
      raise ValueError(f'no bucket holds the {rows} examples of one update')
    for i in rng.permutation(len(order)):
      bucket, rows_B = order[i]
      yield bucket.ids_BT[rows_B], bucket.ends_B2[rows_B]


def initial_params(model: qwen2.Qwen2, key: jax.Array) -> base.Params:
  """Random parameters, with one head that attends to the previous token.

  Copying a name from the list of actions takes two steps of attention: to
  know what follows which token, and to find the place that follows the token
  just written. The first needs only positions, and rotary embeddings can
  express it in the query and key biases that Qwen2 has: with k = b and
  q = R(-1) b, the score at distance n is sum_i b_i^2 cos((n - 1) theta_i),
  highest at n = 1. Given this, a policy copies within some hundred updates;
  without it, thousands are not enough.
  """
  params = model.init(key)
  width = model.config.head_dim
  frequency = model.config.rope_theta ** -(np.arange(0, width, 2) / width)
  low = np.where(np.arange(width // 2) < _FAST_PAIRS, _BIAS, 0.0)
  query = np.concatenate([low * np.cos(frequency), -low * np.sin(frequency)])
  attention = params['layers']['attention']
  for name, bias in (('q', query), ('k', np.pad(low, (0, width // 2)))):
    old = attention[name]['bias']
    attention[name]['bias'] = old.at[0, :width].set(bias)
  return params


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
  """Muon for the kernels of the layers, AdamW for everything else.

  Muon (Jordan et al., 2024) reaches the copying of names from the list of
  actions in a fraction of the updates that AdamW alone takes.
  """

  def cosine(peak: float) -> optax.Schedule:
    warm = min(100, settings.steps // 10 + 1)
    return optax.warmup_cosine_decay_schedule(
        0.0, peak, warm, settings.steps, 0.03 * peak
    )

  def kernels(params: base.Params) -> Any:
    # Kernels are stacked: [layers, in, out].
    matrix = contrib.MuonDimensionNumbers(1, 2)
    return jax.tree.map(lambda p: matrix if p.ndim == 3 else None, params)

  return optax.chain(
      optax.clip_by_global_norm(1.0),
      contrib.muon(
          cosine(settings.muon_learning_rate),
          adam_learning_rate=cosine(settings.learning_rate),
          adam_b2=0.98,
          muon_weight_dimension_numbers=kernels,
      ),
  )


def drill(
    rows: int, vocab_size: int, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
  """Endless batches of random tokens, repeated; the repeats are the response.

  Nothing but copying what followed the last time can predict them.
  """
  rng = np.random.default_rng(seed)
  while True:
    ids_BT = np.zeros((rows, _DRILL_LENGTH), np.int32)
    ends_B2 = np.full((rows, 2), _DRILL_LENGTH, np.int32)
    for row in range(rows):
      period = int(rng.integers(8, _DRILL_LENGTH // 2 + 1))
      words = rng.integers(len(tiny_tokenizer.SPECIAL), vocab_size, period)
      ids_BT[row] = np.resize(words, _DRILL_LENGTH)
      ends_B2[row, 0] = period + 1
    yield ids_BT, ends_B2


def train(
    model: qwen2.Qwen2, buckets: Sequence[Tokens], settings: Settings
) -> tuple[base.Params, list[float]]:
  """(parameters, mean response cross-entropy of each hundred updates)."""
  params = initial_params(model, jax.random.key(settings.seed))
  optimizer = make_optimizer(settings)
  state = optimizer.init(params)

  def loss(params, weights, parts):
    """Sum over parts of response loss + weight * prompt loss."""
    losses = [
        loss_fn(params, model, weight, *part)
        for weight, part in zip(weights, parts)
    ]
    return sum(total for total, _ in losses), losses[0][1]

  @jax.jit
  def update(params, state, weights, parts):
    grads, response = jax.grad(loss, has_aux=True)(params, weights, parts)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, response

  start, recent, curve = time.monotonic(), [], []
  for step, (weights, parts) in enumerate(_lessons(model, buckets, settings)):
    params, state, response = update(params, state, weights, parts)
    recent.append(response)
    if (step + 1) % 100 == 0 or step + 1 == settings.steps:
      curve.append(float(np.mean(jax.device_get(recent))))
      recent = []
      print(
          f'step {step + 1}/{settings.steps}  response cross-entropy'
          f' {curve[-1]:.4f}  {time.monotonic() - start:.0f} s',
          flush=True,
      )
  return params, curve


def _lessons(
    model: qwen2.Qwen2, buckets: Sequence[Tokens], settings: Settings
) -> Iterator[tuple[list[float], list[tuple[np.ndarray, np.ndarray]]]]:
  """(prompt weights, batches) of each update.

  Drill alone, then drill beside demonstrations, so that what it taught is not
  lost again before they make use of it, then demonstrations alone.
  """
  vocab = model.config.vocab_size
  alone = drill(settings.rows, vocab, settings.seed)
  beside = drill(settings.rows // 4, vocab, settings.seed + 1)
  demonstrated = batches(buckets, settings.rows, settings.seed)
  for step in range(settings.steps):
    if step < settings.drill_steps:
      yield [0.0], [next(alone)]
    elif step < settings.drill_steps + settings.mixed_steps:
      yield [settings.prompt_weight, 0.0], [next(demonstrated), next(beside)]
    else:
      yield [settings.prompt_weight], [next(demonstrated)]


def make(
    out: pathlib.Path,
    examples: Sequence[demonstrations.Example],
    settings: Settings,
) -> None:
  """Trains a tokenizer and a policy on the examples; writes the folder."""
  texts = (t for e in examples for t in (e.prompt, e.response))
  with tempfile.TemporaryDirectory() as folder:
    files = pathlib.Path(folder)
    tiny_tokenizer.save(tiny_tokenizer.train(texts, VOCAB_SIZE), files)
    tokenizer = tokenizer_lib.ChatTokenizer(files)
    shapes = dataclasses.replace(
        configs.CONFIGS['tiny'], vocab_size=tokenizer.size
    )
    model = qwen2.Qwen2(shapes, remat=False)
    params, _ = train(model, tokenize(examples, tokenizer), settings)
    hf.save_folder(out, model.config, params, files)


def main(argv: Sequence[str]) -> None:
  del argv
  recipe = demonstrations.Recipe(games=_GAMES.value)
  examples = demonstrations.collect(recipe, _WORKERS.value)
  print(f'{len(examples)} examples of {recipe.games} games', flush=True)
  make(pathlib.Path(_OUT.value), examples, Settings(steps=_STEPS.value))


if __name__ == '__main__':
  flags.mark_flag_as_required('out')
  app.run(main)
