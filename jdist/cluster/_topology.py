"""Topologies: what is linked with what, and by which way messages go."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping

from jdist.cluster import _links

Hop = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Topology:
  """A graph of links between machines and switches.

  A message takes a way of the fewest hops.

  Attributes:
    links: by their two ends, each pair once; full duplex.

  Raises:
    ValueError: when a pair comes twice, or something is linked with itself.

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
    object.__setattr__(self, "_neighbours", neighbours)
    object.__setattr__(self, "_trees", {})

  @property
  def names(self) -> tuple[str, ...]:
    """The machines and switches that have a link."""
    return tuple(self._neighbours)  # type: ignore[attr-defined]

  def link(self, one: str, other: str) -> _links.Link:
    """Returns the link between two neighbours.

    Raises:
      ValueError: when they are none.
    """
    found = self.links.get((one, other)) or self.links.get((other, one))
    if found is None:
      raise ValueError(f"There is no link between {one!r} and {other!r}.")
    return found

  def route(self, source: str, target: str) -> tuple[Hop, ...]:
    """Returns the hops of a message, none to oneself.

    Raises:
      ValueError: when there is no way.
    """
    trees = self._trees  # type: ignore[attr-defined]
    # Ways from a server to each worker, and back, are of one tree.
    if source not in trees and target not in trees:
      trees[target] = self._tree(target)
    if target in trees:
      return self._climb(trees[target], source, target)
    back = self._climb(trees[source], target, source)
    return tuple((b, a) for a, b in reversed(back))

  def _tree(self, root: str) -> dict[str, str]:
    neighbours = self._neighbours  # type: ignore[attr-defined]
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


def star(links: Mapping[str, _links.Link], centre: str) -> Topology:
  """Links everything with a centre: a switch, or a server itself.

  Args:
    links: of each machine to the centre, by the machine's name.
    centre: its name.
  """
  return Topology({(name, centre): link for name, link in links.items()})


def ring(names: Iterable[str], link: _links.Link) -> Topology:
  """Links each with the next, and the last with the first.

  >>> link = _links.Link(bandwidth_bits_per_s=1e9)
  >>> sorted(ring("abc", link).links)
  [('a', 'b'), ('b', 'c'), ('c', 'a')]
  """
  all_names = list(names)
  if len(all_names) < 3:
    raise ValueError(f"`names` must be three at least, got {all_names}.")
  after = [*all_names[1:], all_names[0]]
  return Topology(dict.fromkeys(zip(all_names, after, strict=True), link))
