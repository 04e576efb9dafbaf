"""Local steps on data of one's own, for every worker."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdist


def train(
  optimizer, targets, losses=None, *, start=0.0, apply=jdist.apply_updates
):
  """Runs all steps for all workers: targets [steps, workers, ...].

  Returns:
    The parameters and states after every step, arrays [steps, workers, ...].
  """
  steps, num_workers = targets.shape[:2]
  if losses is None:
    losses = np.ones((steps, num_workers), np.float32)

  def one(params, xs, losses):
    def body(carry, data):
      params, state = carry
      x, loss = data
      gradient = params - x.astype(params.dtype)
      updates, state = optimizer.update(gradient, state, params, loss=loss)
      carry = apply(params, updates, state), state
      return carry, carry

    return jax.lax.scan(body, (params, optimizer.init(params)), (xs, losses))[1]

  params = jnp.full(targets.shape[2:], start, targets.dtype)
  mapped = jax.vmap(one, (None, 1, 1), 1, axis_name="worker")
  return jax.jit(mapped)(params, targets, losses)


def plain_apply(params, updates, state):
  del state
  return optax.apply_updates(params, updates)


def random_targets(steps=14, num_workers=4, *shape):
  random = np.random.default_rng(1)
  return random.normal(size=(steps, num_workers, *shape)).astype(np.float32)
