"""Averages of gradients by a compression, step by step."""

import jax
import numpy as np

from jdist import collectives, reducers, transforms
from tests.transforms import _running


def gradients(num_steps, num_workers=4, size=5, dtype=np.float32):
  """[steps, workers, ...] of two leaves, in eighths."""
  random = np.random.default_rng(0)

  def one(*shape):
    x = random.integers(-40, 40, (num_steps, num_workers, *shape))
    return (x / 8).astype(dtype)

  return {"a": one(size), "b": one(2, 3)}


def run(transform, xs, substrate="vmap"):
  """Outputs and states after every step, arrays [steps, workers, ...]."""
  num_steps, num_workers = jax.tree.leaves(xs)[0].shape[:2]
  if substrate == "none":
    team = collectives.workers(1, substrate="none")
  else:
    team = collectives.workers(num_workers, substrate=substrate)
  optimizer = transform(team.axis)
  like = team.place(jax.tree.map(lambda x: x[0], xs))
  state = team.jit(optimizer.init)(like)

  @team.jit
  def step(x, state):
    return optimizer.update(x, state)

  outputs, states = [], []
  for t in range(num_steps):
    output, state = step(team.place(_running.at(t, xs)), state)
    outputs.append(output)
    states.append(state)
  stack = lambda *x: np.stack(x)  # noqa: E731
  return jax.tree.map(stack, *outputs), jax.tree.map(stack, *states)


def average(*what, **others):
  """Of an axis makes the average of gradients by this compression."""
  compression = reducers.Compression(*what, **others)
  return lambda axis: transforms.average_gradients(axis, compression)
