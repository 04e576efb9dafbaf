"""Equinox: its modules hold functions, too, which are no parameters."""

import digits
import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import jdist
from jdist import training


def main(num_steps: int = 60) -> float:
  workers = jdist.workers(digits.NUM_WORKERS)
  optimizer = jdist.diloco(optax.adam(3e-3), 5, axis=workers.axis)
  model = eqx.nn.MLP(64, digits.CLASSES, 64, 1, key=jax.random.key(0))
  params, static = eqx.partition(model, eqx.is_inexact_array)

  def logits_of(params, image):
    model = eqx.combine(params, static)
    return jax.vmap(model)(image.reshape(len(image), -1))

  def loss_fn(params, model_state, batch, key):  # One worker's.
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits_of(params, batch["image"]), batch["label"]
    )
    return losses.mean(), (model_state, {})

  step = training.make_step(loss_fn, optimizer, axis=workers.axis)
  state = training.init_state(workers, optimizer, params)
  trainer = training.Trainer(workers, step)
  state, records = trainer.fit(state, digits.batches(), num_steps)
  anchor = workers.view(jdist.anchor(state.opt_state, state.params))
  image, label = digits.held_out()
  logits = logits_of(anchor, jnp.asarray(image))
  return digits.report("Equinox", logits, label, records[-1].sent_bytes)


if __name__ == "__main__":
  main()
