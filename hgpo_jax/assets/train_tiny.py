"""Makes the tiny policy: `python -m hgpo_jax.assets.train_tiny --out DIR`.

Imitates the demonstrator of `demonstrator.py` on generated training games,
from random weights: the loss is the mean cross-entropy of the response tokens
plus a smaller weight on the prompt's own tokens, which makes the copying that
pointing at admissible actions needs come sooner.
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
_STEPS = flags.DEFINE_integer('steps', 3600, 'Updates.')
_GAMES = flags.DEFINE_integer('games', 2000, 'Training games to demonstrate.')

VOCAB_SIZE = 1024
_BUCKETS = (128, 160, 224)


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
    seed: of the weights and the order of examples.
  """

  steps: int = 3600
  rows: int = 32
  learning_rate: float = 3e-3
  muon_learning_rate: float = 0.02
  prompt_weight: float = 0.3
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


def train(
    model: qwen2.Qwen2, buckets: Sequence[Tokens], settings: Settings
) -> tuple[base.Params, list[float]]:
  """(parameters, mean response cross-entropy of each hundred updates)."""
  params = model.init(jax.random.key(settings.seed))
  optimizer = make_optimizer(settings)
  state = optimizer.init(params)

  @jax.jit
  def update(params, state, ids_BT, ends_B2):
    gradient = jax.grad(loss_fn, has_aux=True)
    grads, response = gradient(
        params, model, settings.prompt_weight, ids_BT, ends_B2
    )
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, response

  start, recent, curve = time.monotonic(), [], []
  source = batches(buckets, settings.rows, settings.seed)
  for step in range(1, settings.steps + 1):
    params, state, response = update(params, state, *next(source))
    recent.append(response)
    if step % 100 == 0 or step == settings.steps:
      curve.append(float(np.mean(jax.device_get(recent))))
      recent = []
      print(
          f'step {step}/{settings.steps}  response cross-entropy'
          f' {curve[-1]:.4f}  {time.monotonic() - start:.0f} s',
          flush=True,
      )
  return params, curve


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
