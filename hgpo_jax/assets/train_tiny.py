"""Makes the tiny policy: `python -m hgpo_jax.assets.train_tiny --out DIR`.

Imitates the demonstrator of `demonstrator.py` on generated training games,
and first learns to copy, which pointing at admissible actions rests on: one
head attends to the previous token from the start, and the first updates are a
drill in repeating random tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from hgpo_jax.assets import tiny_lessons
from hgpo_jax.assets import tiny_tokenizer
from hgpo_jax.models import base
from hgpo_jax.models import configs
from hgpo_jax.models import hf
from hgpo_jax.models import qwen2
from hgpo_jax.rollout import tokenizer as tokenizer_lib

VOCAB_SIZE = 1024

# The previous-token head: rotary pairs that turn fast, and their bias.
_FAST_PAIRS = 6
_BIAS = 3.0


@dataclasses.dataclass(frozen=True)
class Phase:
  """One stretch of training, with an optimizer of its own.

  Attributes:
    steps: updates.
    learning_rate: of AdamW, after a short warm-up.
    muon_learning_rate: of Muon, likewise.
    final_fraction: of both rates at the end of a cosine; 1 keeps them.
  """

  steps: int
  learning_rate: float
  muon_learning_rate: float
  final_fraction: float


@dataclasses.dataclass(frozen=True)
class Settings:
  """How the policy is trained: it learns to copy, then to imitate.

  Attributes:
    copying: half of it drill in repeating random tokens, half drill beside
      demonstrations, so that what was learned is not lost again before they
      make use of it.
    imitating: demonstrations alone. Its rates are a fifth of the first ones:
      those form the copying heads fast and are too high for anything finer.
    rows: examples an update.
    prompt_weight: of the prompt's own tokens in the loss.
    seed: of the weights and the order of examples.
  """

  copying: Phase = Phase(600, 3e-3, 0.02, 1.0)
  imitating: Phase = Phase(2000, 8e-4, 0.004, 0.03)
  rows: int = 32
  prompt_weight: float = 0.1
  seed: int = 0


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


def make_optimizer(phase: Phase) -> optax.GradientTransformation:
  """Muon for the kernels of the layers, AdamW for everything else.

  Muon (Jordan et al., 2024) reaches the copying of names from the list of
  actions in a fraction of the updates that AdamW alone takes.
  """

  def schedule(peak: float) -> optax.Schedule:
    warm = min(100, phase.steps // 10 + 1)
    return optax.warmup_cosine_decay_schedule(
        0.0, peak, warm, phase.steps, phase.final_fraction * peak
    )

  def kernels(params: base.Params) -> Any:
    # Kernels are stacked: [layers, in, out].
    matrix = contrib.MuonDimensionNumbers(1, 2)
    return jax.tree.map(lambda p: matrix if p.ndim == 3 else None, params)

  return optax.chain(
      optax.clip_by_global_norm(1.0),
      contrib.muon(
          schedule(phase.muon_learning_rate),
          adam_learning_rate=schedule(phase.learning_rate),
          adam_b2=0.98,
          muon_weight_dimension_numbers=kernels,
      ),
  )


# Prompt weights and batches of one update.
_Lesson = tuple[list[float], list[tuple[np.ndarray, np.ndarray]]]


def train(
    model: qwen2.Qwen2,
    buckets: Sequence[tiny_lessons.Tokens],
    settings: Settings,
) -> base.Params:
  """Parameters after both phases."""
  vocab = model.config.vocab_size
  alone = tiny_lessons.drill(settings.rows, vocab, settings.seed)
  beside = tiny_lessons.drill(settings.rows // 4, vocab, settings.seed + 1)
  demonstrated = tiny_lessons.batches(buckets, settings.rows, settings.seed)

  def copying(step: int) -> _Lesson:
    if step < settings.copying.steps // 2:
      return [0.0], [next(alone)]
    return [settings.prompt_weight, 0.0], [next(demonstrated), next(beside)]

  def imitating(step: int) -> _Lesson:
    del step
    return [settings.prompt_weight], [next(demonstrated)]

  params = initial_params(model, jax.random.key(settings.seed))
  params = _run_phase('copying', model, params, settings.copying, copying)
  return _run_phase('imitating', model, params, settings.imitating, imitating)


def _run_phase(
    name: str,
    model: qwen2.Qwen2,
    params: base.Params,
    phase: Phase,
    lesson: Callable[[int], _Lesson],
) -> base.Params:
  """Parameters after a phase; prints the loss as it goes."""
  optimizer = make_optimizer(phase)
  state = optimizer.init(params)

  def loss(params, weights, parts):
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

  start, recent = time.monotonic(), []
  for step in range(phase.steps):
    params, state, response = update(params, state, *lesson(step))
    recent.append(response)
    if (step + 1) % 50 == 0 or step + 1 == phase.steps:
      print(
          f'{name} {step + 1}/{phase.steps}  response cross-entropy'
          f' {np.mean(jax.device_get(recent)):.4f} '
          f' {time.monotonic() - start:.0f} s',
          flush=True,
      )
      recent = []
  return params


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
    params = train(model, tiny_lessons.tokenize(examples, tokenizer), settings)
    hf.save_folder(out, model.config, params, files)


def main(argv: Sequence[str]) -> None:
  del argv
  recipe = demonstrations.Recipe(games=flags.FLAGS.games)
  print(f'playing {recipe.games} games to imitate', flush=True)
  examples = demonstrations.collect(recipe, flags.FLAGS.workers)
  print(f'{len(examples)} examples of {recipe.games} games', flush=True)
  make(pathlib.Path(flags.FLAGS.out), examples, Settings())


if __name__ == '__main__':
  # Here, so that importing this module claims no flag names.
  flags.DEFINE_string('out', None, 'Folder to write; must not exist.')
  flags.DEFINE_integer('workers', 2, 'Processes that demonstrate.')
  flags.DEFINE_integer(
      'games', demonstrations.Recipe().games, 'Games to demonstrate.'
  )
  flags.mark_flag_as_required('out')
  app.run(main)
