"""Plain functions and a loop of one's own, with DiLoCo in four bits."""

import digits
import jax
import jax.numpy as jnp
import optax

import jdist
from jdist import codecs, collectives, reducers


def init(key: jax.Array) -> dict[str, jax.Array]:
  first, last = jax.random.split(key)
  return {
    "w1": jax.random.normal(first, (64, 64)) / 8,
    "b1": jnp.zeros(64),
    "w2": jax.random.normal(last, (64, digits.CLASSES)) / 8,
  }


def model(params: dict[str, jax.Array], image: jax.Array) -> jax.Array:
  hidden = image.reshape(len(image), -1) @ params["w1"] + params["b1"]
  return jax.nn.relu(hidden) @ params["w2"]


def main(num_steps: int = 150) -> float:
  workers = jdist.workers(digits.NUM_WORKERS)
  four_bits = jdist.Compression(codecs.Quantize(4), reducers.ErrorFeedback())
  optimizer = jdist.diloco(
    optax.adam(3e-3), 10, axis=workers.axis, compression=four_bits
  )

  def step(params, state, batch):  # One worker's.
    def loss_fn(params):
      logits = model(params, batch["image"])
      losses = optax.softmax_cross_entropy_with_integer_labels(
        logits, batch["label"]
      )
      return losses.mean()

    grads = jax.grad(loss_fn)(params)
    updates, state = optimizer.update(grads, state, params)
    return jdist.apply_updates(params, updates, state), state

  train = workers.jit(step, donate_argnums=(0, 1))
  params = workers.replicate(init(jax.random.key(0)))
  state = workers.jit(optimizer.init)(params)
  batches = digits.batches()(0)
  first = next(batches)
  one = jax.tree.map(lambda x: x[0], (params, state, workers.place(first)))
  traffic = collectives.traffic(
    step, *one, axis=workers.axis, num_workers=workers.num_workers
  )
  for _ in range(num_steps):
    params, state = train(params, state, workers.place(next(batches)))
  found = workers.view(jdist.anchor(state, params))
  image, label = digits.held_out()
  sent = traffic.sent_bytes(num_steps, num_steps // 10)
  return digits.report("plain functions", model(found, image), label, sent)


if __name__ == "__main__":
  main()
