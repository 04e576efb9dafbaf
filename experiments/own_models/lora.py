"""LoRA: of a frozen network only the adapters are trained, kept and sent."""

import digits
import jax
import jax.numpy as jnp
import optax

import jdist
from jdist import training

RANK = 4


def init(key: jax.Array) -> dict[str, dict[str, jax.Array]]:
  keys = jax.random.split(key, 3)
  return {
    "base": {
      "w1": jax.random.normal(keys[0], (64, 128)) / 8,
      "w2": jax.random.normal(keys[1], (128, digits.CLASSES)) / 11,
    },
    "adapters": {
      "a1": jax.random.normal(keys[2], (64, RANK)) / 8,
      "b1": jnp.zeros((RANK, 128)),
      "w2": jnp.zeros((128, digits.CLASSES)),
    },
  }


def model(params, image: jax.Array) -> jax.Array:
  base, own = params["base"], params["adapters"]
  x = image.reshape(len(image), -1)
  x = jax.nn.relu(x @ base["w1"] + x @ own["a1"] @ own["b1"])
  return x @ (base["w2"] + own["w2"])


def main(num_steps: int = 60) -> tuple[float, float]:
  workers = jdist.workers(digits.NUM_WORKERS)
  optimizer = optax.partition(
    {
      "train": jdist.diloco(optax.adam(1e-2), 5, axis=workers.axis),
      "freeze": optax.set_to_zero(),
    },
    {"base": "freeze", "adapters": "train"},
  )

  def loss_fn(params, model_state, batch, key):  # One worker's.
    losses = optax.softmax_cross_entropy_with_integer_labels(
      model(params, batch["image"]), batch["label"]
    )
    return losses.mean(), (model_state, {})

  step = training.make_step(loss_fn, optimizer, axis=workers.axis)
  params = init(jax.random.key(0))
  state = training.init_state(workers, optimizer, params)
  trainer = training.Trainer(workers, step)
  state, records = trainer.fit(state, digits.batches(), num_steps)
  found = workers.view(jdist.anchor(state.opt_state, state.params))
  assert (found["base"]["w1"] == params["base"]["w1"]).all()
  image, label = digits.held_out()
  sent = records[-1].sent_bytes
  return digits.report("LoRA", model(found, image), label, sent), sent


if __name__ == "__main__":
  main()
