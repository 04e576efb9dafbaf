"""Cells of the conformance tests: table, stages, micro-batches, cuts.

A cell's gradients are those of one iteration.  The optimizer here keeps them as
its state, so that gradients are compared rather than new parameters.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import models, pipeline
from tests.pipeline.runtime import _small_models as small

TABLES = ("naive", "gpipe", "1f1b", "interleaved", "zb_h1", "greedy")
STAGES = (1, 2, 4)
MICROBATCHES = (1, 4, 8, 32)
CUTS = ("even", "uneven", "unlike")
# Errors are relative to the largest entry of each leaf's gradient.
TOLERANCES = {"float64": 1e-12, "float32": 1e-5}

_SAMPLES = 2
# Uneven cuts by the number of stages, of models with two more layers.
_UNEVEN = {1: [], 2: [3], 4: [1, 3, 4], 8: [1, 2, 4, 5, 6, 8, 9]}
_WIDTHS = (6, 12, 12, 7, 9, 9, 5, 10, 8)


def legal(table, stages, microbatches):
  """Returns whether such a table exists."""
  return table != "interleaved" or microbatches % stages == 0


def product():
  """Returns all cells."""
  return [
    x
    for x in itertools.product(TABLES, STAGES, MICROBATCHES, CUTS)
    if legal(*x[:3])
  ]


def pairwise():
  """Returns a few cells in which all possible pairs of values occur."""
  axes = range(4)

  def pairs(cell):
    return {(i, j, cell[i], cell[j]) for i in axes for j in axes if i < j}

  cells = product()
  missing = set().union(*map(pairs, cells))
  found = []
  # The cell with the most new pairs comes next, the first of equals.
  while missing:
    found.append(max(cells, key=lambda x: len(pairs(x) & missing)))
    missing -= pairs(found[-1])
  return found


def make_table(name, stages, microbatches):
  if name != "greedy":
    return pipeline.make_table(name, stages, microbatches)
  times = [pipeline.StageTimes(1.0 + s % 2, 2.0 + s % 3) for s in range(stages)]
  return pipeline.greedy(times, microbatches)


def layers(cut, number, dtype):
  """Makes layers for `number` stages: of one kind and width, or of several."""
  if cut != "unlike":
    count = number + 2 if cut == "uneven" else max(number, 2)
    return small.layers((8,) * (count + 1), statistics=True, dtype=dtype)
  generator = np.random.default_rng(2)
  found = []
  for i, (a, b) in enumerate(itertools.pairwise(_widths(number))):
    if a == b:
      found.append(_scale(f"scale{i}", a, generator, dtype))
    else:
      found.append(_biased(f"dense{i}", a, b, generator, dtype))
  return found


def _widths(number):
  return _WIDTHS[: max(number, 2) + 1]


def _scale(name, width, generator, dtype):
  scale, shift = generator.normal(size=(2, width))

  def apply(params, state, x, *, train, mask=None):
    del train, mask
    own = params[name]
    centred = x - x.mean(-1, keepdims=True)
    return x + centred * own["scale"] + own["shift"], state

  params = {
    "scale": jnp.asarray(scale, dtype),
    "shift": jnp.asarray(shift, dtype),
  }
  return models.Layer(name, {name: params}, {}, apply)


def _biased(name, fan_in, fan_out, generator, dtype):
  kernel = generator.normal(size=(fan_in, fan_out)) / np.sqrt(fan_in)

  def apply(params, state, x, *, train, mask=None):
    del train, mask
    own = params[name]
    return jax.nn.gelu(x @ own["kernel"]) + own["bias"], state

  params = {
    "kernel": jnp.asarray(kernel, dtype),
    "bias": jnp.zeros(fan_out, dtype),
  }
  return models.Layer(name, {name: params}, {}, apply)


def stages(cut, number, dtype):
  """Cuts the model into stages."""
  return pipeline.cut_layers(layers(cut, number, dtype), cuts(cut, number))


def cuts(cut, number):
  """Returns the cuts, or the number of stages."""
  return _UNEVEN[number] if cut == "uneven" else number


def microbatch(cut, number, dtype):
  """Returns the shapes of a micro-batch."""
  widths = (8, 8)
  if cut == "unlike":
    widths = _widths(number)[0], _widths(number)[-1]
  return {
    name: jax.ShapeDtypeStruct((_SAMPLES, width), dtype)
    for name, width in zip("xy", widths, strict=True)
  }


def batch(cut, number, microbatches, dtype):
  """Makes all micro-batches, concatenated."""
  generator = np.random.default_rng(microbatches)
  shape = microbatches * _SAMPLES
  return {
    name: generator.normal(size=(shape, x.shape[1])).astype(dtype)
    for name, x in microbatch(cut, number, dtype).items()
  }


@functools.cache
def _gradient(cut, number, dtype):
  whole = layers(cut, number, dtype)
  params, state = small.merged(whole)
  loss_fn = small.whole_loss(whole)

  def loss(params, state, one):
    found, (state, _) = loss_fn(params, state, one, None)
    return found, state

  return params, state, jax.jit(jax.value_and_grad(loss, has_aux=True))


@functools.cache
def unsplit(cut, number, microbatches, dtype):
  """Returns the unsplit model's mean gradient over micro-batches, and the loss.

  A micro-batch starts with the state that the previous one has left.
  """
  params, state, gradient = _gradient(cut, number, dtype)
  given = batch(cut, number, microbatches, dtype)
  parts = jax.tree.map(lambda x: x.reshape(microbatches, _SAMPLES, -1), given)
  total, losses = jax.tree.map(np.zeros_like, params), []
  for i in range(microbatches):
    one = jax.tree.map(lambda x, i=i: x[i], parts)
    (loss, state), grads = gradient(params, state, one)
    losses.append(float(loss))
    total = jax.tree.map(lambda a, b: a + np.asarray(b), total, grads)
  return jax.tree.map(lambda x: x / microbatches, total), np.mean(losses)


def keeper():
  """Makes an optimizer that changes nothing and keeps the gradient."""

  def update(grads, state, params=None, **_):
    del state, params
    return jax.tree.map(jnp.zeros_like, grads), grads

  return optax.GradientTransformationExtraArgs(
    lambda params: jax.tree.map(jnp.zeros_like, params), update
  )
