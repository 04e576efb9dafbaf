"""Runs a table of optimizers for some steps and saves the bits they end with.

    python harness.py TABLE OUT.npz

`TABLE` is a file with `CASES`, from a name to `axis -> optimizer`, and `CUT`,
`PREDICTOR` for what needs them.  It uses nothing of jdist but what stays: the
runner, Optax's interface, `apply_updates`, `anchor` and the trainer.
"""

import importlib.util
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np

import jdist
from jdist import collectives, training

STEPS = 30
WORKERS = (3, 8)
# Two layers whose leaves are larger than a codec's block, and a scalar.
SHAPES = {"a": (12, 40), "b": (40,), "c": (40, 5), "d": ()}


def params(dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(7), len(SHAPES))
  return {
    name: (0.3 * jax.random.normal(key, shape)).astype(dtype)
    for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
  }


def loss_of(w, x, y):
  w = jax.tree.map(lambda v: v.astype(jnp.float32), w)
  hidden = jnp.tanh(x @ w["a"] + w["b"])
  return jnp.mean((hidden @ w["c"] + w["d"] - y) ** 2)


def batch(step, num_workers):
  rng = np.random.default_rng(step)
  x = rng.normal(size=(num_workers, 16, 12)).astype(np.float32)
  shift = np.arange(num_workers, dtype=np.float32)[:, None, None] / 8
  y = np.tanh(x[..., :5] + shift) + shift
  return x, y.astype(np.float32)


def run(optimizer, workers, dtype):
  w = workers.replicate(params(dtype))
  state = workers.jit(optimizer.init)(w)

  def step(w, state, x, y):
    loss, grads = jax.value_and_grad(loss_of)(w, x, y)
    updates, state = optimizer.update(grads, state, w, loss=loss)
    return jdist.apply_updates(w, updates, state), state

  program = workers.jit(step)
  for t in range(STEPS):
    w, state = program(
      w, state, *map(workers.place, batch(t, workers.num_workers))
    )
  return w, workers.jit(lambda s, w: jdist.anchor(s, w))(state, w)


def fit(optimizer, workers, options):
  """The same through the trainer, which chooses programs."""

  def loss_fn(w, model_state, data, key):
    del key
    return loss_of(w, data["x"], data["y"]), (model_state, {})

  def batches(start):
    for t in range(start, STEPS):
      x, y = batch(t, workers.num_workers)
      yield {"x": x, "y": y}

  step = training.make_step(loss_fn, optimizer, axis=workers.axis)
  trainer = training.Trainer(workers, step, **options)
  state = training.init_state(workers, optimizer, params())
  state, _ = trainer.fit(state, batches, STEPS)
  view = workers.jit(lambda s, w: jdist.anchor(s, w))
  return state.params, view(state.opt_state, state.params)


def main(table, out):
  collectives.make_cpu_devices(8)
  spec = importlib.util.spec_from_file_location("cases", table)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  found = {}
  for num_workers in WORKERS:
    workers = jdist.workers(num_workers)
    for name, make in module.CASES.items():
      dtype = jnp.bfloat16 if "bfloat16" in name else jnp.float32
      options = module.FITTED.get(name)
      try:
        optimizer = make(workers.axis)
        if options is None:
          ends = run(optimizer, workers, dtype)
        else:
          ends = fit(optimizer, workers, options)
      except (TypeError, ValueError, AttributeError, AssertionError) as error:
        # What is missing shows in the comparison.
        print(f"{name} with {num_workers} workers: {error!r}", file=sys.stderr)
        continue
      for which, tree in zip(("params", "anchor"), ends, strict=True):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
          key = f"{name}|{num_workers}|{which}|{jax.tree_util.keystr(path)}"
          found[key] = np.asarray(workers.gather(leaf)).astype(np.float32)
  np.savez(pathlib.Path(out), **found)


if __name__ == "__main__":
  main(*sys.argv[1:])
