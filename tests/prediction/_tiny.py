"""A tiny run on real digits, whose parameters can be collected."""

import dataclasses
import functools

import jax
import numpy as np
import optax

from jdist import (
  collectives,
  data,
  methods,
  models,
  prediction,
  training,
)

HIDDEN = (6, 5)


def model(abstract=False, **options):
  return models.build(
    "mlp",
    input_shape=(8, 8, 1),
    num_classes=10,
    abstract=abstract,
    **({"hidden_sizes": HIDDEN} | options),
  )


def cut(num_layers=1, **options):
  return prediction.cut(model(abstract=True, **options), num_layers)


def flatten_rear(cut, tree):
  """The rear as a vector, as `Cut.flatten_front` makes one of the front."""
  swapped = dataclasses.replace(cut, front=cut.rear, rear=cut.front)
  return swapped.flatten_front(tree)


@functools.cache
def team():
  return collectives.workers(2, substrate="vmap")


@functools.cache
def optimizer(method):
  if method == "local_sgd":
    return methods.local_sgd(optax.sgd(0.1), 2, axis=team().axis)
  return methods.ssgd(optax.sgd(0.1, momentum=0.9), axis=team().axis)


@functools.cache
def digits(split):
  return data.load("digits", split)


@functools.cache
def trainer(method):
  train = digits("train")
  loss = training.classification_loss(model().apply, normalize=train.normalize)
  step = training.make_step(loss, optimizer(method), axis=team().axis)
  return training.Trainer(team(), step)


def init(method):
  return training.init_state(team(), optimizer(method), model().params)


def fit(method, num_steps, **kwargs):
  batches = data.Batches(digits("train"), 2, 8, seed=0)
  return trainer(method).fit(
    kwargs.pop("state", None) or init(method),
    batches.iterate,
    num_steps,
    evaluate_every=1,
    **kwargs,
  )


def alone():
  """One worker, without compiling much, for what needs no run."""
  return collectives.workers(1, substrate="none")


def state(step, params):
  """One worker's state at a step, with parameters that equal its number."""
  return training.TrainState(
    step=np.asarray([step], np.int32),
    params=jax.tree.map(
      lambda x: np.full((1, *x.shape), step, np.float32), params
    ),
    opt_state=(),
    model_state={},
    key=np.zeros((1, 2), np.uint32),
  )
