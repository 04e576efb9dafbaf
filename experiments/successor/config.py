"""The variants that are compared, and the networks on which they are."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import optax
from optax_chains import ChainRun, Config, Variant
from repeated_mean import RepeatedMean
from studies import Presets

from jdist import codecs, reducers, transforms

RATIO = 0.005
# A message is sent as it is, as its largest entries, as these with their values
# in 4 bits, or as matrices of a low rank, which take about as many bytes.
_MESSAGES: dict[str, reducers.Reducer | None] = {
  "ssgd": None,
  "top-k": reducers.compressed(codecs.TopK(RATIO)),
  "4-bit top-k": reducers.compressed(
    codecs.TopK(RATIO, values=codecs.Quantize(4))
  ),
  "powersgd rank 2": reducers.PowerSGD(2),
}
# Each repeated mean stands beside the method whose messages it sends.
PAIRS = {
  "repeated mean": "top-k",
  "4-bit repeated mean": "4-bit top-k",
}
METHODS = (
  "top-k",
  "repeated mean",
  "4-bit top-k",
  "4-bit repeated mean",
  "powersgd rank 2",
  "ssgd",
)
_MOMENTA = 0.0, 0.5, 0.9, 0.3, 0.7
_SHARES = (1, 0.0), (0.9, 0.0), (0.6, 0.0), (0.9, 0.5), (0.6, 0.5)


def _chain(
  run: ChainRun,
  momentum: float,
  message: str,
  feedback: reducers.Feedback,
) -> optax.GradientTransformation:
  """SGD with a momentum, after a mean of messages."""
  reducer = _MESSAGES[message]
  compression = reducer and reducers.Compression(reducer, feedback)
  return optax.chain(
    transforms.average_gradients(run.axis, compression),
    optax.trace(momentum) if momentum else optax.identity(),
    optax.scale_by_learning_rate(run.rate),
  )


def _variants() -> Iterator[tuple[str, Variant]]:
  """Yields names and chains: five points of a method, and three of SSGD."""
  for method in METHODS:
    message = PAIRS.get(method, method)
    points: Iterable[tuple[str, float, reducers.Feedback]]
    if method in PAIRS:
      # A share of 1 is the name alone.
      points = (
        (f"{method} {share:g}" if share != 1 else method, momentum,
         RepeatedMean(share))
        for share, momentum in _SHARES
      )  # fmt: skip
    else:
      momenta = _MOMENTA[:3] if method == "ssgd" else _MOMENTA
      points = ((method, x, reducers.ErrorFeedback()) for x in momenta)
    for name, momentum, feedback in points:
      yield (
        f"{name}, momentum {momentum:g}",
        functools.partial(
          _chain, momentum=momentum, message=message, feedback=feedback
        ),
      )


VARIANTS: dict[str, Variant] = dict(_variants())

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
