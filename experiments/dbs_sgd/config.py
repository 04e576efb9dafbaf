"""What is compared: protocols, machines' speeds, and whose the data are."""

import dataclasses
import itertools
import math
import pathlib
import statistics
import sys
from collections.abc import Callable
from typing import Literal, TypeAlias

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import ringleader
import studies

from jdist import cluster, server
from jdist.training import comparison

Sharing: TypeAlias = Literal["shared", "owned", "skewed"]


@dataclasses.dataclass(frozen=True)
class Setting:
  """A comparison's speed and sharing.

  Attributes:
    speed: the fastest machine's over the slowest's.
    sharing: whose the data are.
  """

  speed: float
  # Rows of before it had shared data.
  sharing: Sharing = "shared"


@dataclasses.dataclass(frozen=True)
class Config(studies.Options):
  """One comparison, or several: one for each speed and each sharing."""

  FREE = (
    *studies.Options.FREE, "speeds", "data", "last_marks", "one_rate",
  )  # fmt: skip

  dataset: str = "mnist"
  """A name of `jdist.data`."""

  model: str = "mlp"
  """A name of `jdist.models`."""

  workers: int = 8
  """Machines that compute gradients."""

  batch_size: int = 256
  """Samples of all workers' batches together."""

  epochs: float = 2.0
  """The virtual time: in which all machines together, never waiting, go so
  often through the training set."""

  speeds: tuple[float, ...] = (1.0, 4.0, 8.0, 16.0)
  """The fastest machine's speed over the slowest's; the others lie between, in
  equal ratios."""

  kinds: int | None = None
  """Number of different speeds, as many machines of each; None for pairs."""

  exchange: float = 0.0
  """Seconds of a pull and a push in 32 bits, over those of a task on a machine
  of the mean speed. Every worker has a link of its own. Messages take no time
  if 0."""

  encoding: float = 0.0
  """Seconds to make or read a message of fewer bits, over those of a task on
  the same machine."""

  data: tuple[Sharing, ...] = ("shared", "owned", "skewed")
  """Whether all take from one order of the samples, each worker owns a part, or
  owned parts have unlike labels (Dirichlet with `alpha`)."""

  alpha: float = 0.1
  """Label skew of `skewed`."""

  jitter: float = 0.1
  """Of a task's time: standard deviation of its logarithm."""

  rates: tuple[float, ...] = (0.003125, 0.00625, 0.0125)
  """The grid of learning rates; each variant uses its own best one, by the loss
  of a run of the same length on held-out training samples."""

  extensions: int = 4

  last_marks: int = 1
  """A rate is ranked by the mean loss of so many last evaluations."""

  one_rate: bool = True
  """Run all variants once more at the best rate of asgd."""

  momentum: float = 0.9
  """Nesterov momentum of the server's SGD."""

  evaluations: int = 8
  """In a run, equally far apart in virtual time."""

  @property
  def task_s(self) -> float:
    """Seconds of an equal part of the batch at speed 1."""
    return COSTS.seconds_per_sample * self.batch_size / self.workers

  def rank(self, row: comparison.Row) -> tuple[float, float]:
    """Returns the rank of a tuning row by the mean of its last losses."""
    losses = [point["loss"] for point in row["curve"][-self.last_marks :]]
    # A loss that is not finite is null in rows.
    if None in losses or not all(map(math.isfinite, losses)):
      return -math.inf, -math.inf
    return -statistics.fmean(losses), row["accuracy"]

  def list_settings(self) -> list[Setting]:
    """Returns the settings, each a comparison of its own."""
    return [Setting(*x) for x in itertools.product(self.speeds, self.data)]


Variant: TypeAlias = Callable[[Config], server.Protocol]


def _fixed(options: Config) -> server.FixedBatches:
  return server.FixedBatches(options.batch_size // options.workers)


def _slower_when_stale() -> server.Weighting:
  return server.Weighting(staleness=server.inverse_staleness)


# In the order in which they run: what matters most comes first.
VARIANTS: dict[str, Variant] = {
  "asgd": lambda options: server.ASP(batches=_fixed(options)),
  "dbs": lambda options: server.dbs(options.batch_size),
  "n-softsync": lambda options: server.NSoftsync(
    n=options.workers // 2, batches=_fixed(options)
  ),
  "n-softsync, rate/staleness": lambda options: server.NSoftsync(
    n=options.workers // 2,
    batches=_fixed(options),
    weighting=_slower_when_stale(),
  ),
  "bsp": lambda options: server.BSP(batches=_fixed(options)),
  "ssp": lambda options: server.SSP(bound=3, batches=_fixed(options)),
  "ringmaster": lambda options: server.Ringmaster(
    max_staleness=options.workers, batches=_fixed(options)
  ),
  # Pushes come equally often, and each counts as much: weighted by part.
  "dbs, by part": lambda options: server.dbs(options.batch_size, rate="none"),
}
BASE = "asgd"
# The variants of the first tables; those below have a table of their own.
FIRST = tuple(VARIANTS)


def _bounded(bound: int) -> Variant:
  return lambda options: server.SSP(bound=bound, batches=_fixed(options))


def _softsync(n: int) -> Variant:
  return lambda options: server.NSoftsync(n=n, batches=_fixed(options))


def _fedbuff(buffer: int) -> Variant:
  return lambda options: server.fedbuff(buffer=buffer, batches=_fixed(options))


def _ringmaster(limit: int) -> Variant:
  return lambda options: server.Ringmaster(
    max_staleness=limit, batches=_fixed(options)
  )


def _decoupled(quorum: float = 0.5) -> Variant:
  return lambda options: server.DecoupledDiLoCo(
    batches=_fixed(options), interval=8, quorum=quorum, grace=0.5
  )


VARIANTS |= {
  "fedbuff": _fedbuff(10),
  "ringleader": lambda options: ringleader.Ringleader(batches=_fixed(options)),
  "h_ps": lambda options: server.h_ps(options.batch_size),
  "decoupled_diloco": _decoupled(),
  "ssp, bound 1": _bounded(1),
  "ssp, bound 9": _bounded(9),
  "n-softsync, n 1": _softsync(1),
  "n-softsync, n 2": _softsync(2),
  "fedbuff, K 4": _fedbuff(4),
  "fedbuff, K 20": _fedbuff(20),
  "ringmaster, R 4": _ringmaster(4),
  "ringmaster, R 16": _ringmaster(16),
  "h_ps, 32 bits": lambda options: server.h_ps(options.batch_size, plans=None),
  "h_ps, no pipeline": lambda options: server.h_ps(
    options.batch_size, pipelined=False
  ),
  "decoupled_diloco, outer momentum 0.5": _decoupled(),
  "decoupled_diloco, quorum 1": _decoupled(1.0),
}
# The protocols' own comparison: each with one number of its own, as its paper
# or jdist has it, and then with others.
PROTOCOLS = (
  "bsp", "asgd", "ssp", "n-softsync", "fedbuff", "ringmaster", "ringleader",
  "dbs", "h_ps", "decoupled_diloco",
)  # fmt: skip
OTHER_NUMBERS = tuple(x for x in VARIANTS if x not in (*FIRST, *PROTOCOLS))
# The outer Nesterov step of Decoupled DiLoCo.
OUTER_RATE = 0.7
OUTER_MOMENTUM = {
  "decoupled_diloco": 0.9,
  "decoupled_diloco, outer momentum 0.5": 0.5,
  "decoupled_diloco, quorum 1": 0.9,
}

# Of one sample at speed 1; messages take no time.
COSTS = cluster.Profile(seconds_per_sample=1e-3, pull_bytes=1.0, push_bytes=1.0)


def speeds(options: Config, speed: float) -> list[float]:
  """Returns the workers' speeds, the fastest first."""
  kinds = options.kinds or max(options.workers // 2, 1)
  levels, each = max(kinds - 1, 1), max(options.workers // kinds, 1)
  return [
    speed ** (1 - min(i // each, levels) / levels)
    for i in range(options.workers)
  ]


def machines(
  options: Config, speed: float, message_bytes: float = 1.0
) -> cluster.Cluster:
  """Returns the workers, fastest first, each with its link if it has one."""
  found = speeds(options, speed)
  if not options.exchange:
    return cluster.workers(found, jitter=options.jitter)
  exchange_s = options.exchange * options.task_s / statistics.fmean(found)
  return cluster.workers(
    found,
    link=cluster.Link(8 * 2 * message_bytes / exchange_s),
    # The server's link is no bottleneck.
    server_link=cluster.Link(1e15),
    jitter=options.jitter,
  )


def costs(options: Config, message_bytes: float) -> cluster.Profile:
  """Returns what a sample and a message cost at speed 1."""
  if not options.exchange:
    return COSTS
  return dataclasses.replace(
    COSTS,
    pull_bytes=message_bytes,
    push_bytes=message_bytes,
    seconds_per_encoding=options.encoding * options.task_s,
  )


_PROTOCOLS = Config(
  speeds=(4.0,), data=("shared",), kinds=2, exchange=1.0, encoding=0.03,
  epochs=4.0, rates=(0.00625, 0.0125, 0.025), extensions=8, last_marks=3,
  tuning_seeds=(10_000, 10_001, 10_002), seeds=(20, 21, 22, 23, 24),
  variants=(*PROTOCOLS, *OTHER_NUMBERS), one_rate=False,
)  # fmt: skip

# Under these names on the command line.
PRESETS: studies.Presets = {
  "mnist": (
    "MNIST, an MLP: seconds a run on one core", Config(variants=FIRST)
  ),
  "protocols": (
    "MNIST, an MLP, two kinds of machines, links: seconds a run on one core",
    _PROTOCOLS,
  ),
  "owned": (
    "the same where each worker owns its samples, of unlike labels or alike",
    dataclasses.replace(
      _PROTOCOLS, data=("skewed", "owned"),
      variants=(*PROTOCOLS, "dbs, by part", *OTHER_NUMBERS),
    ),
  ),
  "cifar10": (
    "CIFAR-10, an MLP, speeds of 8x: seconds a run on one core",
    Config(
      dataset="cifar10", epochs=4.0, speeds=(8.0,), variants=FIRST,
      rates=(0.00125, 0.0025, 0.005),
    ),
  ),
  "smoke": (
    "digits, a few updates: that it runs",
    Config(
      dataset="digits", workers=4, batch_size=32, epochs=1.0, speeds=(4.0,),
      data=("shared",), rates=(0.05,), seeds=(0,), evaluations=2,
      variants=("asgd", "dbs"),
    ),
  ),
  "cifar10-gpu": (
    "CIFAR-10, ResNet-18, speeds of 8x, on a GPU",
    Config(
      dataset="cifar10", model="resnet18", epochs=40.0, speeds=(8.0,),
      variants=FIRST,
      rates=(0.005, 0.01, 0.02, 0.04),
    ),
  ),
}  # fmt: skip
