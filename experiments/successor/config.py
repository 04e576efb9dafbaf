"""What is compared: the variants, and the networks on which they are."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import functools
from typing import Any

import optax
from optax_chains import ChainRun, Config, Variant
from repeated_mean import RepeatedMean
from studies import Presets

from jdist import codecs, reducers, transforms

RATIO = 0.005
MOMENTA = (0.0, 0.5, 0.9)
# Tuned at each momentum, of which the best by validation is compared.
METHODS: dict[str, reducers.Feedback | None] = {
  "top-k": reducers.ErrorFeedback(),
  "repeated mean": RepeatedMean(),
  "ssgd": None,
}


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


def name_of(method: str, momentum: float) -> str:
  """Returns the name of a variant."""
  return f"{method}, momentum {momentum:g}"


VARIANTS: dict[str, Variant] = {
  name_of(method, momentum): functools.partial(
    _chain, momentum=momentum, feedback=feedback
  )
  for method, feedback in METHODS.items()
  for momentum in MOMENTA
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
