"""Measures the cost of SSGD in jdist over the same step written by hand.

    python scripts/bench_step.py [--model cnn] [--workers 8] [--blocks 30]

Compiles both for the same devices and prints, and appends to a file of rows:
the collectives (count and bytes) of both programs, their memory, and the
ratio of step times, measured in pairs of blocks that alternate, beside the
ratio of the hand-written step to itself, which is the noise of the machine.
"""

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import jdist
from jdist import models, profiling, training

_IMAGE = (32, 32, 3)
# Those of images.
_MODELS = tuple(name for name in models.MODELS if name != "transformer")


def _loss(apply, params, model_state, images, labels):
  logits, model_state = apply(params, model_state, images, train=True)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  return losses.mean(), model_state


def by_hand(model, optimizer, mesh):
  """The step that one would write without jdist: parameters replicated."""

  def step(params, opt_state, images, labels):
    local = jax.lax.pcast(params, "worker", to="varying")
    (loss, _), grads = jax.value_and_grad(
      lambda p: _loss(model.apply, p, model.state, images, labels),
      has_aux=True,
    )(local)
    grads = jax.lax.pmean(grads, "worker")
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss[None]

  everywhere, split = PartitionSpec(), PartitionSpec("worker")
  return jax.jit(
    jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(everywhere, everywhere, split, split),
      out_specs=(everywhere, everywhere, split),
    ),
    donate_argnums=(0, 1),
  )


def with_jdist(model, optimizer, workers):
  """The same with `jdist.ssgd` in a loop of one's own."""
  chain = jdist.ssgd(optimizer, axis=workers.axis)

  def step(params, opt_state, images, labels):
    (loss, _), grads = jax.value_and_grad(
      lambda p: _loss(model.apply, p, model.state, images, labels),
      has_aux=True,
    )(params)
    updates, opt_state = chain.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  return chain, workers.jit(step, donate_argnums=(0, 1))


class Runner:
  """A compiled step with its own state, stepped in blocks."""

  def __init__(self, jitted, state, batch):
    self.compiled = jitted.lower(*state, *batch).compile()
    self.state, self.batch = state, batch

  def block(self, steps):
    """Seconds per step over so many steps."""
    start = time.perf_counter()
    for _ in range(steps):
      *state, loss = self.compiled(*self.state, *self.batch)
      self.state = tuple(state)
      jax.block_until_ready(loss)  # One step in flight, as on a busy CPU.
    return (time.perf_counter() - start) / steps

  @property
  def peak_bytes(self):
    """Bytes a device needs at once: arguments, results and temporaries."""
    told = self.compiled.memory_analysis()
    return (
      told.argument_size_in_bytes
      + told.output_size_in_bytes
      - told.alias_size_in_bytes
      + told.temp_size_in_bytes
    )


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--model", default="cnn", choices=_MODELS)
  parser.add_argument("--workers", type=int, default=8)
  parser.add_argument("--batch-size", type=int, default=32, help="per worker")
  parser.add_argument("--blocks", type=int, default=30)
  parser.add_argument("--steps", type=int, default=8, help="per block")
  parser.add_argument("--rows", help="file of rows to append to")
  options = parser.parse_args()

  workers = jdist.workers(options.workers, substrate="shard_map")
  mesh = workers.mesh
  model = models.build(
    options.model, input_shape=_IMAGE, num_classes=10, seed=0
  )
  optimizer = optax.sgd(0.01, momentum=0.9, nesterov=True)
  random = np.random.default_rng(0)
  shape = (options.workers, options.batch_size)
  images = random.normal(size=(*shape, *_IMAGE)).astype(np.float32)
  labels = random.integers(10, size=shape).astype(np.int32)

  def hand():
    everywhere = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("worker"))
    state = jax.device_put(
      jax.tree.map(jnp.array, (model.params, optimizer.init(model.params))),
      everywhere,
    )
    batch = jax.device_put(
      (images.reshape(-1, *_IMAGE), labels.reshape(-1)), split
    )
    return Runner(by_hand(model, optimizer, mesh), state, batch)

  def ours():
    chain, jitted = with_jdist(model, optimizer, workers)
    params = workers.replicate(model.params)
    state = (params, workers.jit(chain.init)(params))
    return Runner(jitted, state, workers.place((images, labels)))

  runners = {"hand": hand(), "hand again": hand(), "jdist": ours()}
  for runner in runners.values():
    runner.block(3)
  seconds = {name: [] for name in runners}
  names = list(runners)
  for block in range(options.blocks):
    # The order turns, so that no one is always measured after the same.
    for name in names[block % 3 :] + names[: block % 3]:
      seconds[name].append(runners[name].block(options.steps))

  def ratios(name):
    pairs = zip(seconds[name], seconds["hand"], strict=True)
    return [a / b for a, b in pairs]

  def quartiles(values):
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "quartiles": [low, high]}

  sent = {
    name: [
      (c.kind, c.payload_bytes)
      for c in profiling.read_collectives(runner.compiled)
    ]
    for name, runner in runners.items()
  }
  config = {k: v for k, v in vars(options).items() if k != "rows"}
  row = training.make_row(
    config,
    seed=0,
    collectives={name: sorted(sent[name]) for name in ("hand", "jdist")},
    same_collectives=sorted(sent["hand"]) == sorted(sent["jdist"]),
    peak_bytes={n: runners[n].peak_bytes for n in ("hand", "jdist")},
    step_ratio=quartiles(ratios("jdist")),
    noise_ratio=quartiles(ratios("hand again")),
    step_s={name: statistics.median(seconds[name]) for name in runners},
  )
  if options.rows:
    training.append_rows(options.rows, [row])
  print(json.dumps(row, indent=2))


if __name__ == "__main__":
  main()
