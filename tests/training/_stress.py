"""Trains a convolutional model on 8 virtual CPU devices for many steps.

    python -m tests.training._stress STEPS [IN_FLIGHT]

With IN_FLIGHT the loop of jdist is bypassed: so many steps are dispatched
before one is waited for.
"""

import sys
import time

import jax
import optax

from jdist import collectives, data, methods, models, training


def main(steps, in_flight):
  team = collectives.workers(8)
  assert (team.substrate, len(jax.devices())) == ("shard_map", 8)
  digits = data.load("digits")
  model = models.build("cnn", input_shape=digits.input_shape, num_classes=10)
  optimizer = methods.ssgd(optax.sgd(0.02, momentum=0.9), axis=team.axis)
  loss = training.classification_loss(model.apply, normalize=digits.normalize)
  step = training.make_step(loss, optimizer, axis=team.axis)
  state = training.init_state(team, optimizer, model.params)
  batches = data.Batches(digits, 8, 2, seed=0)
  start_s = time.monotonic()
  if in_flight:
    program = team.jit(step, donate_argnums=0)
    flying = []
    for number in range(steps):
      state, metrics = program(state, team.place(batches[number]))
      flying.append(metrics["loss"])
      if len(flying) > in_flight:
        flying.pop(0).block_until_ready()
    last = flying[-1].mean().item()
  else:
    trainer = training.Trainer(team, step, timeout_s=120.0)
    state, records = trainer.fit(state, batches.iterate, steps)
    last = records[-1].train_loss
  took_s = time.monotonic() - start_s
  print(f"ended {steps} steps in {took_s:.1f} s, loss {last:.4f}", flush=True)


if __name__ == "__main__":
  main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
