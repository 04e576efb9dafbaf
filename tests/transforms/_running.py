"""Running a transformation on every substrate, all workers' arrays kept.

Gradients are elementwise, `w - x`, with other targets x on every worker in
every step, so that a test reads the collectives of the transformation and no
others.  One leaf is float32 and one bfloat16.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jdist import collectives, transforms

NUM_STEPS = 30
NUM_WORKERS = 8
PARAMS = {
  "a": np.linspace(-1.0, 1.0, 4, dtype=np.float32),
  "b": {"c": np.ones((2, 2), jnp.bfloat16)},
}


def targets(num_workers):
  """Targets [steps, workers, ...] and losses [steps, workers]."""
  random = np.random.default_rng(0)

  def one(like):
    shape = (NUM_STEPS, num_workers, *like.shape)
    return random.normal(size=shape).astype(like.dtype)

  fall = np.exp(-np.arange(NUM_STEPS) / 8)[:, None]
  noise = random.uniform(0.7, 1.3, (NUM_STEPS, num_workers))
  losses = (4 * fall * noise).astype(np.float32)
  return jax.tree.map(one, PARAMS), losses


def make_step(optimizer, traces=None):
  """What one worker does; appends to `traces` whenever it is traced."""

  def step(params, state, target, loss):
    if traces is not None:
      traces.append(1)
    gradients = jax.tree.map(lambda p, x: p - x.astype(p.dtype), params, target)
    updates, state = optimizer.update(gradients, state, params, loss=loss)
    return transforms.apply_updates(params, updates, state), state

  return step


@functools.cache
def team(substrate):
  """Eight workers everywhere, except on the (2, 2) mesh."""
  if substrate == "mixed":  # Two workers on each of four devices.
    mesh = collectives.make_mesh((4,), ("worker",))
    return collectives.workers(NUM_WORKERS, mesh=mesh)
  if substrate == "mesh":  # Two workers of two devices each.
    mesh = collectives.make_mesh((2, 2), ("worker", "fsdp"))
    return collectives.workers(2, mesh=mesh)
  if substrate == "none":
    return collectives.workers(1, substrate="none")
  if substrate == "two":
    return collectives.workers(2, substrate="vmap")
  return collectives.workers(NUM_WORKERS, substrate=substrate)


@dataclasses.dataclass
class Run:
  """A run, with all workers' arrays [workers, ...] after every step."""

  params: list[Any]
  states: list[Any]
  donated: bool


def copied(tree):
  # A NumPy view of a buffer that is donated next would change under us.
  return jax.tree.map(lambda x: np.array(x, copy=True), tree)


class Runner:
  """One compiled step, for any data."""

  def __init__(self, optimizer, workers, dtype=None, bound=False):
    self.optimizer, self.workers, self.dtype = optimizer, workers, dtype
    self.bound = bound
    self.traces = []
    step = make_step(optimizer, self.traces)
    self.step = workers.jit(step, donate_argnums=(0, 1))

  def begin(self):
    """Parameters and state of all workers, placed without a program."""
    params = jax.tree.map(lambda x: jnp.asarray(x, self.dtype), PARAMS)
    if self.bound:
      state = init_among(self.optimizer, self.workers, params)
    else:
      state = self.optimizer.init(params)
    return self.place((params, state))

  def place(self, tree):
    mesh = self.workers.mesh
    inner = () if mesh is None else mesh.axis_names[1:]

    def one(x):
      # What looks like a parameter, or a row of them, is sharded like one.
      spec = PartitionSpec()
      for shape in [p.shape for p in jax.tree.leaves(PARAMS)]:
        rest = x.ndim - len(shape)
        if rest in (0, 1) and x.shape[rest:] == shape:
          spec = PartitionSpec(*[None] * rest, *inner)
      rows = np.broadcast_to(x, (self.workers.num_workers, *x.shape))
      return jax.device_put(rows.copy(), self.workers.sharding(spec))

    return jax.tree.map(one, tree)

  def run(self, steps, step=None):
    """Takes a step on each of the placed data."""
    step = step or self.step
    params, state = self.begin()
    record = Run([], [], True)
    for data in steps:
      # A flag that is only written is no argument of the program.
      old = [x for x in jax.tree.leaves((params, state)) if x.ndim > 1]
      params, state = step(params, state, *data)
      record.params.append(copied(params))
      record.states.append(copied(state))
      record.donated &= all(x.is_deleted() for x in old)
    return record

  def compile(self):
    """The step as a program that can be read, and run."""
    data = self.workers.place(at(0, targets(self.workers.num_workers)))
    return self.step.lower(*self.begin(), *data).compile()


@functools.cache
def placed(substrate, equal=False):
  """The data of every step on a substrate's devices, which no run donates.

  Each worker has its own, or all have those of one worker alone.
  """
  workers = team(substrate)
  data = targets(1 if equal else workers.num_workers)
  if equal:
    data = jax.tree.map(lambda x: np.repeat(x, workers.num_workers, 1), data)
  return [workers.place(at(t, data)) for t in range(NUM_STEPS)]


def init_among(optimizer, workers, params):
  """One worker's first state, where the number of workers is known."""
  init = jax.jit(workers.spmd(optimizer.init))
  return jax.tree.map(lambda x: x[0], init(workers.replicate(params)))


def at(t, data):
  return jax.tree.map(lambda x: x[t], data)
