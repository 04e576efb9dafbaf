"""The compared protocols, and machines that fail at random."""

import dataclasses
import pathlib
import sys
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import random_failures
import studies

from jdist import cluster, server

FRACTIONS = (0.0, 0.1, 0.2, 0.3)
# All machines are alike: a task has so many samples and takes so many seconds.
BATCH = 4
TASK_S = 1.0


@dataclasses.dataclass(frozen=True)
class Setting:
  """Machines that fail.

  Attributes:
    fraction: Mean part of the time that a machine is down; 0 for never.
    workers: Number of workers.
    cycle_s: Mean seconds from a failure of a machine to its next one.
    restart_s: Seconds from its return until it asks for work, which count as
      up; also the seconds in which a whole job begins anew.
    detection_s: Seconds after which the server notices a failure.
    exchange_s: Seconds of a pull and a push, each worker on its own link.
    jitter: Standard deviation of the logarithm of a task's time.
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
    """The costs of a task."""
    return cluster.Profile(
      seconds_per_sample=TASK_S / BATCH, pull_bytes=1e6, push_bytes=1e6
    )

  def law(self, seed: int) -> random_failures.Failures | None:
    """Returns the law of failures, or None where nothing fails."""
    if not self.fraction:
      return None
    return random_failures.Failures.of(
      self.fraction, self.cycle_s, restart_s=self.restart_s, seed=seed
    )

  def machines(self, seed: int, until_s: float) -> cluster.Cluster:
    """Returns the cluster, with its failures up to a second."""
    machines = cluster.workers(
      [1.0] * self.workers,
      link=cluster.Link(8 * 2e6 / self.exchange_s),
      server_link=cluster.Link(1e15),
      jitter=self.jitter,
    )
    law = self.law(seed)
    return machines if law is None else law.apply(machines, until_s)

  def possible(self, seed: int, until_s: float) -> float:
    """Returns the samples that the machines compute while they are up."""
    law = self.law(seed)
    names = [f"worker{i}" for i in range(self.workers)]
    up_s = (
      self.workers * until_s
      if law is None
      else sum(law.up_seconds(name, until_s) for name in names)
    )
    return up_s * BATCH / TASK_S


# Decoupled DiLoCo pushes after so many local steps.
INTERVAL = 8
VARIANTS = (
  "bsp, one job", "bsp", "bsp, backups", "ssp", "asp", "h_ps",
  "decoupled_diloco",
)  # fmt: skip
# The variants with gradients, in the order in which they run.
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
  """Passes through the training set, counted in merged samples."""

  workers: int = 100
  """Number of workers."""

  fractions: tuple[float, ...] = (0.0, 0.2)
  """Parts of the time that a machine is down; variants are tuned at 0."""

  rates: tuple[float, ...] = (0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256)
  """Grid of learning rates, of the server's SGD or of the local steps. Each
  variant uses its own best one, by the loss of a run of the same length on
  held-out training samples. Steps of two: with steps of four the best rate may
  stand at the edge of stability, where single runs end anywhere."""

  evaluations: int = 25
  """Number of evaluations in a run, at equal distances in samples."""

  last_marks: int = 5
  """Accuracy and loss of a run are their means over so many last evaluations:
  at a high rate a single one depends on the last few updates."""

  outer_rate: float = 0.7
  """Rate of the outer optimizer of Decoupled DiLoCo, Nesterov momentum."""

  outer_momentum: float = 0.5
  """Momentum of that optimizer."""

  seeds: tuple[int, ...] = (0, 1, 2)
  """Seeds of samples and failures, of a run each at a variant's best rate."""

  def last(self, curve: list[dict[str, Any]]) -> dict[str, float]:
    """Returns a run's accuracy and loss, means of its last evaluations.

    >>> curve = [{"accuracy": x, "loss": 1 - x} for x in (0.0, 0.5, 1.0)]
    >>> Config(last_marks=2).last(curve)
    {'accuracy': 0.75, 'test_loss': 0.25}
    """
    last = curve[-self.last_marks :]
    means = {
      x: sum(point[x] for point in last) / len(last)
      for x in ("accuracy", "loss")
    }
    return {"accuracy": means["accuracy"], "test_loss": means["loss"]}


# Under these names on the command line.
PRESETS: studies.Presets = {
  "mnist": ("MNIST, an MLP, 100 workers: seconds a run", Config()),
  "smoke": (
    "digits, a few updates: a test",
    Config(
      dataset="digits", epochs=0.5, workers=10, rates=(0.05,), seeds=(0,),
      variants=("bsp", "decoupled_diloco"),
    ),
  ),
}  # fmt: skip
