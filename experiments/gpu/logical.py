"""Times logical workers of one device by every way of running their gradients.

    python experiments/gpu/logical.py [--models cnn] [--ways vmap looped]

Eight workers share a batch.  The unit is one worker with the whole batch and
its optimizer alone: a speed of 1 costs nothing.  Updates are always under
`vmap`; the gradients are

- `vmap`: batched, as `jdist.workers(8)` does it;
- `looped`: one after the other in a loop (`jax.custom_batching`);
- `unrolled`: one after the other without a loop;
- `groups`: two groups of four, one after the other.
"""

import argparse
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))

import jdist
from jdist import models, training

_RESULTS = pathlib.Path(__file__).resolve().parent / "results"

_WORKERS, _GROUP = 8, 4
_STEPS, _BLOCKS = 8, 5
# The shape of an example, the whole batch, the dtype of computation, the ways.
MODELS = {
  "cnn": (
    (32, 32, 3), 2048, jnp.float32, ("vmap", "looped", "unrolled", "groups"),
  ),
  "mlp": ((28, 28, 1), 2048, jnp.float32, ("vmap", "looped")),
  "resnet18": ((32, 32, 3), 512, jnp.bfloat16, ("vmap", "looped", "groups")),
  "transformer": ((256,), 64, jnp.bfloat16, ("vmap",)),
}  # fmt: skip


def by_way(function, way):
  """Returns a function whose batches of workers are computed in a way."""
  if way == "vmap":
    return function
  if way == "looped":
    return jax.custom_batching.sequential_vmap(function)
  wrapped = jax.custom_batching.custom_vmap(function)

  @wrapped.def_vmap
  def _rule(size, batched, *arguments):
    def part(start, length):
      return jax.tree.map(
        lambda x, b: jax.lax.slice_in_dim(x, start, start + length) if b else x,
        arguments,
        tuple(batched),
      )

    length = 1 if way == "unrolled" else _GROUP
    axes = jax.tree.map(lambda b: 0 if b else None, tuple(batched))
    found = []
    for start in range(0, size, length):
      own = part(start, length)
      if length == 1:
        own = jax.tree.map(lambda x, b: x[0] if b else x, own, tuple(batched))
        found.append(jax.tree.map(lambda x: x[None], function(*own)))
      else:
        found.append(jax.vmap(function, axes)(*own))
    out = jax.tree.map(lambda *x: jnp.concatenate(x), *found)
    return out, jax.tree.map(lambda _: True, out)

  return wrapped


def _problem(name, workers):
  shape, whole, dtype, _ = MODELS[name]
  random = np.random.default_rng(0)
  lead = (workers, whole // workers)
  if name == "transformer":
    model = models.build(
      name, input_shape=shape, num_classes=256, seed=0,
      num_layers=6, width=512, num_heads=8,
    )  # fmt: skip
    tokens = random.integers(0, 256, (*lead, *shape)).astype(np.int32)
    loss = training.classification_loss(model.apply, compute_dtype=dtype)
    return model, loss, {"tokens": tokens, "targets": tokens}
  model = models.build(name, input_shape=shape, num_classes=10, seed=0)
  loss = training.classification_loss(model.apply, compute_dtype=dtype)
  return model, loss, {
    "image": random.normal(size=(*lead, *shape)).astype(np.float32),
    "label": random.integers(0, 10, lead).astype(np.int32),
  }  # fmt: skip


def seconds_of(name, way):
  """Returns the seconds of a step, and of compiling it."""
  workers = 1 if way == "alone" else _WORKERS
  model, loss, batch = _problem(name, workers)
  inner = optax.sgd(0.01, momentum=0.9, nesterov=True)
  key = jax.random.key(0)

  def gradient(params, state, batch):
    return jax.value_and_grad(
      lambda params: loss(params, state, batch, key), has_aux=True
    )(params)

  if workers == 1:
    chain, (params, state) = inner, (model.params, model.state)
    params, state = jax.tree.map(jnp.array, (params, state))
    batch = jax.tree.map(lambda x: jnp.asarray(x[0]), batch)
    opt_state, jit = chain.init(params), jax.jit
  else:
    team = jdist.workers(workers, substrate="vmap")
    chain = jdist.local_sgd(inner, 8, axis=team.axis)
    params, state = team.replicate((model.params, model.state))
    opt_state, batch = team.jit(chain.init)(params), team.place(batch)
    gradient, jit = by_way(gradient, way), team.jit

  def step(params, opt_state, state, batch):
    (value, (state, _)), gradients = gradient(params, state, batch)
    if workers == 1:
      updates, opt_state = chain.update(gradients, opt_state, params)
      params = optax.apply_updates(params, updates)
    else:
      updates, opt_state = chain.update(
        gradients, opt_state, params, loss=value
      )
      params = jdist.apply_updates(params, updates, opt_state)
    return params, opt_state, state

  started = time.perf_counter()
  program = jit(step, donate_argnums=(0, 1, 2))
  program = program.lower(params, opt_state, state, batch).compile()
  compiled_s = time.perf_counter() - started
  carried, times = (params, opt_state, state), []
  for _ in range(_BLOCKS + 1):  # The first block warms up.
    started = time.perf_counter()
    for _ in range(_STEPS):
      carried = program(*carried, batch)
    jax.block_until_ready(carried)
    times.append((time.perf_counter() - started) / _STEPS)
  return statistics.median(times[1:]), compiled_s


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--models", nargs="+", default=list(MODELS),
                      choices=list(MODELS))  # fmt: skip
  parser.add_argument("--ways", nargs="+")
  parser.add_argument("--output", default=_RESULTS / "logical.jsonl")
  options = parser.parse_args()
  for name in options.models:
    alone_s, _ = seconds_of(name, "alone")
    _, whole, dtype, ways = MODELS[name]
    for way in options.ways or ways:
      step_s, compiled_s = seconds_of(name, way)
      row = training.make_row(
        {"model": name, "batch": whole, "dtype": jnp.dtype(dtype).name,
         "workers": _WORKERS, "way": way}, 0,
        part="logical", step_ms=1e3 * step_s, alone_ms=1e3 * alone_s,
        speed=alone_s / step_s, compiled_s=compiled_s,
      )  # fmt: skip
      training.append_rows(options.output, [row])
      print(f"{name} {way}: {1e3 * step_s:.2f} ms, speed {row['speed']:.3f}, "
            f"compiled in {compiled_s:.0f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
  main()
