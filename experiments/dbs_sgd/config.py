"""What is compared: protocols, machines' speeds, and whose the data are."""

import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Callable
from typing import Literal, TypeAlias

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import studies

from jdist import cluster, server

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

  FREE = (*studies.Options.FREE, "speeds", "data")

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
  equal ratios, each speed twice."""

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

  momentum: float = 0.9
  """Nesterov momentum of the server's SGD."""

  evaluations: int = 8
  """In a run, equally far apart in virtual time."""

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


def machines(options: Config, speed: float) -> cluster.Cluster:
  """Returns the workers, fastest first, their mean rate that of equal ones."""
  levels = max(options.workers // 2 - 1, 1)
  speeds = [speed ** (1 - (i // 2) / levels) for i in range(options.workers)]
  return cluster.workers(speeds, jitter=options.jitter)


# Of one sample at speed 1; messages take no time.
COSTS = cluster.Profile(seconds_per_sample=1e-3, pull_bytes=1.0, push_bytes=1.0)

# Under these names on the command line.
PRESETS: studies.Presets = {
  "mnist": ("MNIST, an MLP: seconds a run on one core", Config()),
  "cifar10": (
    "CIFAR-10, an MLP, speeds of 8x: seconds a run on one core",
    Config(
      dataset="cifar10", epochs=4.0, speeds=(8.0,),
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
      rates=(0.005, 0.01, 0.02, 0.04),
    ),
  ),
}  # fmt: skip
