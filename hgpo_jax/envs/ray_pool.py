"""A pool of environments on other machines: one Ray actor a node.

Each actor runs an `EnvPool`, which deals with environments and workers that
fail. What is left to deal with here is the loss of a whole actor, or of its
machine: slots that lived there answer 'env_error', and another actor takes its
place. The package and the games have to be on every node.
"""

from __future__ import annotations

import atexit
import collections
from collections.abc import Iterable, Iterator, Mapping
import contextlib
import importlib.util
import signal
import threading
import time
from typing import Any

from absl import logging

from hgpo_jax import types
from hgpo_jax.envs import base
from hgpo_jax.envs import ledger
from hgpo_jax.envs import pool
from hgpo_jax.envs import ray_node

_CLOSE_SECONDS = 5.0
# Counted once more by the books of this pool, which see lost actors too.
_OWN_COUNTS = ('pool/timeouts', 'pool/env_errors')


def check() -> None:
  """Raises ImportError, naming the extra, where Ray is not installed."""
  if importlib.util.find_spec('ray') is None:
    raise ImportError(
        'Workers.ray_nodes is above 0, which needs Ray, and there is no module'
        " ray; install it with pip install 'hgpo-jax[ray]', or set"
        ' Workers.ray_nodes = 0'
    )


class RayPool:
  """`EnvPool` with up to `num_workers` processes on each of `num_nodes` nodes.

  Connects to the cluster that `$RAY_ADDRESS` names, or that runs on this
  machine; without one Ray starts on this machine alone. An actor takes as many
  CPUs as it has workers; Ray spreads actors over the nodes. Deadlines are those
  of `EnvPool`; the start includes finding a node.

  Raises:
    ImportError: Ray is not installed.
    EnvStartError: no node is free, or it cannot make the environments.
  """

  def __init__(
      self,
      spec: base.EnvSpec,
      num_slots: int,
      num_workers: int,
      num_nodes: int,
      reset_timeout_s: float = 60.0,
      step_timeout_s: float = 20.0,
      start_timeout_s: float = 120.0,
      recycle_episodes: int = 0,
  ):
    self._limits = {
        'reset_timeout_s': reset_timeout_s,
        'step_timeout_s': step_timeout_s,
        'start_timeout_s': start_timeout_s,
        'recycle_episodes': recycle_episodes,
    }
    sizes = num_slots, num_workers, num_nodes
    if min(sizes) < 1:
      raise ValueError(
          f'RayPool has (slots, workers, nodes) = {sizes}; each 1+'
      )
    check()
    import ray

    self._ray = ray
    self.num_slots = num_slots
    self._ledger = ledger.Ledger(num_slots)
    self._past = collections.Counter({'pool/nodes_lost': 0})
    count = min(num_nodes, num_slots)
    parts = [range(index, num_slots, count) for index in range(count)]
    self._nodes = [
        ray_node.Node(part, num_workers, spec, self._limits) for part in parts
    ]
    self._closed = False
    self._connected = _connect(ray)
    atexit.register(self.close)
    try:
      for node in self._nodes:
        node.start()
      for index, node in enumerate(self._nodes):
        if why := node.ready():
          raise pool.EnvStartError(f'Ray node {index}: {why}')
    except BaseException:
      self.close()
      raise

  def __enter__(self) -> RayPool:
    return self

  def __exit__(self, *unused_error: object) -> None:
    self.close()

  def reset(self, tasks: Mapping[int, types.Task]) -> pool.Answers:
    """Starts `tasks[slot]` in each slot named; answers in the same order."""
    return self._call({s: ledger.Job(task=task) for s, task in tasks.items()})

  def step(self, actions: Mapping[int, str]) -> pool.Answers:
    """Acts in each slot named; each must have an episode that goes on."""
    return self._call({s: ledger.Job(action=a) for s, a in actions.items()})

  def submit(self, acts: Mapping[int, types.Task | str]) -> None:
    """Asks each slot named to start a task or to act, without waiting."""
    self._open(
        {
            slot: ledger.Job(task=act)
            if isinstance(act, types.Task)
            else ledger.Job(action=act)
            for slot, act in acts.items()
        }
    )

  def poll(self, timeout_s: float = 0.0) -> pool.Answers:
    """Answers that have come; waits up to `timeout_s` for the first one."""
    self._check_open()
    until = time.monotonic() + timeout_s
    with self._closing():
      while True:
        self._serve(0.0 if self._ledger.answers else until - time.monotonic())
        if self._ledger.answers or time.monotonic() >= until:
          return self._ledger.take()

  def prefetch(self, tasks: Iterable[types.Task]) -> None:
    """Lets idle workers load tasks that `reset` will name soon."""
    tasks = tuple(dict.fromkeys(tasks))
    if not self._closed and tasks:
      for node in self._nodes:
        node.actor.prefetch.remote(tasks)

  def close(self) -> None:
    """Ends all actors, and Ray if this pool started it. Safe to repeat."""
    if self._closed:
      return
    self._closed = True
    atexit.unregister(self.close)
    if not self._ray.is_initialized():
      return  # Ray has ended, and its actors with it.
    actors = [node.actor for node in self._nodes if node.actor is not None]
    closing = [actor.close.remote() for actor in actors]
    deadline = time.monotonic() + _CLOSE_SECONDS
    try:
      while closing and (left := deadline - time.monotonic()) > 0:
        _, closing = self._ray.wait(closing, timeout=left)
    finally:
      for actor in actors:
        self._ray.kill(actor)
      if self._connected:
        self._ray.shutdown()

  @property
  def metrics(self) -> types.Metrics:
    """Those of `EnvPool` over all nodes, and 'pool/nodes_lost'."""
    total = collections.Counter(self._past)
    memory = []
    for node in self._nodes:
      total.update(_events(node.metrics))
      names = [f'memory/worker_mb_{i}' for i in range(node.workers)]
      memory += [node.metrics.get(name, 0.0) for name in names]
    for name in _OWN_COUNTS:
      total[name] = self._ledger.counts[name.removeprefix('pool/')]
    return {name: float(n) for name, n in total.items()} | {
        f'memory/worker_mb_{i}': value for i, value in enumerate(memory)
    }

  @property
  def worker_pids(self) -> tuple[int | None, ...]:
    """Process id of each worker on its machine."""
    return tuple(pid for node in self._nodes for pid in node.pids)

  def worker_of(self, slot: int) -> int:
    """Number of the worker that a slot lives in."""
    index, local = slot % len(self._nodes), slot // len(self._nodes)
    before = sum(node.workers for node in self._nodes[:index])
    return before + local % self._nodes[index].workers

  def _call(self, jobs: dict[int, ledger.Job]) -> pool.Answers:
    self._open(jobs)
    with self._closing():
      while self._ledger.waiting(jobs):
        self._serve(ray_node.LONGEST_SECONDS)
    return self._ledger.take(jobs)

  def _open(self, jobs: dict[int, ledger.Job]) -> None:
    self._check_open()
    self._ledger.open(jobs)
    for slot, job in jobs.items():
      node = self._nodes[slot % len(self._nodes)]
      node.outbox[node.slots.index(slot)] = job.task or job.action
    with self._closing():
      for node in sorted(self._nodes, key=lambda n: n.opening is not None):
        self._send(node)

  def _check_open(self) -> None:
    if self._closed:
      raise RuntimeError('the RayPool is closed')

  @contextlib.contextmanager
  def _closing(self) -> Iterator[None]:
    """Closes the pool on an error: with answers under way, no later call
    could be trusted."""
    try:
      yield
    except BaseException:
      self.close()
      raise

  def _send(self, node: ray_node.Node) -> None:
    """Sends what a node was not sent yet; it has one call at a time."""
    for slot in self._ledger.cut_off(node.slots):
      node.outbox.pop(node.slots.index(slot), None)
      message = 'the episode was lost with its Ray actor'
      self._ledger.fail(slot, types.ENV_ERROR, message)
    if node.under_way is not None or not self._ledger.waiting(node.slots):
      return
    if why := node.ready():
      self._lose(node, f'cannot start: {why}')
    else:
      node.send()

  def _serve(self, timeout_s: float) -> None:
    """Gathers what comes first, or gives up nodes that are late."""
    busy = {n.under_way: n for n in self._nodes if n.under_way is not None}
    if not busy:
      return
    left = min(node.late for node in busy.values()) - time.monotonic()
    seconds = max(0.0, min(timeout_s, left, ray_node.LONGEST_SECONDS))
    done, waiting = self._ray.wait(list(busy), timeout=seconds)
    for ref in done:
      self._gather(busy[ref])
    for ref in waiting:
      if time.monotonic() > busy[ref].late:
        self._lose(busy[ref], 'it hangs, or cannot be reached')
    for node in self._nodes:
      self._send(node)

  def _gather(self, node: ray_node.Node) -> None:
    try:
      answers = node.take()
    except self._ray.exceptions.RayError as error:
      self._lose(node, ray_node.reason(error))
      return
    for slot, answer in answers.items():
      if isinstance(answer, pool.EnvFailure):
        self._ledger.fail(slot, answer.kind, answer.message)
      else:
        self._ledger.answer(slot, answer)

  def _lose(self, node: ray_node.Node, why: str) -> None:
    """Fails the slots of an actor, and asks for another one."""
    message = f'the Ray actor of {len(node.slots)} envs is lost: {why}'
    logging.warning('RayPool: %s', message)
    self._past.update(_events(node.metrics))
    self._past['pool/nodes_lost'] += 1
    for slot in self._ledger.waiting(node.slots):
      self._ledger.fail(slot, types.ENV_ERROR, message)
    self._ledger.lose(node.slots)
    self._ray.kill(node.actor)
    node.start()


def _events(metrics: types.Metrics) -> dict[str, float]:
  """What is counted, of a pool's metrics."""
  return {
      name: value
      for name, value in metrics.items()
      if not name.startswith('memory/') and name not in _OWN_COUNTS
  }


def _connect(ray: Any) -> bool:
  """Connects to a cluster; whether this process was not connected before."""
  if ray.is_initialized():
    return False
  # Ray has its own idea of SIGTERM; the program decides what it means.
  handler = signal.getsignal(signal.SIGTERM)
  ray.init(logging_level='warning')
  if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGTERM, handler)
  return True
