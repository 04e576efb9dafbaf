"""Refusals of MP²: an argument and its rule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jdist import prediction
from tests import _refusals
from tests.prediction import _tiny
from tests.prediction._fits import (
  fit_predictor,
  fronts,
  model,
  predictor,
)

# A path that would not be there, were anything written.
NOWHERE = "/nowhere/of/ours"
LENET = prediction.published_cut("lenet")
NETWORK = {
  "a": {"bias": jnp.zeros(2), "kernel": jnp.zeros((3, 2))},
  "b": {"kernel": jnp.zeros((2, 2))},
}


@functools.cache
def front_params():
  ours = prediction.predictor(prediction.cut(NETWORK, 1))
  return ours, jax.jit(ours.init)(jax.random.key(0))


def cut(**options):
  return prediction.cut(NETWORK, 1, **options)


def collect(steps=(2, 3), **options):
  options = {"cuts": [_tiny.cut()]} | options
  return prediction.Collector(
    NOWHERE, _tiny.alone(), options.pop("cuts"), steps, **options
  )


def choose_steps(**change):
  given = {"num_epochs": 2, "steps_per_epoch": 5, "per_epoch": 1}
  return prediction.choose_steps(**(given | change))


def fit(**change):
  return prediction.PredictorFit(**change)


def evaluate(of=None, network=None, samples=None, images=0, **options):
  return prediction.evaluate_predictor(
    of or predictor(),
    {},
    network or model(),
    fronts(3) if samples is None else samples,
    _tiny.digits("train").images[:images],
    _tiny.digits("train").labels[:images],
    **options,
  )


@_refusals.table(
  # Cuts.
  *(
    ("num_layers", lambda n=n: prediction.cut(NETWORK, n), "an int from 1 to 1")
    for n in (0, 2, 1.0, 1.5, True, None)
  ),
  ("model", lambda: prediction.cut(None, 1), "two layers"),
  ("model", lambda: prediction.cut({"a": NETWORK["a"]}, 1), "two layers"),
  ("tree", lambda: prediction.cut([jnp.zeros((2, 2))] * 2, 1), "a nested dict"),
  ("name", lambda: cut(name=3), "text, got 3"),
  ("vector", lambda: cut().unflatten_front([1.0]), "an array"),
  ("vector", lambda: cut().unflatten_front(jnp.zeros(9)), "shape [8]"),
  ("name", lambda: prediction.published_cut("resnet20"), "must be 'lenet'"),
  (
    "norm",
    lambda: prediction.published_model("vgg15", norm="batch"),
    "left out, as vgg15",
  ),
  ("name", lambda: prediction.published_model(["lenet"]), "got ['lenet'"),
  *(
    (
      name,
      lambda name=name: prediction.published_model("resnet18", **{name: 1}),
      "left out, as resnet18",
    )
    for name in ("norm", "width", "shortcut_size")
  ),
  # Collecting.
  ("directory", lambda: prediction.ParameterSet(NOWHERE), "hold"),
  ("cuts", lambda: collect(cuts=[]), "different depths"),
  ("cuts", lambda: collect(cuts=[_tiny.cut()] * 2), "different depths"),
  ("cuts", lambda: collect(cuts=[_tiny.cut(1), LENET]), "of one network"),
  ("cuts", lambda: collect(cuts=_tiny.cut()), "each entry a `prediction.Cut`"),
  ("cuts", lambda: collect(cuts=["a"]), "got ['a']"),
  *(
    ("steps", lambda x=x: collect(steps=x), "increasing")
    for x in ((), (3, 2), (2, 2))
  ),
  ("steps", lambda: collect(steps=(-1, 2)), "an int >= 0"),
  ("steps", lambda: collect(steps=(True, 2)), "a list of ints"),
  *(
    ("steps", lambda x=x: collect(steps=x), "a list of ints")
    for x in (3, None, "ab", (1.5, 2), ("a",), np.ones((2, 2), int))
  ),
  *(
    ("metadata", lambda x=x: collect(metadata=x), "a value of JSON")
    for x in ({"x": np.ones(2)}, {"x": {1, 2}})
  ),
  ("metadata", lambda: collect(metadata={("a", 1): 2}), "a dict"),
  ("metadata", lambda: collect(metadata=3), "a dict"),
  (
    "workers",
    lambda: prediction.Collector(NOWHERE, 2, [_tiny.cut()], (2, 3)),
    "as of `jdist.workers(...)`, got 2",
  ),
  *(
    (name, lambda name=name, x=x: choose_steps(**{name: x}), rule)
    for name, rule in (
      ("num_epochs", "an int from 1 to 1000000"),
      ("steps_per_epoch", "an int >= 1"),
      ("per_epoch", "an int from 1 to 5"),
    )
    for x in (0, 1.5)
  ),
  ("per_epoch", lambda: choose_steps(per_epoch=6), "an int from 1 to 5"),
  (
    "steps_per_epoch",
    lambda: prediction.choose_steps(2, 22.53),
    "`int(batches",
  ),
  *(
    ("seed", lambda x=x: choose_steps(seed=x), "an int from 0")
    for x in (-1, 0.5)
  ),
  # Predictors.
  *(
    ("rank", lambda x=x: prediction.predictor(LENET, x), "an int >= 1")
    for x in (0, 1.5, True, "1")
  ),
  ("cut", lambda: prediction.predictor(None), "as of `prediction.cut(...)`"),
  (
    "cut",
    lambda: prediction.predictor(LENET.front),
    "as of `prediction.cut(...)`",
  ),
  ("grid", lambda: prediction.predictor(LENET, grid=4), "1 or 8"),
  *(
    ("grid", lambda x=x: prediction.predictor(LENET, grid=x), "an int")
    for x in (True, 8.0, np.array([8, 8]))
  ),
  ("dense_from", lambda: prediction.predictor(LENET, dense_from="x"), "be"),
  ("key", lambda: predictor().init(0), "a random key, got"),
  ("key", lambda: predictor().init(np.zeros(2)), "a random key, got"),
  (
    "key",
    lambda: predictor().init(np.zeros((2, 2), np.uint32)),
    "a random key, got uint32[2, 2]",
  ),
  (
    "vector",
    lambda: front_params()[0].apply_vector(
      front_params()[1], jnp.zeros((2, 8))
    ),
    "an array of shape [8]",
  ),
  (
    "vector",
    lambda: front_params()[0].apply_vector(front_params()[1], [0.0] * 8),
    "an array of shape [8]",
  ),
  (
    "tree",
    lambda: front_params()[0].apply(front_params()[1], {"b": NETWORK["b"]}),
    "the network of",
  ),
  (
    "predictor",
    lambda: prediction.save_predictor(NOWHERE, _tiny.cut(), {}),
    "of",
  ),
  # Their training.
  *(
    (name, lambda name=name, x=x: fit(**{name: x}), rule)
    for name, x, rule in (
      ("num_epochs", 0, "int >= 1"),
      ("samples_per_batch", 0, "int >= 1"),
      ("sample_batches", 0, "int >= 1"),
      ("images_per_batch", 2.0, "int >= 1"),
      ("image_batches", True, "int >= 1"),
      ("learning_rate", 0, "in (0, inf]"),
      ("learning_rate", "x", "number, got 'x'"),
      ("learning_rate", "1e-3", "finite number"),
      ("learning_rate", np.inf, "finite"),
      ("mixup", -1, "in [0"),
      ("mixup", None, "number, got None"),
      ("mixup", np.inf, "finite"),
      ("mixup", np.nan, "finite"),
      ("mixup", 10**400, "finite"),
      ("seed", -1, "from 0"),
      ("seed", "a", "from 0"),
      ("seed", 2**63, "from 0 to"),
    )
  ),
  *(
    (name, lambda given=given, x=x: fit_predictor(**{given: x}), rule)
    for given, name, x, rule in (
      ("of", "predictor", _tiny.cut(), "a `prediction.Predictor`, got Cut"),
      ("fit", "fit", {}, "a `prediction.PredictorFit` or None, got {}"),
      ("normalize", "normalize", None, "a function of"),
      ("on_epoch", "on_epoch", 3, "a function of"),
      ("samples", "samples", [[0.0]], "[samples,"),
      ("held_out", "held_out", None, "[samples,"),
    )
  ),
  *(
    (name, lambda name=name, of=of: fit_predictor(**{name: of()}), "[samples,")
    for name in ("samples", "held_out")
    for of in (
      lambda: fronts(8)[:, 1:],
      lambda: fronts(8)[:0],
      lambda: fronts(8)[0],
      lambda: fronts(8).astype(str),
      lambda: fronts(8).astype(np.complex64),
    )
  ),
  ("model", lambda: evaluate(network=model(hidden_sizes=(6, 5, 4))), "of Cut"),
  (
    "model",
    lambda: evaluate(network=model().params),
    "a `models.Model`",
  ),
  ("predictor", lambda: evaluate(_tiny.cut()), "of"),
  ("samples", lambda: evaluate(samples=fronts(3) * np.nan, images=9), "finite"),
  *(
    (name, lambda name=name: evaluate(images=9, **{name: 0}), "an int >= 1")
    for name in ("samples_per_batch", "images_per_batch")
  ),
)
def test_invalid_arguments_raise(argument, call, rule):
  _refusals.check(argument, call, rule)
