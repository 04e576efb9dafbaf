"""A model that shows wrong weights: in JAX, and by hand in NumPy.

Every sample, worker, micro-batch and statistic has a part in every gradient:
batch norm over the samples that the mask keeps, dropout by the worker's key,
and a history (the mean prediction so far) that the next prediction reads, so
that statistics which are averaged wrongly are seen in the parameters.

The NumPy half is written from the formulas, with its backward pass by hand,
and shares nothing with JAX but the dropout masks.  These are drawn by the key
that the step passes, and the model's state keeps them for the reference.
"""

import jax
import jax.numpy as jnp
import numpy as np

INPUTS, HIDDEN = 3, 4
KEPT = 0.75
EPSILON = (
  0.1  # Of batch norm: large, so that tiny batches are well-conditioned.
)
HISTORY = 0.3
LEAVES = {
  "hidden/kernel": (INPUTS, HIDDEN),
  "hidden/scale": (HIDDEN,),
  "out": (HIDDEN,),
  "shift": (),
}
SIZE = sum(int(np.prod(shape)) for shape in LEAVES.values())


def first_params(seed, dtype):
  random = np.random.default_rng([*seed, 1])
  return {
    name: (random.normal(size=shape) / 2 + (name == "hidden/scale")).astype(
      dtype
    )
    for name, shape in LEAVES.items()
  }


def first_state(samples, passes, dtype):
  """Statistics, a history, a counter and the dropout masks of all passes."""
  return {
    "mean": np.zeros(HIDDEN, dtype),
    "variance": np.ones(HIDDEN, dtype),
    "history": np.zeros((), dtype),
    "passes": np.zeros((), np.int32),
    "drawn": np.zeros((passes, samples, HIDDEN), np.uint8),
  }


def make_batch(seed, step, workers, samples, kind):
  """One step's batch [workers, samples, ...], with masks of `kind`."""
  random = np.random.default_rng([*seed, 2, step])
  x = random.normal(size=(workers, samples, INPUTS)).astype(np.float32)
  # Workers see different functions, so that they drift apart.
  slope = np.linspace(0.5, 1.5, workers)[:, None]
  y = (slope * x.sum(-1) + np.sin(x[..., 0])).astype(np.float32)
  mask = np.ones((workers, samples), np.float32)
  if kind == "uneven":
    for row in mask:
      row[random.permutation(samples)[: random.integers(samples - 1)]] = 0
    # Padding is not a number on purpose where nothing may read it.
    x = np.where(mask[..., None] > 0, x, np.float32(7))
  return {"x": x, "y": y, "mask": mask}


def loss_fn(params, state, batch, key):
  """One worker's loss, as a user writes it for `training.make_step`."""
  dtype = state["mean"].dtype
  x, mask = batch["x"].astype(dtype), batch["mask"].astype(dtype)
  y = batch["y"].astype(dtype)
  kernel, scale, out, shift = (params[name].astype(dtype) for name in LEAVES)
  count = jnp.maximum(mask.sum(), 1)
  hidden = x @ kernel
  mean = (mask[:, None] * hidden).sum(0) / count
  variance = (mask[:, None] * (hidden - mean) ** 2).sum(0) / count
  normal = (hidden - mean) / jnp.sqrt(variance + EPSILON) * scale
  drawn = jax.random.bernoulli(key, KEPT, normal.shape)
  found = (normal * drawn.astype(dtype) / KEPT) @ out + shift
  found = found - HISTORY * state["history"]
  loss = (mask * (found - y) ** 2).sum() / count
  level = jax.lax.stop_gradient((mask * found).sum() / count)

  def smoothed(old, new):
    return 0.75 * old + 0.25 * jax.lax.stop_gradient(new)

  new = {
    "mean": smoothed(state["mean"], mean),
    "variance": smoothed(state["variance"], variance),
    "history": smoothed(state["history"], level),
    "passes": state["passes"] + 1,
    "drawn": state["drawn"]
    .at[state["passes"]]
    .set(
      jnp.zeros_like(state["drawn"][0])
      .at[: len(drawn)]
      .set(drawn.astype(jnp.uint8))
    ),
  }
  return loss, (new, {"level": level})


STATISTICS = ("mean", "variance", "history")


def gradient(flat, statistics, batch, drawn):
  """The same loss of one worker by hand.

  Args:
    flat: parameters in one row, in the order of `LEAVES`.
    statistics: `{"mean", "variance", "history"}`.
    batch: `{"x", "y", "mask"}` of one worker.
    drawn: the dropout mask, [samples, HIDDEN].

  Returns:
    The loss, the gradient in one row, and the new statistics.
  """
  kernel, scale, out, shift = split(flat)
  x, y, mask = (np.asarray(batch[k], np.float64) for k in ("x", "y", "mask"))
  count, drawn = max(mask.sum(), 1.0), np.asarray(drawn, np.float64) / KEPT
  rows = mask[:, None]
  hidden = x @ kernel
  mean = (rows * hidden).sum(0) / count
  variance = (rows * (hidden - mean) ** 2).sum(0) / count
  inverse = 1 / np.sqrt(variance + EPSILON)
  unit = (hidden - mean) * inverse
  found = (unit * scale * drawn) @ out + shift
  found = found - HISTORY * statistics["history"]
  loss = (mask * (found - y) ** 2).sum() / count

  of_found = 2 * mask * (found - y) / count
  of_normal = np.outer(of_found, out) * drawn
  of_unit = of_normal * scale
  # Through mean and variance of the samples that count.
  of_hidden = inverse * (
    of_unit
    - rows / count * of_unit.sum(0)
    - rows * unit / count * (of_unit * unit).sum(0)
  )
  parts = (
    x.T @ of_hidden,
    (of_normal * unit).sum(0),
    (unit * scale * drawn).T @ of_found,
    of_found.sum(),
  )
  new = {
    "mean": mean,
    "variance": variance,
    "history": (mask * found).sum() / count,
  }
  new = {k: 0.75 * statistics[k] + 0.25 * v for k, v in new.items()}
  return loss, np.concatenate([np.ravel(x) for x in parts]), new


def split(flat):
  """The leaves of a row of parameters."""
  parts, start = [], 0
  for shape in LEAVES.values():
    size = int(np.prod(shape))
    parts.append(flat[..., start : start + size].reshape(shape))
    start += size
  return parts


def spans():
  """Where each leaf stands in a row of parameters."""
  found, start = [], 0
  for shape in LEAVES.values():
    size = int(np.prod(shape))
    found.append(slice(start, start + size))
    start += size
  return found


def flat(tree):
  """Rows [workers, SIZE] in float64 of a tree of arrays [workers, ...]."""
  rows = [np.asarray(tree[name]).astype(np.float64) for name in LEAVES]
  return np.concatenate([x.reshape(len(x), -1) for x in rows], 1)


def labelled(batch):
  """The batch for an `Evaluator`, which classifies the sign of y."""
  label = (batch["y"] > 0).astype(np.int32)
  return {"image": batch["x"], "label": label, "mask": batch["mask"]}


def classify(params, state, images, *, train):
  """Logits of two classes, by the statistics and the history so far."""
  assert not train
  hidden = images @ params["hidden/kernel"]
  mean, variance = (state[k].astype(hidden.dtype) for k in STATISTICS[:2])
  normal = (hidden - mean) / jnp.sqrt(variance + EPSILON)
  found = (normal * params["hidden/scale"]) @ params["out"] + params["shift"]
  found = found - HISTORY * state["history"].astype(found.dtype)
  return jnp.stack([jnp.zeros_like(found), found], -1), state


def evaluate(flat, statistics, batches):
  """The mean cross entropy and accuracy over samples that count, by hand."""
  kernel, scale, out, shift = split(flat)
  losses, hits, total = 0.0, 0.0, 0.0
  for batch in batches:
    hidden = np.asarray(batch["x"], np.float64) @ kernel
    normal = (hidden - statistics["mean"]) / np.sqrt(
      statistics["variance"] + EPSILON
    )
    found = (normal * scale) @ out + shift - HISTORY * statistics["history"]
    right = batch["y"] > 0
    loss = np.logaddexp(0, np.where(right, -found, found))
    losses += (loss * batch["mask"]).sum()
    hits += (((found > 0) == right) * batch["mask"]).sum()
    total += batch["mask"].sum()
  return losses / total, hits / total
