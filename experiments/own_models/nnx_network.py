"""Flax NNX with batch normalization, in a loop of one's own."""

import digits
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jdist
from jdist import training


class Network(nnx.Module):
  """Two layers with batch normalization."""

  def __init__(self, rngs: nnx.Rngs):
    self.first = nnx.Linear(64, 64, rngs=rngs)
    self.norm = nnx.BatchNorm(64, rngs=rngs)
    self.last = nnx.Linear(64, digits.CLASSES, rngs=rngs)

  def __call__(self, image: jax.Array) -> jax.Array:
    """Returns the logits."""
    x = self.norm(self.first(image.reshape(len(image), -1)))
    return self.last(nnx.relu(x))


def main(num_steps: int = 60) -> float:
  workers = jdist.workers(digits.NUM_WORKERS)
  optimizer = jdist.local_sgd(optax.adam(3e-3), 5, axis=workers.axis)
  graph, params, rest = nnx.split(Network(nnx.Rngs(0)), nnx.Param, ...)

  def step(params, rest, state, batch):  # One worker's.
    def loss_fn(params):
      model = nnx.merge(graph, params, rest, copy=True)
      losses = optax.softmax_cross_entropy_with_integer_labels(
        model(batch["image"]), batch["label"]
      )
      return losses.mean(), nnx.state(model, nnx.Not(nnx.Param))

    grads, rest_now = jax.grad(loss_fn, has_aux=True)(params)
    updates, state = optimizer.update(grads, state, params)
    params = jdist.apply_updates(params, updates, state)
    rest_now = training.synchronize_statistics(
      rest_now, state, axis=workers.axis
    )
    return params, rest_now, state

  train = workers.jit(step, donate_argnums=(0, 1, 2))
  params, rest = workers.replicate((params, rest))
  state = workers.jit(optimizer.init)(params)
  batches = digits.batches()(0)
  for _ in range(num_steps):
    batch = workers.place(next(batches))
    params, rest, state = train(params, rest, state, batch)
  evaluated = workers.jit(
    lambda *all_: jdist.evaluation_params(*all_, axis=workers.axis)
  )
  anchor, rest = workers.view(evaluated(state, params, rest))
  model = nnx.merge(graph, anchor, rest)
  model.eval()
  image, label = digits.held_out()
  size = sum(x.size for x in jax.tree.leaves((anchor, rest)))
  sent = num_steps // 5 * size * 4 * 2 * (digits.NUM_WORKERS - 1)
  sent /= digits.NUM_WORKERS  # An all-reduce in a ring.
  return digits.report("NNX", model(jnp.asarray(image)), label, sent)


if __name__ == "__main__":
  main()
