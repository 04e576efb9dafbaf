"""What is compared: protocols, workers' speeds, and links."""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

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


Variant: TypeAlias = Callable[[int, int], server.Protocol]


def _fixed(total: int, workers: int) -> server.FixedBatches:
  return server.FixedBatches(total // workers)


def _parts(**parts: bool) -> Variant:
  def build(total: int, workers: int) -> server.Protocol:
    del workers
    return server.h_ps(
      total,
      tasks=parts.get("tasks", False),
      pipelined=parts.get("pipeline", False),
      plans=server.BitPlans() if parts.get("bits", False) else None,
    )

  return build


# Of a round's samples and the number of workers.
VARIANTS: dict[str, Variant] = {
  "bsp": lambda total, num: server.BSP(batches=_fixed(total, num)),
  "asp": lambda total, num: server.ASP(batches=_fixed(total, num)),
  "ssp": lambda total, num: server.SSP(bound=3, batches=_fixed(total, num)),
  "tasks": _parts(tasks=True),
  "pipeline": _parts(pipeline=True),
  "bits": _parts(bits=True),
  "tasks + pipeline": _parts(tasks=True, pipeline=True),
  "tasks + bits": _parts(tasks=True, bits=True),
  "pipeline + bits": _parts(pipeline=True, bits=True),
  "h_ps": _parts(tasks=True, pipeline=True, bits=True),
}
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
