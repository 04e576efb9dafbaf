"""Two workers of four devices each: a worker is itself sharded (FSDP)."""

import digits
import functions
import jax
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jdist
from jdist import collectives, training

SPECS = {"w1": P(None, "fsdp"), "b1": P("fsdp"), "w2": P("fsdp", None)}


def train(workers, specs, num_steps: int):
  """Trains with or without shards; returns the anchor and the bytes sent."""
  optimizer = jdist.diloco(optax.sgd(0.05, momentum=0.9), 5, axis=workers.axis)

  def loss_fn(params, model_state, batch, key):  # One worker's.
    losses = optax.softmax_cross_entropy_with_integer_labels(
      functions.model(params, batch["image"]), batch["label"]
    )
    return losses.mean(), (model_state, {})

  step = training.make_step(loss_fn, optimizer, axis=workers.axis)
  params = functions.init(jax.random.key(0))
  state = training.init_state(workers, optimizer, params, specs=specs)

  def batches(start):
    for batch in digits.batches()(start):
      yield jax.tree.map(lambda x: x[: workers.num_workers], batch)

  trainer = training.Trainer(workers, step)
  state, records = trainer.fit(state, batches, num_steps)
  anchor = jdist.anchor(state.opt_state, state.params)
  return workers.view(anchor), records[-1].sent_bytes


def main(num_steps: int = 60) -> tuple[float, float]:
  collectives.make_cpu_devices(8)
  mesh = jax.make_mesh((2, 4), ("worker", "fsdp"))
  found, sent = train(jdist.workers(2, mesh=mesh), SPECS, num_steps)
  whole, _ = train(jdist.workers(2), None, num_steps)
  apart = max(float(abs(found[k] - np.asarray(whole[k])).max()) for k in found)
  image, label = digits.held_out()
  logits = functions.model(found, image)
  accuracy = digits.report("FSDP, 2 workers", logits, label, sent)
  print(f"at most {apart:.0e} from workers that are not sharded")
  return accuracy, apart


if __name__ == "__main__":
  main()
