"""What a run is: the one root that gin constructs, cheap and checked."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Literal

from hgpo_jax import assets
from hgpo_jax import config
from hgpo_jax import sharding
from hgpo_jax.advantages import base as advantages
from hgpo_jax.batch import minibatch
from hgpo_jax.envs import base as envs
from hgpo_jax.experiment import old_logprobs as old_logprobs_lib
from hgpo_jax.experiment import sync as sync_lib
from hgpo_jax.experiment import workers as workers_lib
from hgpo_jax.io import metrics
from hgpo_jax.learner import optimizer as optimizer_lib
from hgpo_jax.losses import ppo
from hgpo_jax.models import base as models
from hgpo_jax.models import hf
from hgpo_jax.models import lora as lora_lib
from hgpo_jax.models import qwen2
from hgpo_jax.models import weight_files
from hgpo_jax.rollout import collector as collector_lib
from hgpo_jax.rollout import sampler as sampler_lib
from hgpo_jax.rollout import tokenizer as tokenizer_lib


@config.configurable
@dataclasses.dataclass(frozen=True)
class PolicySource:
  """The Hugging Face folder that the policy starts from.

  Attributes:
    folder: a folder with config.json, *.safetensors and tokenizer files; the
      bare name of a folder in hgpo_jax/assets works too. Never downloaded.
    remat: recompute activations in the backward pass; less memory, more time.
    compute_dtype: of activations; parameters and moments stay in float32.
    attention: kernel of training and scoring. 'xla' runs everywhere, 'cudnn'
      on an NVIDIA GPU and 'splash' on a TPU, both with compute_dtype =
      'bfloat16'; 'auto' takes the one of the device where it can.
    keep_attention: with `remat`, keep what attention gave rather than attend
      again; False takes less memory and more time.
    mlp_parts: with `remat`, parts of rows whose MLP is computed one after the
      other; more take less memory.
    int8_rollout: sample with the kernels of layers in int8, half the bytes of
      bfloat16 to read. What samples is then not quite what is trained: see
      logprob_gap/, and PPOLoss.tis_clip.
  """

  folder: str = config.REQUIRED
  remat: bool = True
  compute_dtype: str = 'float32'
  attention: Literal['auto', 'xla', 'cudnn', 'splash'] = 'auto'
  keep_attention: bool = True
  mlp_parts: int = 1
  int8_rollout: bool = False

  def __post_init__(self) -> None:
    if self.compute_dtype not in ('float32', 'bfloat16'):
      raise ValueError(
          f'PolicySource.compute_dtype is {self.compute_dtype!r}; expected'
          " 'float32' or 'bfloat16'"
      )
    if self.mlp_parts < 1:
      raise ValueError(
          f'PolicySource.mlp_parts is {self.mlp_parts}; expected at least 1'
      )

  def unread(self) -> dict[str, str]:
    """Fields without effect, each with the setting that leaves it so."""
    fields = () if self.remat else ('keep_attention', 'mlp_parts')
    return dict.fromkeys(fields, 'remat')

  @property
  def path(self) -> pathlib.Path:
    """The folder on disk."""
    packaged = self._packaged
    return packaged if packaged else pathlib.Path(self.folder)

  @property
  def _packaged(self) -> pathlib.Path | None:
    """The folder of assets that a bare name stands for."""
    bare = pathlib.PurePath(self.folder).name == self.folder
    packaged = pathlib.Path(assets.__file__).parent / self.folder
    return packaged if bare and self.folder and packaged.is_dir() else None

  def check(self) -> tuple[qwen2.Qwen2, tokenizer_lib.ChatTokenizer]:
    """The model's functions and its tokenizer, before any weight is read.

    Raises:
      FileNotFoundError: the folder or a file of it is missing.
      ValueError: a config or tokenizer that does not fit.
    """
    if self._packaged and pathlib.Path(self.folder).is_dir():
      raise ValueError(
          f'PolicySource.folder = {self.folder!r} may be the packaged'
          f' {self._packaged} or a folder here; write the path of the one, or'
          f" './{self.folder}' for the other"
      )
    if not self.folder or not self.path.is_dir():
      raise FileNotFoundError(
          f'PolicySource.folder = {self.folder!r} is not a folder; give the'
          ' Hugging Face folder of a Qwen2.5 model (nothing is downloaded)'
      )
    shapes = hf.read_config(self.path)
    tokenizer = tokenizer_lib.ChatTokenizer(self.path)
    tokenizer_lib.check_vocab(tokenizer, shapes.vocab_size)
    model = qwen2.Qwen2(
        shapes,
        self.remat,
        self.compute_dtype,
        self.attention,
        self.keep_attention,
        self.mlp_parts,
        self.int8_rollout,
    )
    return model, tokenizer

  def check_weights(self) -> None:
    """Looks at the heads of the weight files only.

    Raises:
      FileNotFoundError: a file is missing.
      ValueError: a file is damaged, or they do not belong together.
    """
    with weight_files.WeightFiles(self.path):
      pass

  def load(self, model: qwen2.Qwen2) -> models.Params:
    """The parameters, float32, on the host."""
    return hf.load_params(self.path, model.config)


@config.configurable
@dataclasses.dataclass(frozen=True)
class Evaluation:
  """How a policy is evaluated: each game of a split exactly once a seed.

  Attributes:
    split: the split to enumerate.
    games: the first so many games of it; 0 for all.
    temperature: of sampling; 0 is greedy. The published protocol has 0.4.
    seeds: of sampling; each plays every game once.
    draws: draw so many games a seed, with replacement, instead of playing each
      once; the published numbers of the GiGPO family have 128.
    every: iterations between evaluations in training; 0 for none but before
      the first and after the last.
    before_training: whether there is one before the first.
  """

  split: str = config.REQUIRED
  games: int = 0
  temperature: float = 0.4
  seeds: tuple[int, ...] = (0,)
  draws: int = 0
  every: int = config.may_change(0)
  before_training: bool = config.may_change(True)

  def __post_init__(self) -> None:
    if min(self.games, self.every, self.temperature, self.draws) < 0:
      raise ValueError(
          'Evaluation needs games, every, temperature and draws of at least 0,'
          f' got {self.games}, {self.every}, {self.temperature} and'
          f' {self.draws}'
      )
    if not self.seeds or len(set(self.seeds)) < len(self.seeds):
      raise ValueError(
          f'Evaluation.seeds is {self.seeds}; expected different seeds, at'
          ' least one'
      )
    if not all(0 <= seed < 2**32 for seed in self.seeds):
      raise ValueError(
          f'Evaluation.seeds is {self.seeds}; expected each in 0 to 2**32 - 1'
      )


@config.configurable
@dataclasses.dataclass(frozen=True)
class Experiment:
  """A training run.

  Attributes:
    env: the environment.
    policy: where the policy starts.
    collector: how episodes are played.
    sampler: how responses are sampled.
    estimator: from steps to advantages.
    loss: the objective.
    optimizer: the optimizer.
    minibatches: from steps to updates.
    evaluation: how and when the policy is evaluated.
    old_logprobs: the probabilities that the ratio is taken to.
    lora: adapters that are trained in place of the policy's own weights; None
      to train those.
    mesh: how devices are arranged.
    rollout_mesh: how they are arranged for sampling, in training and in
      evaluation; None keeps `mesh.tensor`, and has a copy of the weights on
      each data and fsdp share.
    sync_probe: how the sampler's weights are checked.
    workers: processes that run environments.
    logging: where metrics go.
    split: split whose tasks are trained on.
    tasks_per_iteration: tasks (groups) of one iteration.
    group_size: episodes of each task, at least 2.
    resample_rounds: rounds at most in which groups whose episodes all had the
      same outcome give way to groups of further tasks (DAPO's dynamic
      sampling); 0 for none. CovGPO learns from the groups that this removes.
    rollout_lag: 0: the newest policy plays, then the learner learns. 1: while
      it learns, the policy as it was before plays the next iteration's
      episodes, so that none is played by a policy more than one iteration old
      (Noukhovitch et al. 2024, arXiv 2410.18252). Needs old log-probs that
      correct for it: OldLogprobs.source = 'sampler', or 'trainer' with
      PPOLoss.tis_clip. The policy to play with is kept meanwhile.
    temperature: of sampling in training; the loss uses the same.
    iterations: iterations in all.
    seed: of task order, sampling and minibatch order.
    save_every: iterations between checkpoints; the last is always saved. With
      rollout_lag = 1 nothing is under way while one is saved, and the newest
      policy plays the iteration behind it: so this number changes which
      policy plays, and nothing is played ahead if it is 1.
    keep_checkpoints: newest checkpoints kept.
    save_rollouts_every: iterations between saved episodes; 0 for none.
  """

  env: envs.EnvSpec = config.REQUIRED
  policy: PolicySource = config.REQUIRED
  collector: collector_lib.Collector = config.REQUIRED
  sampler: sampler_lib.Sampler = config.REQUIRED
  estimator: advantages.Estimator = config.REQUIRED
  loss: ppo.PPOLoss = config.REQUIRED
  optimizer: optimizer_lib.AdamW = config.REQUIRED
  minibatches: minibatch.Minibatches = config.REQUIRED
  evaluation: Evaluation = config.REQUIRED
  old_logprobs: old_logprobs_lib.OldLogprobs = old_logprobs_lib.OldLogprobs()
  lora: lora_lib.LoRA | None = None
  mesh: sharding.Mesh = sharding.Mesh()
  rollout_mesh: sharding.Mesh | None = None
  sync_probe: sync_lib.SyncProbe = config.may_change(sync_lib.SyncProbe())
  workers: workers_lib.Workers = config.may_change(workers_lib.Workers())
  logging: metrics.Logging = config.may_change(metrics.Logging())
  split: str = 'train'
  tasks_per_iteration: int = 16
  group_size: int = 8
  resample_rounds: int = 0
  rollout_lag: int = 0
  temperature: float = 1.0
  iterations: int = config.may_change(150)
  seed: int = 0
  save_every: int = config.may_change(10)
  keep_checkpoints: int = config.may_change(2)
  save_rollouts_every: int = config.may_change(10)

  def __post_init__(self) -> None:
    advantages.check(self.estimator, 'Experiment.estimator')
    if self.group_size < 2:
      raise ValueError(
          f'Experiment.group_size is {self.group_size}; expected at least 2:'
          ' a group of one has nothing to be compared with'
      )
    for name in (
        'tasks_per_iteration',
        'iterations',
        'save_every',
        'keep_checkpoints',
    ):
      if getattr(self, name) < 1:
        raise ValueError(
            f'Experiment.{name} is {getattr(self, name)}; expected at least 1'
        )
    if self.temperature <= 0:
      raise ValueError(
          f'Experiment.temperature is {self.temperature}; expected more than 0'
      )
    for name in ('save_rollouts_every', 'resample_rounds'):
      if getattr(self, name) < 0:
        raise ValueError(
            f'Experiment.{name} is {getattr(self, name)}; expected at least 0'
        )
    if not 0 <= self.seed < 2**32:
      raise ValueError(
          f'Experiment.seed is {self.seed}; expected 0 to 2**32 - 1'
      )
    if self.rollout_lag:
      self._check_lag()

  def _check_lag(self) -> None:
    """What an older policy played has to be corrected for, and has to occur."""
    if self.rollout_lag != 1:
      raise ValueError(
          f'Experiment.rollout_lag is {self.rollout_lag}; expected 0, or 1 to'
          ' play one iteration ahead of the learner'
      )
    source, clip = self.old_logprobs.source, self.loss.tis_clip
    if source == 'auto' or (source == 'trainer' and not clip):
      raise ValueError(
          'Experiment.rollout_lag is 1, so an older policy plays, but with'
          f' OldLogprobs.source = {source!r} and PPOLoss.tis_clip = {clip:g}'
          ' nothing corrects for it at all times; set OldLogprobs.source ='
          " 'sampler', or 'trainer' with PPOLoss.tis_clip = 2.0"
      )
    if self.save_every == 1:
      raise ValueError(
          'Experiment.rollout_lag is 1, but Experiment.save_every is 1, and'
          ' behind a checkpoint the newest policy plays: set save_every to 2 or'
          ' more, or rollout_lag to 0'
      )

  @property
  def episodes(self) -> int:
    """Episodes of one iteration."""
    return self.tasks_per_iteration * self.group_size
