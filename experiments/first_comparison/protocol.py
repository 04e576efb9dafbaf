"""The front page's protocol: methods, grids, seeds and the margin.

All of it was written down before any run of the report.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import optax

from jdist import cluster, codecs, methods, reducers, transforms
from jdist.transforms import intervals

AXIS = "workers"
WORKERS = 8
BATCH_SIZE = 16
"""Samples of a worker in a step."""

STEPS = 336
WARMUP_STEPS = 11
MOMENTUM = 0.9
EVERY = 4
"""Steps between two evaluations."""

LINK = cluster.Link(bandwidth_bits_per_s=100e6, latency_s=1e-3)
MARGIN = 0.3
"""Points of accuracy that a method may be below synchronous SGD and still be as
good.  The 95 % interval of the difference must lie above."""

RATES = (0.05, 0.1, 0.2, 0.4)
"""Highest rates that are tried; the grid is extended in factors of two until
the best one is inside."""

FIRST = (8, 16, 32)
"""Steps of a round: H, and for MSDPU those of the first round."""

MEASURED = 8
"""Steps of the rounds whose computation is measured before the tuning."""

TUNING_SEEDS = tuple(range(10_000, 10_005))
SEEDS = tuple(range(300, 310))
"""Seeds of the report, which nothing was chosen by."""

LAST_MARKS = 8
"""The mean accuracy of this many last evaluations ranks the runs of tuning: a
single one has 144 images."""

Chain = optax.GradientTransformationExtraArgs


def share(step: jax.Array) -> jax.Array:
  """Returns the share of the highest rate: a warm-up, then a cosine."""
  schedule = optax.warmup_cosine_decay_schedule(
    0.1, 1.0, WARMUP_STEPS, STEPS, 0.01
  )
  return schedule(step)


def _int4() -> reducers.Compression:
  return reducers.Compression(codecs.Quantize(4), reducers.ErrorFeedback())


def _ssgd(inner: Any, rate: Any, first: int, delay: int, axis: Any) -> Chain:
  del rate, first, delay
  return methods.ssgd(inner, axis=axis)


def _rounds(make: Any, **options: Any) -> Callable[..., Chain]:
  def build(inner: Any, rate: Any, first: int, delay: int, axis: Any) -> Chain:
    del rate, delay
    rounds = intervals.ending_at(STEPS, first)
    return make(inner, rounds, axis=axis, **options)

  return build


def _msdpu(inner: Any, rate: Any, first: int, delay: int, axis: Any) -> Chain:
  """MSDPU's rule: rounds by the rate, the delay by the link."""
  rule = intervals.growth(rate, start=math.sqrt(first), max_interval=2 * first)
  return methods.msdpu(
    inner, intervals.ending_at(STEPS, rule), rate, axis=axis,
    overlap=transforms.Delayed(delay, carry=None, after_step=None),
    compression=_int4(),
  )  # fmt: skip


METHODS: dict[str, Callable[..., Chain]] = {
  "ssgd": _ssgd,
  "local_sgd": _rounds(methods.local_sgd),
  "diloco": _rounds(methods.diloco),
  "local_sgd, int4": _rounds(methods.local_sgd, compression=_int4()),
  "diloco, int4": _rounds(methods.diloco, compression=_int4()),
  "msdpu, int4": _msdpu,
}
BASE, OURS = "ssgd", "msdpu, int4"
SMALL = ("ssgd", "local_sgd, int4", "diloco, int4", "msdpu, int4")
"""What `scripts/train.sh` runs."""


def firsts(method: str) -> tuple[int, ...]:
  """Returns the rounds that are tried with a method."""
  return (1,) if method == "ssgd" else FIRST


def inner(peak: Any) -> optax.GradientTransformation:
  """Returns a worker's optimizer; its highest rate may be traced."""
  return optax.chain(
    optax.trace(MOMENTUM, nesterov=True),
    optax.scale_by_learning_rate(lambda step: peak * share(step)),
  )


def chain(
  method: str, first: int, delay: int, peak: Any, axis: Any = AXIS
) -> Chain:
  """Returns a method's chain; its highest rate may be traced."""

  def rate(step: jax.Array) -> jax.Array:
    return peak * share(step)

  return METHODS[method](inner(peak), rate, first, delay, axis)
