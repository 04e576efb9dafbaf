"""A cluster: machines, the links between them, and the file of both."""

import collections
import dataclasses
import difflib
import fnmatch
import math
import pathlib
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jdist import checks, signatures
from jdist.cluster import _node, _topology

# Numbers of a table, and then its other keys.
_NODE = ("count", "speed", "jitter", "memory_gb"), (
  "name", "slowdowns", "outages",
)  # fmt: skip
_LINK = ("bandwidth_gbit_per_s", "latency_ms"), ("between", "sharing")
_PROFILE = tuple(
  x.name for x in dataclasses.fields(_node.Profile) if x.name != "name"
)


@signatures.explained
@signatures.checked
@dataclasses.dataclass(frozen=True)
class Cluster:
  """Machines and their links.

  Attributes:
    nodes: The machines that compute.
    topology: Their links, or None if messages take no time.
    server: The name of the machine that runs the parameter server, one of the
      topology's.

  Raises:
    ValueError: If names are not unique, or no route links a machine with the
      server.
  """

  nodes: tuple[_node.Node, ...]
  topology: _topology.Topology | None = None
  server: str = "server"

  def __post_init__(self) -> None:
    if not self.nodes:
      raise ValueError("`nodes` must be one at least, got none.")
    name, times = collections.Counter(self.names).most_common(1)[0]
    if times > 1:
      raise ValueError(f"`nodes` must differ in name, got {name!r} twice.")
    known = self.topology.names if self.topology else ("server", *self.names)
    if self.server not in known:
      raise ValueError(f"`server` must be named by a link, got {self.server}.")
    if self.topology is not None:
      # A machine without a route would be noticed in the middle of a run.
      for name in self.names:
        self.topology.route(name, self.server)

  @property
  def names(self) -> tuple[str, ...]:
    """The machines' names, in order."""
    return tuple(node.name for node in self.nodes)

  def node(self, name: str) -> _node.Node:
    """Returns a machine."""
    if name in self.names:
      return self.nodes[self.names.index(name)]
    raise ValueError(
      f"`name` must be one of {', '.join(self.names)}, got {checks.show(name)}."
    )

  def check_batches(
    self, profile: _node.Profile, samples: int | Sequence[int]
  ) -> None:
    """Raises a ValueError when a machine's memory does not hold its batch.

    The `samples` are one size for all batches, or a size for each machine.
    """
    if not isinstance(samples, Sequence | np.ndarray):
      samples = [checks.check_int("samples", samples, 0)] * len(self.nodes)
    if len(samples) != (number := len(self.nodes)):
      raise ValueError(
        f"`samples` must be an int or a list of {number}, got "
        f"{checks.show(samples)}. Give a size for each machine."
      )
    for node, size in zip(self.nodes, samples, strict=True):
      most = profile.max_samples(node.memory_bytes)
      if most is not None and size > most:
        raise ValueError(
          f"A batch of {size} samples takes "
          f"{profile.memory_bytes(size) / 1e9:.3g} GB, and {node.name!r} has "
          f"{node.memory_bytes / 1e9:.3g} GB: {most} samples fit."
        )


@signatures.checked
def workers(
  speeds: Iterable[float],
  *,
  link: _topology.Link | None = None,
  server_link: _topology.Link | None = None,
  jitter: float = 0.0,
) -> Cluster:
  """Makes a cluster of workers around a server.

  Args:
    speeds: The workers' speeds; they are named `worker0` and so on.
    link: Each worker's link to the network; messages take no time if None.
    server_link: The server's link to the network; a worker's if None.
    jitter: Every worker's jitter, as in `Node`.

  >>> workers([8, 4, 1]).names
  ('worker0', 'worker1', 'worker2')
  """
  nodes = tuple(
    _node.Node(f"worker{i}", speed=speed, jitter=jitter)
    for i, speed in enumerate(speeds)
  )
  if link is None:
    return Cluster(nodes)
  links = {x.name: link for x in nodes} | {"server": server_link or link}
  return Cluster(nodes, _topology.star(links, "switch"))


@signatures.checked
def load_cluster(
  path: str | pathlib.Path,
) -> tuple[Cluster, _node.Profile | None]:
  """Reads a cluster, and the profile of a model if there is one.

  The file::

      server = "server"            # the node of the parameter server

      [[nodes]]
      name = "fast"                # with a count: fast0, fast1
      count = 2
      speed = 8.0                  # relative to the profile's machine
      jitter = 0.1
      memory_gb = 16
      slowdowns = [{ start_s = 60, end_s = 90, factor = 0.5 }]
      outages = [{ start_s = 120, end_s = 150 }]

      [[links]]
      between = ["fast*", "switch"]
      bandwidth_gbit_per_s = 1.0
      latency_ms = 0.5
      sharing = "fair"             # or "first_come"

      [[links]]
      between = ["server", "switch"]
      bandwidth_gbit_per_s = 10.0

      [profile]
      seconds_per_sample = 0.002
      pull_bytes = 400_000
      push_bytes = 400_000

  Without links messages take no time.  If two links have the same ends, the
  later one counts, in whatever order it names them.

  Raises:
    ValueError: If the file is not TOML, has an unknown key, or a value is out
      of its range; the message names the file and the table.
    FileNotFoundError: If the file does not exist.
  """
  path = pathlib.Path(path)
  found = checks.read_text(path, tomllib.loads, "TOML")
  try:
    return _read(found)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from None


def _read(found: Mapping[str, Any]) -> tuple[Cluster, _node.Profile | None]:
  _check("the file", found, (), ("server", "nodes", "links", "profile"))
  for key in ("nodes", "links"):
    if not isinstance(found.get(key, []), list):
      raise ValueError(f"`{key}` must be [[{key}]] tables, got {found[key]!r}.")
  nodes: list[_node.Node] = []
  for i, table in enumerate(found.get("nodes", [])):
    nodes += _read_nodes(table, f"[[nodes]] number {i + 1}")
  server = found.get("server", "server")
  topology = None
  if found.get("links"):
    names = [node.name for node in nodes] + [server]
    topology = _read_links(found["links"], names)
  profile = None
  if "profile" in found:
    _check("[profile]", found["profile"], _PROFILE, ("name",))
    profile = _node.Profile(**{"seconds_per_sample": 0, **found["profile"]})
  return Cluster(tuple(nodes), topology, server), profile


def _read_nodes(table: Any, place: str) -> list[_node.Node]:
  _check(place, table, *_NODE, needed=["name"])
  name, count = table["name"], table.get("count")
  if count is not None:
    checks.check_int("count", count, 1, 10**5, f"It is that of {place}.")
  memory = table.get("memory_gb")
  try:
    node = _node.Node(
      name, speed=table.get("speed", 1.0), jitter=table.get("jitter", 0.0),
      memory_bytes=math.inf if memory is None else 1e9 * memory,
      slowdowns=_read_times(table, "slowdowns", _node.Slowdown),
      outages=_read_times(table, "outages", _node.Outage),
    )  # fmt: skip
  except ValueError as error:
    raise ValueError(f"{place}: {error}") from None
  if count is None:
    return [node]
  # Machines of one table differ in their names alone; their jitter is drawn
  # from a stream of each name, so that they still draw other numbers.
  return [dataclasses.replace(node, name=f"{name}{i}") for i in range(count)]


def _read_times(
  table: Mapping[str, Any], key: str, kind: Callable[..., Any]
) -> tuple[Any, ...]:
  """Reads slow-downs or outages from a list of tables."""
  times = table.get(key, [])
  within = f"`{key}`"
  if not isinstance(times, list):
    raise ValueError(f"{within} must be a list of tables, got {times!r}.")
  keys = [x.name for x in dataclasses.fields(kind)]  # type: ignore[arg-type]
  for each in times:
    _check(within, each, keys, needed=[x for x in keys if x != "end_s"])
  return tuple(kind(**each) for each in times)


def _read_links(tables: Any, names: list[str]) -> _topology.Topology:
  links: dict[tuple[str, str], _topology.Link] = {}
  for i, table in enumerate(tables):
    place = f"[[links]] number {i + 1}"
    _check(place, table, *_LINK, needed=["bandwidth_gbit_per_s"])
    ends = table.get("between")
    if not isinstance(ends, list) or len(ends) != 2:
      raise ValueError(f"`between` of {place} must be two names, got {ends!r}.")
    link = _topology.Link(
      bandwidth_bits_per_s=1e9 * table["bandwidth_gbit_per_s"],
      latency_s=1e-3 * table.get("latency_ms", 0.0),
      sharing=table.get("sharing"),
    )
    for one in _matching(ends[0], names, place):
      for other in _matching(ends[1], names, place):
        # A pattern that matches both ends links no machine with itself.
        if one != other:
          # A pair has one key, so that a later table replaces an earlier one
          # that names the ends in the other order.
          ends_before = (other, one) in links
          links[(other, one) if ends_before else (one, other)] = link
  return _topology.Topology(links)


def _matching(pattern: Any, names: list[str], place: str) -> list[str]:
  if not isinstance(pattern, str):
    raise ValueError(f"`between` of {place} must be names, got {pattern!r}.")
  if pattern in names or not any(letter in pattern for letter in "*?["):
    # A machine, or a switch, which nothing else declares.
    return [pattern]
  found = fnmatch.filter(names, pattern)
  if not found:
    raise ValueError(
      f"`between` of {place} must name machines, and {pattern!r} matches none "
      f"of {', '.join(names)}."
    )
  return found


def _check(
  place: str,
  table: Any,
  numbers: Collection[str],
  others: Collection[str] = (),
  needed: Collection[str] = (),
) -> None:
  """Raises a ValueError for a wrong key, or a value that is no number."""
  if not isinstance(table, Mapping):
    raise ValueError(f"{place} must be a table, got {table!r}.")
  known = (*numbers, *others)
  for key, value in table.items():
    if key not in known:
      near = difflib.get_close_matches(key, known, n=1) or known
      words = " or ".join(map(repr, near))
      raise ValueError(f"{key!r} is no key of {place}; did you mean {words}?")
    # Python counts true and false as ints, of any size.
    sign = ">" if key in ("bandwidth_gbit_per_s", "memory_gb") else ">="
    fits = checks.is_scalar(value) and (
      value > 0 or (value == 0 and sign == ">=")
    )
    if key in numbers and not fits:
      rule = f"`{key}` of {place} must be a number {sign} 0"
      raise ValueError(f"{rule}, got {checks.show(value)}.")
  for key in needed:
    if key not in table:
      raise ValueError(f"{place} must have a `{key}`.")
