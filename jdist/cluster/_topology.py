"""Devices, links and topologies, and the time that they take."""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Literal

from jdist import checks, signatures

Hop = tuple[str, str]
# The kinds of `collectives.Kind`.
_COLLECTIVES = (
  "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "permute",
)  # fmt: skip


@signatures.explained
@signatures.checked
@dataclasses.dataclass(frozen=True)
class Device:
  """An accelerator's rates.

  Attributes:
    name: The device's name.
    flops_per_s: Floating point operations a second that programs reach, not
      the data sheet's.
    memory_bytes_per_s: Memory bandwidth that programs reach.
    launch_s: The shortest time of one kernel.
  """

  name: str
  flops_per_s: signatures.PositiveFloat
  memory_bytes_per_s: signatures.PositiveFloat
  launch_s: signatures.NonNegativeFloat = 0.0

  def compute_s(self, flops: float, num_bytes: float) -> float:
    """Returns the seconds of a kernel.

    Arithmetic and memory traffic overlap, as in the roofline model, and no
    kernel is shorter than its launch.

    >>> Device("toy", flops_per_s=10, memory_bytes_per_s=2).compute_s(20, 2)
    2.0
    """
    return max(
      flops / self.flops_per_s,
      num_bytes / self.memory_bytes_per_s,
      self.launch_s,
    )


@signatures.explained
@signatures.checked
@dataclasses.dataclass(frozen=True)
class Link:
  """A link between two machines, full duplex.

  Attributes:
    bandwidth_bits_per_s: Bandwidth in each direction.
    latency_s: Latency of one message.
    sharing: How concurrent messages share the link: with `"first_come"` one
      follows the other, with `"fair"` each has an equal part of the bandwidth,
      as TCP gives it. By default it is fair for servers, and first come for
      pipelines, whose connections send one message after the other.

  >>> Link(bandwidth_bits_per_s=1e9).send_s(num_bytes=125e6)
  1.0
  """

  # It may be infinite: messages then take the latency alone.
  bandwidth_bits_per_s: signatures.PositiveScalar
  latency_s: signatures.NonNegativeFloat = 0.0
  sharing: Literal["first_come", "fair"] | None = None

  def send_s(self, num_bytes: float, messages: float = 0) -> float:
    """Returns the seconds of bytes that are sent in consecutive messages."""
    bits = 8 * num_bytes
    return bits / self.bandwidth_bits_per_s + messages * self.latency_s


def ring_messages(num_workers: int, kind: str = "all-reduce") -> int:
  """Returns the number of consecutive messages of a collective in a ring.

  Args:
    num_workers: The number of workers.
    kind: One of `collectives.Kind`.

  >>> ring_messages(8), ring_messages(8, "all-gather")
  (14, 7)
  """
  checks.check_int("num_workers", num_workers, 1)
  checks.check_choice("kind", kind, _COLLECTIVES)
  # An all-reduce is a reduce-scatter and an all-gather, of N - 1 steps each.
  steps = {"all-reduce": 2 * (num_workers - 1), "permute": 1}
  return steps.get(kind, num_workers - 1)


@signatures.explained
@signatures.checked
@dataclasses.dataclass(frozen=True)
class Topology:
  """A graph of links between machines and switches.

  A message takes a route of the fewest hops.

  Attributes:
    links: Links by their two ends, each pair once; full duplex.

  Raises:
    ValueError: If a pair occurs twice, or both ends of a link are equal.

  >>> link = Link(bandwidth_bits_per_s=1e9)
  >>> star({"a": link, "b": link}, "switch").route("a", "b")
  (('a', 'switch'), ('switch', 'b'))
  """

  links: Mapping[Hop, Link]

  def __post_init__(self) -> None:
    neighbours: dict[str, list[str]] = {}
    for one, other in self.links:
      if one == other:
        raise ValueError(f"`links` must have two ends, got {one!r} twice.")
      if one in neighbours.get(other, ()):
        raise ValueError(
          f"`links` must name a pair once, got {one!r} and {other!r} twice; a "
          "link goes both ways."
        )
      neighbours.setdefault(one, []).append(other)
      neighbours.setdefault(other, []).append(one)
    # The dataclass is frozen; neighbours and routes are derived from its links.
    object.__setattr__(self, "_neighbours", neighbours)
    object.__setattr__(self, "_trees", {})

  @property
  def names(self) -> tuple[str, ...]:
    """The machines and switches that have a link."""
    return tuple(self._neighbours)  # type: ignore[attr-defined]

  def link(self, one: str, other: str) -> Link:
    """Returns the link between two neighbours."""
    found = self.links.get((one, other)) or self.links.get((other, one))
    if found is None:
      raise ValueError(f"`links` must have one of {one!r} and {other!r}.")
    return found

  def route(self, source: str, target: str) -> tuple[Hop, ...]:
    """Returns the hops of a message; a message to its sender has none."""
    trees = self._trees  # type: ignore[attr-defined]
    # Routes between a server and all workers, in both directions, are paths of
    # one tree: one search suffices for all of them.
    if source not in trees and target not in trees:
      trees[target] = self._tree(target)
    if target in trees:
      return self._climb(trees[target], source, target)
    back = self._climb(trees[source], target, source)
    return tuple((b, a) for a, b in reversed(back))

  def _tree(self, root: str) -> dict[str, str]:
    """Returns the next hop towards the root from each machine."""
    neighbours = self._neighbours  # type: ignore[attr-defined]
    # A breadth-first search finds a machine first by its fewest hops.
    parents = {root: root}
    queue = collections.deque([root])
    while queue:
      here = queue.popleft()
      for each in neighbours.get(here, ()):
        if each not in parents:
          parents[each] = here
          queue.append(each)
    return parents

  def _climb(
    self, parents: dict[str, str], start: str, root: str
  ) -> tuple[Hop, ...]:
    """Returns the hops from a machine up to the root of a tree."""
    if start not in parents:
      raise ValueError(
        f"There is no route between {start!r} and {root!r}: add a link."
      )
    hops = []
    while start != root:
      hops.append((start, parents[start]))
      start = parents[start]
    return tuple(hops)


@signatures.checked
def star(links: Mapping[str, Link], centre: str) -> Topology:
  """Links machines, by their names, with a centre: a switch, or a server."""
  return Topology({(name, centre): link for name, link in links.items()})
