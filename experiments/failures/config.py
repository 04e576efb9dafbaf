"""Says what is compared: protocols, and machines that fail at random."""

import dataclasses
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import random_failures
import studies

from jdist import cluster, server

FRACTIONS = (0.0, 0.1, 0.2, 0.3)
# Samples of a task, and its seconds; all machines are alike.
BATCH = 4
TASK_S = 1.0


@dataclasses.dataclass(frozen=True)
class Setting:
  """Machines that fail.

  Attributes:
    fraction: of the time that a machine is down, on the average; 0 for never.
    workers: their number.
    cycle_s: mean seconds from a failure of a machine to its next.
    restart_s: seconds from its return until it asks for work, which count as
      up; and of a whole job that begins anew.
    detection_s: after so many seconds the server notices a failure.
    exchange_s: seconds of a pull and a push, each worker on its own link.
    jitter: of a task's time, standard deviation of its logarithm.
  """

  fraction: float
  workers: int = 100
  cycle_s: float = 600.0
  restart_s: float = 3.0
  detection_s: float = 0.3
  exchange_s: float = 0.02
  jitter: float = 0.1

  @property
  def costs(self) -> cluster.Profile:
    """A task's costs."""
    return cluster.Profile(
      seconds_per_sample=TASK_S / BATCH, pull_bytes=1e6, push_bytes=1e6
    )

  def law(self, seed: int) -> random_failures.Failures | None:
    """The law of failures, if there are any."""
    if not self.fraction:
      return None
    return random_failures.Failures.of(
      self.fraction, self.cycle_s, restart_s=self.restart_s, seed=seed
    )

  def machines(self, seed: int, until_s: float) -> cluster.Cluster:
    """The cluster, with its failures until a second."""
    machines = cluster.workers(
      [1.0] * self.workers,
      link=cluster.Link(8 * 2e6 / self.exchange_s),
      server_link=cluster.Link(1e15),
      jitter=self.jitter,
    )
    law = self.law(seed)
    return machines if law is None else law.apply(machines, until_s)

  def possible(self, seed: int, until_s: float) -> float:
    """Samples that all machines would have computed while they were up."""
    law = self.law(seed)
    names = [f"worker{i}" for i in range(self.workers)]
    up_s = (
      self.workers * until_s
      if law is None
      else sum(law.up_seconds(name, until_s) for name in names)
    )
    return up_s * BATCH / TASK_S


# Local steps from one push of Decoupled DiLoCo to the next.
INTERVAL = 8
VARIANTS = (
  "bsp, one job", "bsp", "bsp, backups", "ssp", "asp", "h_ps",
  "decoupled_diloco",
)  # fmt: skip
# With gradients, in the order in which they run.
TRAINED = (
  "decoupled_diloco", "h_ps", "h_ps, local step", "asp", "bsp", "ssp",
  "bsp, backups", "bsp, one job",
)  # fmt: skip


def build(variant: str, setting: Setting) -> server.Protocol:
  """Builds a protocol for this many workers."""
  batches = server.FixedBatches(BATCH)
  num = setting.workers
  if variant == "bsp, one job":
    return server.BSP(batches=batches, restart_s=setting.restart_s)
  if variant == "bsp":
    return server.BSP(batches=batches)
  if variant == "bsp, backups":
    return server.BSP(batches=batches, backups=num // 20)
  if variant == "ssp":
    return server.SSP(batches=batches, bound=3)
  if variant == "asp":
    return server.ASP(batches=batches)
  if variant in ("h_ps", "h_ps, local step"):
    return server.h_ps(num * BATCH, plans=None)
  return server.DecoupledDiLoCo(
    batches=batches, interval=INTERVAL, quorum=0.5, grace=0.5
  )


@dataclasses.dataclass(frozen=True)
class Config(studies.Options):
  """A comparison with gradients."""

  FREE = (*studies.Options.FREE, "fractions")

  dataset: str = "mnist"
  """A name of `jdist.data`."""

  model: str = "mlp"
  """A name of `jdist.models`."""

  epochs: float = 0.5
  """Passes through the training set, of samples that are merged."""

  workers: int = 100
  """As of `Setting`."""

  fractions: tuple[float, ...] = (0.0, 0.2)
  """Of the time that a machine is down; all variants are tuned at 0."""

  rates: tuple[float, ...] = (0.016, 0.064, 0.256)
  """The grid of learning rates, of the server's SGD or of the local steps; each
  variant uses its own best one, by the loss of a run of the same length on
  held-out training samples."""

  outer_rate: float = 0.7
  """Of the outer Nesterov momentum of Decoupled DiLoCo."""

  outer_momentum: float = 0.5
  """Its momentum."""

  seeds: tuple[int, ...] = (0, 1, 2)
  """One run each at a variant's best rate; of samples and of failures."""


# Under these names on the command line.
PRESETS: studies.Presets = {
  "mnist": ("MNIST, an MLP, 100 workers: seconds a run", Config()),
  "smoke": (
    "digits, a few updates: that it runs",
    Config(
      dataset="digits", epochs=0.5, workers=10, rates=(0.05,), seeds=(0,),
      variants=("bsp", "decoupled_diloco"),
    ),
  ),
}  # fmt: skip
