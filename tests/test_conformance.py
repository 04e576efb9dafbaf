"""Rules, reducers, models and data sets keep the laws of `conformance`."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jdist import (
  codecs,
  conformance,
  data,
  methods,
  models,
  reducers,
  transforms,
)

slow = pytest.mark.slow
_RULES = {
  **{x: part() for x, part in methods.PARTS["rules"].items()},
  "outer step": transforms.OuterStep(optax.sgd(0.7)),
  "elastic": transforms.Elastic(),
  "slow momentum": transforms.SlowMomentum(0.1),
  "control variates": transforms.ControlVariates(0.1),
  "pulled anchor": transforms.PulledAnchor(),
}
_REDUCERS = {
  "exact": reducers.Exact(),
  "all to all": reducers.compressed(codecs.Quantize(4)),
  "gather": reducers.compressed(codecs.TopK(0.1)),
  **{
    x: part() if callable(part) else part
    for x, part in methods.PARTS["reducers"].items()
  },
}
_DATASETS = ("synthetic", "digits")
_QUICK = ("exact", "mlp", "synthetic")


def _cases(names):
  return [pytest.param(x, marks=[] if x in _QUICK else slow) for x in names]


@pytest.fixture(autouse=True)
def _standard_promotion():
  with jax.numpy_dtype_promotion("standard"):
    yield


@pytest.mark.parametrize("name", _cases(_RULES))
def test_rule_keeps_the_laws(name):
  # Adam's outer steps have a length of 0.01.
  conformance.check(_RULES[name], within=2.7 if name == "adam" else 1.3)


@pytest.mark.parametrize("name", _cases(methods.PARTS["feedbacks"]))
def test_feedback_keeps_the_laws(name):
  conformance.check(methods.PARTS["feedbacks"][name])


class _Own(reducers.ErrorFeedback):
  """Gives each worker its own share, in place of the mean."""

  def finish(self, mean, own_share, wanted, state):
    return own_share, super().finish(mean, own_share, wanted, state)[1]


@slow
def test_feedback_that_takes_no_mean_is_named():
  with pytest.raises(AssertionError, match="agree on the anchor to the bit"):
    conformance.check(_Own())


@pytest.mark.parametrize("name", _cases(_REDUCERS))
def test_reducer_keeps_the_laws(name):
  conformance.check(_REDUCERS[name])


@pytest.mark.parametrize("name", _cases(models.MODELS))
def test_model_keeps_the_laws(name):
  conformance.check(models.MODELS[name])


@pytest.mark.parametrize("name", _cases(_DATASETS))
def test_data_set_keeps_the_laws(name):
  if name == "digits":
    pytest.importorskip("sklearn")
  conformance.check(functools.partial(data.load, name))


class _Alone(transforms.OuterStep):
  """Moves by a worker's own progress in place of the mean."""

  def move(self, end, mean, exact, relative):
    return super().move(end, end.progress, exact, relative)


@dataclasses.dataclass(frozen=True)
class _Broken(reducers.Exact):
  """Breaks one law of reducers."""

  law: str = ""

  def init(self, like, axis):
    return jnp.zeros(0) if self.law == "size zero" else ()

  def reduce(self, tree, state, key, axis):
    found = super().reduce(tree, state, key, axis)
    if self.law == "to the bit":
      return found._replace(mean=tree)
    if self.law == "like its tree":
      wide = jax.tree.map(lambda x: x.astype(jnp.float16), found.mean)
      return found._replace(mean=wide)
    if self.law == "own shares":
      half = jax.tree.map(lambda x: x / 2, found.mean)
      return found._replace(mean=half)
    return found


class _Model(nnx.Module):
  """Breaks one law of models."""

  drawn = 0
  law = ""

  def __init__(self, input_shape, num_classes, *, rngs):
    self.more = int(self.law == "logits are")
    size = int(np.prod(input_shape))
    self.layer = nnx.Linear(size, num_classes + self.more, rngs=rngs)
    if self.law == "equal seeds":
      _Model.drawn += 1
      self.layer.bias[...] += _Model.drawn

  def __call__(self, images):
    x = self.layer(images.reshape(len(images), -1))
    if self.law == "gradients are finite":
      x = jnp.sqrt(jnp.maximum(x - x.max(), 0))
    if self.law == "depends on another":
      x = x - x.mean(0)
    return x


def _data_set(law, split):
  name = {"both splits are": "none", "each time": "random"}.get(law, "ones")
  rng = np.random.default_rng(None if name == "random" else 0)
  images = rng.normal(size=(200, 2, 2, 1)).astype(np.float32)
  labels, one = np.arange(200, dtype=np.int32) % 2, {"mean": (0.0,)}
  if law == "same `mean`" and split == "test":
    one = {"mean": (1.0,)}
  if law == "mean and deviation":
    one = {"mean": (1.0,)}
  rows = slice(0, 0) if name == "none" else slice(None)
  return data.Dataset(
    "mine", split, images[rows], labels[rows], 2, std=(1.0,), **one
  )


def _broken(kind, law) -> Any:
  if kind == "reducer":
    return _Broken(law)
  if kind == "model":
    return type("Mine", (_Model,), {"law": law, "__init__": _Model.__init__})
  return functools.partial(_data_set, law)


@pytest.mark.parametrize(
  ("kind", "law"),
  [
    *(
      ("reducer", x)
      for x in ("size zero", "to the bit", "like its tree", "own shares", "")
    ),
    *(
      ("model", x)
      for x in (
        "equal seeds", "logits are", "gradients are finite",
        "depends on another", "",
      )
    ),
    *(
      ("data set", x)
      for x in (
        "both splits are", "each time", "same `mean`", "mean and deviation", "",
      )
    ),
  ],
)  # fmt: skip
def test_each_broken_law_is_named(kind, law):
  part = _broken(kind, law)
  if not law:  # Nothing is broken: the others fail by their law alone.
    conformance.check(part)
    return
  with pytest.raises(AssertionError, match=law):
    conformance.check(part)


def test_rule_that_takes_no_mean_is_named():
  with pytest.raises(AssertionError, match="agree on the anchor to the bit"):
    conformance.check(_Alone(optax.sgd(0.7)))


def test_other_kinds_are_refused():
  with pytest.raises(ValueError, match="got a int"):
    conformance.check(3)
