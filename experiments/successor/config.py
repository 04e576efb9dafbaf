"""The variants that are compared, and the networks on which they are."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import functools
from collections.abc import Iterator
from typing import Any

import optax
from optax_chains import ChainRun, Config, Variant
from repeated_mean import RepeatedMean
from studies import Presets

from jdist import codecs, reducers, transforms

RATIO = 0.005
METHODS = "top-k", "repeated mean", "ssgd"


def _chain(
  run: ChainRun,
  momentum: float,
  feedback: reducers.Feedback | None,
) -> optax.GradientTransformation:
  """SGD with a momentum, after a mean of the largest entries."""
  compression = None
  if feedback is not None:
    compression = reducers.Compression(
      reducers.compressed(codecs.TopK(RATIO)), feedback
    )
  return optax.chain(
    transforms.average_gradients(run.axis, compression),
    optax.trace(momentum) if momentum else optax.identity(),
    optax.scale_by_learning_rate(run.rate),
  )


def _points() -> Iterator[tuple[str, float, reducers.Feedback | None]]:
  """Yields the names, momenta and feedbacks, as many of both methods."""
  for momentum in (0.0, 0.5, 0.9, 0.3, 0.7):
    yield "top-k", momentum, reducers.ErrorFeedback()
  for share, momentum in (
    (1, 0.0),
    (0.9, 0.0),
    (0.6, 0.0),
    (0.9, 0.5),
    (0.6, 0.5),
  ):
    # A share of 1 is the name alone.
    name = "repeated mean" if share == 1 else f"repeated mean {share:g}"
    yield name, momentum, RepeatedMean(share)
  for momentum in (0.0, 0.5, 0.9):
    yield "ssgd", momentum, None


VARIANTS: dict[str, Variant] = {
  f"{name}, momentum {momentum:g}": functools.partial(
    _chain, momentum=momentum, feedback=feedback
  )
  for name, momentum, feedback in _points()
}

_COMMON: dict[str, Any] = {
  "batch_size": 64, "rates": (0.05, 0.1, 0.2), "extensions": 4,
  "seeds": (0, 1, 2, 3, 4), "evaluations": 2, "warmup_epochs": 0.1,
  "momentum": 0.0,
}  # fmt: skip
PRESETS: Presets = {
  "mnist-mlp": (
    "MNIST, an MLP of one hidden layer",
    Config(dataset="mnist", model="mlp", epochs=1.0, **_COMMON),
  ),
  "mnist-lenet": (
    "MNIST, LeNet",
    Config(dataset="mnist", model="lenet", epochs=1.0, **_COMMON),
  ),
  "cifar10-lenet": (
    "CIFAR-10, LeNet",
    Config(dataset="cifar10", model="lenet", epochs=2.0, **_COMMON),
  ),
}
TUNING_SEEDS = (100, 101, 102)
