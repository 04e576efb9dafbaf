"""Small models in layers, and their losses without a pipeline."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jdist import models
from jdist.pipeline.runtime._stages import merge

SIZES = (8, 8, 8, 8, 8)
UNLIKE = (6, 12, 7, 9, 5)


def layers(sizes=SIZES, *, statistics=False, dtype=jnp.float32):
  """Makes dense layers; with statistics they normalize and keep running means.

  They also read the old means, so running a layer again needs its old state.
  """
  generator = np.random.default_rng(0)
  found = []
  for i, (a, b) in enumerate(itertools.pairwise(sizes)):
    name = f"dense{i}"
    weights = generator.normal(size=(a, b)) / np.sqrt(a)
    params = {name: {"w": jnp.asarray(weights, dtype)}}
    state = {name: {"mean": jnp.zeros(b, dtype)}} if statistics else {}
    found.append(models.Layer(name, params, state, _dense(name, statistics)))
  return found


def _dense(name, statistics):
  def apply(params, state, x, *, train, mask=None):
    del train
    y = x @ params[name]["w"]
    if statistics:
      weight = jnp.ones(len(y), y.dtype) if mask is None else mask
      total = jnp.maximum(weight.sum(), 1).astype(y.dtype)
      mean = (y * weight[:, None].astype(y.dtype)).sum(0) / total
      before = state[name]["mean"]
      state = {name: {"mean": 0.5 * before + 0.5 * mean}}
      y = y - mean + before
    return jnp.tanh(y), state

  return apply


def tied_layers(before=False):
  """Makes an embedding and an output of one matrix, with a layer between.

  With `before`, another layer precedes them.
  """
  generator = np.random.default_rng(3)
  table = jnp.asarray(generator.normal(size=(8, 6)) / 3, jnp.float32)
  weight = jnp.asarray(generator.normal(size=(6, 6)) / 3, jnp.float32)
  square = jnp.asarray(generator.normal(size=(8, 8)) / 3, jnp.float32)

  def embed(params, state, x, *, train, mask=None):
    del train, mask
    return x @ params["table"], state

  def dense(name, weight):
    def apply(params, state, x, *, train, mask=None):
      del train, mask
      return jnp.tanh(x @ params[name]["w"]), state

    return models.Layer(name, {name: {"w": weight}}, {}, apply)

  def output(params, state, x, *, train, mask=None):
    del train, mask
    return x @ params["table"].T, state

  return [
    *([dense("first", square)] if before else []),
    models.Layer("embed", {"table": table}, {}, embed),
    dense("middle", weight),
    models.Layer("output", {"table": table}, {}, output),
  ]


def chain_loss(all_layers):
  """Makes the loss of layers that take the whole model's parameters."""

  def loss_fn(params, state, batch, key):
    del key
    x = batch["x"]
    for layer in all_layers:
      x, _ = layer.apply(params, {}, x, train=True)
    error, metrics = loss(x, batch)
    return error, (state, metrics)

  return loss_fn


def loss(outputs, batch):
  errors = jnp.mean((outputs - batch["y"]) ** 2, -1)
  if "mask" in batch:
    weight = batch["mask"].astype(errors.dtype)
    error = (errors * weight).sum() / jnp.maximum(weight.sum(), 1)
  else:
    error = errors.mean()
  return error, {"size": jnp.mean(jnp.abs(outputs))}


def whole_loss(all_layers):
  """Makes the loss of `training.make_step` for the unsplit model."""

  def loss_fn(params, state, batch, key):
    del key
    x, new = batch["x"], {}
    mask = {"mask": batch["mask"]} if "mask" in batch else {}
    for layer in all_layers:
      part = {layer.name: state[layer.name]} if layer.state else {}
      x, part = layer.apply(
        {layer.name: params[layer.name]}, part, x, train=True, **mask
      )
      new |= part
    error, metrics = loss(x, batch)
    return error, (new, metrics)

  return loss_fn


def batches(number, workers, samples, sizes=SIZES, dtype=np.float32):
  generator = np.random.default_rng(1)
  return [
    {
      "x": generator.normal(size=(workers, samples, sizes[0])).astype(dtype),
      "y": generator.normal(size=(workers, samples, sizes[-1])).astype(dtype),
    }
    for _ in range(number)
  ]


def merged(parts):
  """Merges the parameters and the state of layers or stages."""
  return merge([x.params for x in parts]), merge([x.state for x in parts])


def error(found, wanted):
  """Returns the largest difference, relative to the leaf's largest entry."""
  pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
  return max(
    (
      float(np.max(np.abs(np.asarray(a) - np.asarray(b))))
      / max(float(np.max(np.abs(np.asarray(b)))), 1e-30)
      for a, b in pairs
    ),
    default=0.0,
  )
