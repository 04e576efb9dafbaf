"""Says what is compared: protocols, workers' speeds, and links."""

import dataclasses
import pathlib
import sys
from typing import Literal

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))

import studies

from jdist import cluster, server

SPEEDS: dict[str, tuple[float, ...]] = {
  "1x": (1.0, 1.0, 1.0, 1.0),
  "2x": (2.0, 2.0, 1.0, 1.0),
  "4x": (4.0, 2.0, 2.0, 1.0),
  "8x": (8.0, 4.0, 2.0, 1.0),
  "12/12/8/16": (12.0, 12.0, 8.0, 16.0),
}
RATIOS = (0.1, 0.5, 1.0, 2.0)


@dataclasses.dataclass(frozen=True)
class Setting:
  """A cluster and a model's costs on it.

  Attributes:
    speeds: a name of `SPEEDS`.
    ratio: r, seconds of a pull and a push in 32 bits over those in which all
      workers together, never waiting, compute a round.
    total: B, samples of a round.
    encoding: seconds to make or read a message of fewer bits, over those of a
      round's computation by equal workers.
    jitter: of a task's time, standard deviation of its logarithm.
  """

  speeds: str
  ratio: float
  total: int = 256
  encoding: float = 0.0
  jitter: float = 0.0

  @property
  def rates(self) -> tuple[float, ...]:
    """The workers' samples a second: their mean is 1,000 in all settings."""
    speeds = SPEEDS[self.speeds]
    mean = sum(speeds) / len(speeds)
    return tuple(1000.0 * speed / mean for speed in speeds)

  @property
  def round_s(self) -> float:
    """B over the rates' sum."""
    return self.total / sum(self.rates)

  @property
  def exchange_s(self) -> float:
    """c, seconds of a pull and a push in 32 bits."""
    return self.ratio * self.round_s

  @property
  def encoding_s(self) -> float:
    """Seconds of one encoding at the mean speed."""
    return self.encoding * self.round_s

  def costs(self, message_bytes: float = 4e6) -> cluster.Profile:
    """A model's costs, on a machine of the mean speed."""
    return cluster.Profile(
      seconds_per_sample=1e-3,
      pull_bytes=message_bytes,
      push_bytes=message_bytes,
      seconds_per_encoding=self.encoding_s,
    )

  def machines(self, message_bytes: float = 4e6) -> cluster.Cluster:
    """Workers on a link of their own each; the server's is no bottleneck."""
    link = cluster.Link(8 * 2 * message_bytes / self.exchange_s)
    return cluster.workers(
      [rate / 1000.0 for rate in self.rates],
      link=link,
      server_link=cluster.Link(1e15),
      jitter=self.jitter,
    )


@dataclasses.dataclass(frozen=True)
class Variant:
  """A protocol, or H-PS with some of its parts.

  Attributes:
    baseline: a name of `server.PROTOCOLS`; None for H-PS.
    parts: of H-PS, of `tasks`, `pipeline` and `bits`.
    local: workers' own steps, their rate over the server's; none if 0.
    momentum: of these steps, over the server's.
    nesterov: whether they foresee that it is Nesterov's.
    late_from: share of the run after which the pipeline begins.
  """

  baseline: str | None = None
  parts: tuple[str, ...] | None = None
  local: float = 0.0
  momentum: float = 0.0
  nesterov: bool = False
  late_from: float = 0.0


ALL = ("tasks", "pipeline", "bits")
VARIANTS: dict[str, Variant] = {
  "bsp": Variant("bsp"),
  "asp": Variant("asp"),
  "ssp": Variant("ssp"),
  "tasks": Variant(parts=("tasks",)),
  "pipeline": Variant(parts=("pipeline",)),
  "bits": Variant(parts=("bits",)),
  "tasks + pipeline": Variant(parts=("tasks", "pipeline")),
  "tasks + bits": Variant(parts=("tasks", "bits")),
  "pipeline + bits": Variant(parts=("pipeline", "bits")),
  "h_ps": Variant(parts=ALL),
  "h_ps, late in half": Variant(parts=ALL, late_from=0.5),
}
# On real workers alone: local steps, whose fragments a quorum merges.
FRAGMENTS = Variant("decoupled_diloco")
# With gradients; the order in which they run.
TRAINED: dict[str, Variant] = {
  "bsp": VARIANTS["bsp"],
  "h_ps": VARIANTS["h_ps"],
  "h_ps, local step": Variant(parts=ALL, local=1.0),
  "h_ps, momentum": Variant(parts=ALL, local=1.0, momentum=1.0),
  "h_ps, foresight": Variant(parts=ALL, local=1.0, momentum=1.0, nesterov=True),
  # The same, of a pipeline that begins in the midst.
  "h_ps, late in half": Variant(
    parts=ALL, local=1.0, momentum=1.0, nesterov=True, late_from=0.5
  ),
  "asp": VARIANTS["asp"],
  "ssp": VARIANTS["ssp"],
  "pipeline": VARIANTS["pipeline"],
  "bits": VARIANTS["bits"],
  "tasks": VARIANTS["tasks"],
}


_OPTIONS: dict[str, dict[str, int]] = {
  "ssp": {"bound": 3},
  "decoupled_diloco": {"interval": 4, "fragments": 2},
}


def build(
  variant: Variant,
  total: int,
  num: int,
  plans: server.BitPlans | None = None,
  updates: int = 0,
) -> server.Protocol:
  """Builds the protocol for rounds of so many samples by so many workers.

  Args:
    variant: of `VARIANTS` or `TRAINED`.
    total: samples of a round.
    num: workers.
    plans: of H-PS's bits; the usual ones if None.
    updates: of the run, of which a late pipeline waits for a share.
  """
  if variant.parts is None:
    batches = server.FixedBatches(total // num)
    assert variant.baseline is not None
    options = _OPTIONS.get(variant.baseline, {})
    return server.PROTOCOLS[variant.baseline](batches=batches, **options)
  return server.h_ps(
    total,
    tasks="tasks" in variant.parts,
    pipelined="pipeline" in variant.parts,
    pipelined_from=round(variant.late_from * updates),
    plans=(plans or server.BitPlans()) if "bits" in variant.parts else None,
  )


BASELINES = ("bsp", "asp", "ssp")


def bounds(setting: Setting) -> dict[str, float]:
  """Samples a second by arithmetic, of each baseline and of H-PS.

  H-PS's round takes max(t, q c) with t of whole batches and their encoding and
  q a plan's part of the bytes, of the plan with which it takes least; as if a
  push and a pull went one after the other.
  """
  rates, c, total = setting.rates, setting.exchange_s, setting.total
  b = total // len(rates)
  plans = server.BitPlans()
  sizes = server.BalancedBatches(total).sizes(rates)

  def round_s(plan: int) -> float:
    encoding = 2 * setting.encoding_s if plan else 0.0
    compute = max(
      n / rate + encoding * 1000.0 / rate
      for n, rate in zip(sizes, rates, strict=True)
    )
    return max(compute, plans.share(plan) * c)

  return {
    "bsp": total / (max(b / rate for rate in rates) + c),
    "asp": sum(b / (b / rate + c) for rate in rates),
    "ssp": len(rates) * b / (b / min(rates) + c),
    "h_ps": total / min(round_s(plan) for plan in range(len(plans.bits))),
  }


def shares() -> tuple[float, ...]:
  """A message's bytes by each plan of one tensor, over those in 32 bits."""
  plans = server.BitPlans()
  return tuple(plans.share(plan) for plan in range(len(plans.bits)))


@dataclasses.dataclass(frozen=True)
class Config(studies.Options):
  """A comparison with gradients, in one or more settings."""

  FREE = (*studies.Options.FREE, "settings")

  dataset: str = "mnist"
  """A name of `jdist.data`."""

  model: str = "lenet"
  """A name of `jdist.models`."""

  batch_size: int = 256
  """Samples of a round, of all workers together."""

  epochs: float = 0.5
  """Passes through the training set."""

  settings: tuple[str, ...] = ("8x:1", "12/12/8/16:2")
  """Speeds and r of each."""

  encoding: float = 0.03
  """As of `Setting`."""

  jitter: float = 0.1
  """As of `Setting`."""

  error_limit: float = 0.02
  """Relative error that fewer bits of a tensor may have."""

  rates: tuple[float, ...] = (0.025, 0.05, 0.1)
  """The grid of learning rates; each variant uses its own best one, by the loss
  of a run of the same length on held-out training samples."""

  extensions: int = 3

  momentum: float = 0.9
  """Nesterov momentum of the server's SGD."""

  schedule: Literal["constant", "cosine"] = "constant"
  """Of the learning rate, over the run; a cosine after a linear warm-up."""

  evaluations: int = 4
  """In a run, equally far apart in samples."""

  def list_settings(self) -> list[Setting]:
    """Returns the settings, each a comparison of its own."""
    return [
      Setting(speeds, float(ratio), self.batch_size, self.encoding, self.jitter)
      for speeds, ratio in (name.split(":") for name in self.settings)
    ]


# Under these names on the command line.
PRESETS: studies.Presets = {
  "mnist": ("MNIST, LeNet, half a pass: half a minute a run", Config()),
  "smoke": (
    "digits, a few updates: that it runs",
    Config(
      dataset="digits", model="mlp", batch_size=64, epochs=1.0,
      settings=("4x:1",), rates=(0.05,), seeds=(0,), evaluations=2,
      variants=("bsp", "h_ps"),
    ),
  ),
  "cifar10": (
    "CIFAR-10, LeNet, half a pass: half a minute a run on one core",
    Config(
      dataset="cifar10", settings=("8x:1",),
      variants=("bsp", "h_ps, momentum"),
    ),
  ),
  "cifar10-cosine": (
    "CIFAR-10, LeNet, five passes, the rate on a cosine: minutes a run",
    Config(
      dataset="cifar10", settings=("8x:1",), epochs=5.0, schedule="cosine",
      evaluations=10, rates=(0.0125, 0.025, 0.05), seeds=(0, 1, 2, 3, 4),
      variants=("bsp", "h_ps, foresight", "h_ps, late in half"),
    ),
  ),
  "cifar10-mlp": (
    "CIFAR-10, an MLP, which sends much for what it computes; one pass",
    Config(
      dataset="cifar10", model="mlp", epochs=1.0, settings=("12/12/8/16:2",),
      evaluations=4,
      rates=(0.0125, 0.025, 0.05), variants=("bsp", "h_ps, momentum"),
    ),
  ),
  "cifar10-gpu": (
    "CIFAR-10, ResNet-18, on a GPU",
    Config(
      dataset="cifar10", model="resnet18", batch_size=512, epochs=30.0,
      evaluations=6,
      settings=("8x:1", "4x:2"), rates=(0.05, 0.1, 0.2),
    ),
  ),
}  # fmt: skip
