"""Flax Linen with batch normalization and dropout, in the trainer."""

import digits
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jdist
from jdist import training


class Network(nn.Module):
  """Convolution, batch normalization, dropout."""

  @nn.compact
  def __call__(self, image: jax.Array, *, train: bool) -> jax.Array:
    """Returns the logits."""
    x = nn.Conv(16, (3, 3))(image)
    x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
    x = nn.Dropout(0.2, deterministic=not train)(x.reshape(len(x), -1))
    return nn.Dense(digits.CLASSES)(x)


def main(num_steps: int = 60) -> float:
  workers = jdist.workers(digits.NUM_WORKERS)
  network = Network()
  optimizer = jdist.local_sgd(optax.adam(3e-3), 5, axis=workers.axis)

  def loss_fn(params, model_state, batch, key):  # One worker's.
    logits, model_state = network.apply(
      {"params": params} | model_state,
      batch["image"],
      train=True,
      mutable=["batch_stats"],
      rngs={"dropout": key},
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits, batch["label"]
    )
    return losses.mean(), (model_state, {})

  shape = jnp.zeros((1, 8, 8, 1))
  variables = network.init(jax.random.key(0), shape, train=False)
  step = training.make_step(loss_fn, optimizer, axis=workers.axis)
  trainer = training.Trainer(workers, step)
  state = training.init_state(
    workers,
    optimizer,
    variables["params"],
    {"batch_stats": variables["batch_stats"]},
  )
  # Batch statistics are averaged with the parameters, when a round ends.
  state, records = trainer.fit(state, digits.batches(), num_steps)
  params = workers.view(jdist.anchor(state.opt_state, state.params))
  model_state = workers.view(state.model_state)
  image, label = digits.held_out()
  logits = network.apply({"params": params} | model_state, image, train=False)
  return digits.report("Linen", logits, label, records[-1].sent_bytes)


if __name__ == "__main__":
  main()
