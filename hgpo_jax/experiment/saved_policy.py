"""The policy of a run after training: evaluating it, taking it out."""

from __future__ import annotations

import pathlib

import jax

from hgpo_jax.experiment import evaluate as evaluate_lib
from hgpo_jax.experiment import runtime as runtime_lib
from hgpo_jax.experiment import spec as spec_lib
from hgpo_jax.io import checkpoint
from hgpo_jax.learner import train_state
from hgpo_jax.models import base as models
from hgpo_jax.models import lora
from hgpo_jax.models import qwen2


def evaluate(
    spec: spec_lib.Experiment, run_dir: pathlib.Path | None
) -> tuple[str, int, evaluate_lib.Result]:
  """Evaluates the policy's folder, or the newest checkpoint of a run.

  Returns (name of the policy, iterations behind it, result).
  """
  if run_dir is not None:
    _check_folder(run_dir)
  with runtime_lib.open_player(spec) as player:
    learner = runtime_lib.make_learner(spec, player)
    name, iteration, state = str(spec.policy.folder), 0, learner.state
    if run_dir is not None:
      restored = _restore(run_dir, learner.state)
      if learner.frozen is not None:
        runtime_lib.check_start(spec, restored, learner.frozen.params)
      name, iteration, state = (
          run_dir.name,
          restored.iteration,
          restored.state,
      )
    split = spec.env.split(spec.evaluation.split)
    result = evaluate_lib.evaluate(
        spec.evaluation, split, player.collector, learner.policy(state)
    )
  return name, iteration, result


def newest_policy(
    spec: spec_lib.Experiment, run_dir: pathlib.Path
) -> tuple[qwen2.Qwen2, models.Params, int]:
  """(model, parameters, iterations) of the newest checkpoint of a run.

  Adapters are merged into the parameters.
  """
  _check_folder(run_dir)
  with runtime_lib.starting():
    model, _ = spec.policy.check()
  _, frozen, like = runtime_lib.make_state(spec, model, spec.mesh.make_mesh())
  restored = _restore(run_dir, like)
  params = restored.state.params
  if frozen is not None:
    runtime_lib.check_start(spec, restored, frozen.params)
    params = lora.merge(frozen.attach(params))
  return model, jax.device_get(params), restored.iteration


def _check_folder(run_dir: pathlib.Path) -> None:
  folder = run_dir / 'checkpoints'
  if not folder.is_dir():
    raise FileNotFoundError(
        f'{run_dir} has no checkpoints; give the --run_dir of a training run'
    )
  if not any(path.name.isdigit() for path in folder.iterdir()):
    raise _none_yet(folder)


def _restore(
    run_dir: pathlib.Path, like: train_state.TrainState
) -> checkpoint.Restored[train_state.TrainState]:
  folder = run_dir / 'checkpoints'
  checkpoints = checkpoint.Checkpoints(folder, read_only=True)
  restored = checkpoints.restore(like)
  checkpoints.close()
  if restored is None:
    raise _none_yet(folder)
  return restored


def _none_yet(folder: pathlib.Path) -> FileNotFoundError:
  return FileNotFoundError(
      f'{folder} holds no complete checkpoint yet; train longer, or lower'
      ' Experiment.save_every'
  )
