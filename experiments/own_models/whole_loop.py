"""A whole loop of one's own, in Flax NNX, from the first step to a resume.

It trains by DiLoCo in four bits, and has mixed precision, batch normalization,
dropout, clipping, a schedule, an average of the parameters (EMA), epochs that
are no multiple of the interval, a last batch of another size, evaluation, and
checkpoints:

    python experiments/own_models/whole_loop.py DIRECTORY
"""

import sys
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jdist
from jdist import codecs, collectives, reducers, training, transforms

CLASSES, FEATURES, SAMPLES = 10, 32, 1000  # The samples of one worker.
BATCH, INTERVAL, EPOCHS = 64, 10, 6
STEPS = -(-SAMPLES // BATCH)  # In an epoch: the last batch has 40 samples.
DECAY = 0.9


class Network(nnx.Module):
  """Two layers with batch normalization and dropout, computed in `dtype`."""

  def __init__(self, dtype, rngs: nnx.Rngs):
    # Normalization removes a bias, whose gradient would be rounding alone.
    self.first = nnx.Linear(
      FEATURES, 64, use_bias=False, dtype=dtype, rngs=rngs
    )
    self.norm = nnx.BatchNorm(64, dtype=dtype, rngs=rngs)
    self.drop = nnx.Dropout(0.1, rngs=rngs)
    self.last = nnx.Linear(64, CLASSES, dtype=dtype, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns the logits."""
    return self.last(self.drop(nnx.relu(self.norm(self.first(x)))))


def samples(num_workers: int) -> tuple[dict, dict]:
  """Returns the workers' samples `[workers, n, ...]`, and those of a test."""
  rng = np.random.default_rng(0)
  teacher = rng.normal(size=(FEATURES, CLASSES))
  x = rng.normal(size=(num_workers + 1, SAMPLES, FEATURES)).astype(np.float32)
  label = np.argmax(x @ teacher, -1).astype(np.int32)
  own, test = slice(num_workers), num_workers
  return (
    {"x": x[own], "label": label[own]},
    {"x": x[test], "label": label[test]},
  )


def batches(own: dict, epoch: int) -> Iterator[dict]:
  """Yields the batches of an epoch, in an order that depends on it alone."""
  order = np.random.default_rng([1, epoch]).permutation(SAMPLES)
  for start in range(0, SAMPLES, BATCH):
    rows = order[start : start + BATCH]
    yield {name: x[:, rows] for name, x in own.items()}


def optimize() -> optax.GradientTransformation:
  """Returns a worker's optimizer; its schedule counts local steps."""
  rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 20, EPOCHS * STEPS)
  return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))


def distribute(
  inner: optax.GradientTransformation, axis: collectives.Axis
) -> optax.GradientTransformation:
  """Returns the method: rounds of `INTERVAL` steps, sent in four bits."""
  four_bits = jdist.Compression(codecs.Quantize(4), reducers.ErrorFeedback())
  return jdist.diloco(inner, INTERVAL, axis=axis, compression=four_bits)


def main(
  directory: str,
  num_workers: int = 4,
  num_epochs: int = EPOCHS,
  dtype=jnp.bfloat16,
) -> tuple[list[float], dict[str, float]]:
  """Trains up to an epoch; returns the losses, and the test's accuracies."""
  workers = jdist.workers(num_workers)
  optimizer = distribute(optimize(), workers.axis)
  graph, params, stats, rest = nnx.split(
    Network(dtype, nnx.Rngs(0)), nnx.Param, nnx.BatchStat, ...
  )

  def step(run, batch):  # One worker's.
    # A key for each step and worker, so that a resumed run draws the same
    # masks, and no two workers do.
    key = jax.random.fold_in(jax.random.key(2), run["step"])
    key = jax.random.fold_in(key, collectives.index(workers.axis))

    def loss_fn(params):
      net = nnx.merge(graph, params, run["stats"], rest, copy=True)
      net.train()
      nnx.reseed(net, dropout=key)
      loss, _ = training.label_loss(net(batch["x"]), batch)
      return loss, nnx.state(net, nnx.BatchStat)

    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(
      run["params"]
    )
    updates, opt = optimizer.update(grads, run["opt"], run["params"], loss=loss)
    params = jdist.apply_updates(run["params"], updates, opt)
    anchor = jdist.anchor(opt, params)
    return {
      "step": run["step"] + 1,
      "params": params,
      "opt": opt,
      # Workers' statistics differ within a round, as their parameters do.
      "stats": training.synchronize_statistics(stats, opt, axis=workers.axis),
      "ema": optax.incremental_update(anchor, run["ema"], 1 - DECAY),
    }, loss

  def end_epoch(run):  # The round that the epoch's end cuts off ends early.
    params, opt = transforms.drain(optimizer, run["opt"], run["params"])
    stats = training.synchronize_statistics(
      run["stats"], opt, axis=workers.axis
    )
    return run | {"params": params, "opt": opt, "stats": stats}

  def evaluate(run, test):  # Each worker's part of the test, then their mean.
    params, stats = jdist.evaluation_params(
      run["opt"], run["params"], run["stats"], axis=workers.axis
    )
    found = {}
    for name, weights in {"anchor": params, "ema": run["ema"]}.items():
      net = nnx.merge(graph, weights, stats, rest, copy=True)
      net.eval()
      _, metrics = training.label_loss(net(test["x"]), test)
      found[name] = metrics["accuracy"]
    return collectives.mean(found, workers.axis)

  train = workers.jit(step, donate_argnums=0)
  end_epoch = workers.jit(end_epoch, donate_argnums=0)
  evaluate = workers.jit(evaluate)
  params, stats = workers.replicate((params, stats))
  run = {
    "step": workers.replicate(np.int32(0)),
    "params": params,
    "opt": workers.jit(optimizer.init)(params),
    "stats": stats,
    "ema": jax.tree.map(jnp.copy, params),  # Its memory is donated, too.
  }
  own, test = samples(num_workers)
  test, losses, found = workers.shard(test), [], {}
  with training.Checkpoints(directory, workers) as checkpoints:
    if (saved := checkpoints.restore(run)) is not None:
      run = saved.state
      print(f"resumed after epoch {saved.step}")
    for epoch in range(saved.step if saved else 0, num_epochs):
      for batch in batches(own, epoch):
        run, loss = train(run, workers.place(batch))
        # Two steps in flight keep a device busy, and more deadlock CPUs.
        jax.block_until_ready(losses[-1:])
        losses.append(loss)
      run = end_epoch(run)
      found = {
        k: float(v) for k, v in workers.view(evaluate(run, test)).items()
      }
      print(
        f"epoch {epoch + 1}: loss {workers.view(loss):.3f}, test accuracy "
        f"{found['anchor']:.1%}, of the average {found['ema']:.1%}"
      )
      checkpoints.save(epoch + 1, run)
  return [float(workers.view(x)) for x in losses], found


if __name__ == "__main__":
  main(*sys.argv[1:2])
