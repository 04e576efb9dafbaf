"""Says what is compared: networks, machines, and how many of all."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jdist import cluster, models

Batch = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Network:
  """A network and the micro-batch that its layers are profiled with.

  Attributes:
    name: of `models.build`.
    samples: of a micro-batch.
    input_shape: of a sample.
    num_classes: of images, or tokens.
    options: of the network.
  """

  name: str
  samples: int
  input_shape: tuple[int, ...]
  num_classes: int
  options: tuple[tuple[str, Any], ...] = ()

  def build(self) -> models.Model:
    """Builds it with its parameters."""
    return models.build(
      self.name,
      input_shape=self.input_shape,
      num_classes=self.num_classes,
      **dict(self.options),
    )

  def batch(self) -> Batch:
    """Draws a micro-batch."""
    generator = np.random.default_rng(0)
    shape = self.samples, *self.input_shape
    if len(self.input_shape) == 1:
      tokens = generator.integers(0, self.num_classes, shape)
      return {"x": jax.numpy.asarray(tokens, "int32")}
    return {"x": jax.numpy.asarray(generator.normal(size=shape), "float32")}

  def bytes_of_input(self) -> int:
    """Returns the bytes of a micro-batch."""
    return int(self.batch()["x"].nbytes)


NETWORKS = {
  "vgg16": Network("vgg16", 16, (32, 32, 3), 10),
  "resnet50": Network("resnet50", 16, (32, 32, 3), 10),
  "transformer": Network(
    "transformer",
    4,
    (256,),
    256,
    (("num_layers", 24), ("width", 256), ("num_heads", 4)),
  ),
}


@dataclasses.dataclass(frozen=True)
class Config:
  """A comparison.

  Attributes:
    networks: names of `NETWORKS`.
    topologies: names of `TOPOLOGIES`.
    stages: numbers of machines, a stage each.
    microbatches: of an iteration, in numbers of stages.
    source: of the layers' costs, see `pipeline.layer_costs`: `"timed"` on the
      machine that runs this, or counted, with the two rates below.
    flops_per_s: of a machine, for counted costs.
    bytes_per_s: of its memory, likewise.
    repeats: of timed runs.
    memory_gb: of each machine.
    fast_gbit_per_s: of links.
    slow_gbit_per_s: of the slow link, and between two levels.
    latency_s: of a message on a link.
    slow_speed: of the slow device.
  """

  networks: tuple[str, ...] = tuple(NETWORKS)
  topologies: tuple[str, ...] = (
    "equal", "slow device", "slow link", "two levels",
  )  # fmt: skip
  stages: tuple[int, ...] = (4, 8)
  microbatches: int = 1
  source: Literal["timed", "compiled", "lowered"] = "compiled"
  flops_per_s: float = 1e11
  bytes_per_s: float = 2e10
  repeats: int = 21
  memory_gb: float = 16.0
  fast_gbit_per_s: float = 10.0
  slow_gbit_per_s: float = 1.0
  latency_s: float = 5e-5
  slow_speed: float = 0.25


PRESETS = {
  "hosts": (
    "CPU hosts with links of 10 Gbit/s, layers by operations and bytes.",
    Config(),
  ),
  "timed": (
    "The same, layers timed on this machine, which should be idle.",
    Config(source="timed"),
  ),
  "many": (
    "As hosts, with four times as many micro-batches as stages.",
    Config(microbatches=4),
  ),
  "thin": (
    "As hosts, with links of a tenth.",
    Config(fast_gbit_per_s=1.0, slow_gbit_per_s=0.1),
  ),
  "smoke": (
    "A small network on four machines, in seconds.",
    Config(
      networks=("vgg16",),
      topologies=("equal", "slow device"),
      stages=(4,),
      source="lowered",
    ),
  ),
}


def _nodes(config: Config, names: Sequence[str]) -> list[cluster.Node]:
  memory = config.memory_gb * 1e9
  return [cluster.Node(name, memory_bytes=memory) for name in names]


def _star(config: Config, number: int, slow: int | None = None) -> Any:
  """Machines with a link each to a switch, one of which may be slow."""
  names = [f"d{i}" for i in range(number)]
  links = {
    name: _link(config, config.slow_gbit_per_s)
    if i == slow
    else _link(config, config.fast_gbit_per_s)
    for i, name in enumerate(names)
  }
  topology = cluster.star(links, "switch")
  return cluster.Cluster(
    tuple(_nodes(config, names)), topology, server="switch"
  )


def _link(config: Config, gbit_per_s: float) -> cluster.Link:
  return cluster.Link(gbit_per_s * 1e9, config.latency_s)


def _equal(config: Config, number: int) -> cluster.Cluster:
  return _star(config, number)


def _slow_device(config: Config, number: int) -> cluster.Cluster:
  found = _star(config, number)
  nodes = list(found.nodes)
  middle = number // 2
  nodes[middle] = dataclasses.replace(nodes[middle], speed=config.slow_speed)
  return dataclasses.replace(found, nodes=tuple(nodes))


def _slow_link(config: Config, number: int) -> cluster.Cluster:
  return _star(config, number, slow=number // 2)


def _two_levels(config: Config, number: int) -> cluster.Cluster:
  """Two racks: fast links to a rack's switch, a slow one between them."""
  names = [f"d{i}" for i in range(number)]
  links = {
    (name, f"rack{2 * i // number}"): _link(config, config.fast_gbit_per_s)
    for i, name in enumerate(names)
  }
  between = _link(config, config.slow_gbit_per_s)
  links |= {("rack0", "rack1"): between}
  return cluster.Cluster(
    tuple(_nodes(config, names)), cluster.Topology(links), server="rack0"
  )


TOPOLOGIES: dict[str, Callable[[Config, int], cluster.Cluster]] = {
  "equal": _equal,
  "slow device": _slow_device,
  "slow link": _slow_link,
  "two levels": _two_levels,
}


def levels(
  config: Config, topology: str, number: int
) -> list[tuple[int, float]]:
  """Returns what PipeDream's planner knows of the links."""
  fast = config.fast_gbit_per_s * 1e9 / 8
  if topology != "two levels":
    return [(number, fast)]
  slow = config.slow_gbit_per_s * 1e9 / 8
  return [(number // 2, fast), (2, slow)]
