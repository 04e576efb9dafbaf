"""Topologies: the links between machines, and the routes of messages."""

import collections
import dataclasses
from collections.abc import Mapping

from jdist import signatures
from jdist.cluster import _links

Hop = tuple[str, str]


@signatures.checked
@dataclasses.dataclass(frozen=True)
class Topology:
  """A graph of links between machines and switches.

  A message takes a route of the fewest hops.

  Attributes:
    links: Links by their two ends, each pair once; full duplex.

  Raises:
    ValueError: when a pair occurs twice, or both ends of a link are equal.

  >>> link = _links.Link(bandwidth_bits_per_s=1e9)
  >>> star({"a": link, "b": link}, "switch").route("a", "b")
  (('a', 'switch'), ('switch', 'b'))
  """

  links: Mapping[Hop, _links.Link]

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

  def link(self, one: str, other: str) -> _links.Link:
    """Returns the link between two neighbours.

    Raises:
      ValueError: when there is no such link.
    """
    found = self.links.get((one, other)) or self.links.get((other, one))
    if found is None:
      raise ValueError(f"There is no link between {one!r} and {other!r}.")
    return found

  def route(self, source: str, target: str) -> tuple[Hop, ...]:
    """Returns the hops of a message; a message to its sender has none.

    Raises:
      ValueError: when no route exists.
    """
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
    if start not in parents:
      raise ValueError(
        f"There is no way between {start!r} and {root!r}: add a link."
      )
    hops = []
    while start != root:
      hops.append((start, parents[start]))
      start = parents[start]
    return tuple(hops)


@signatures.checked
def star(links: Mapping[str, _links.Link], centre: str) -> Topology:
  """Links all machines with a centre: a switch, or a server.

  Args:
    links: Each machine's link to the centre, by the machine's name.
    centre: The centre's name.
  """
  return Topology({(name, centre): link for name, link in links.items()})
