"""Clusters as TOML files."""

import difflib
import fnmatch
import math
import pathlib
import tomllib
from collections.abc import Mapping
from typing import Any

from jdist.cluster import _cluster, _links, _node, _profile, _topology

_TOP = ("server", "nodes", "links", "profile")
_NODE = (
  "name", "count", "speed", "jitter", "memory_gb", "slowdowns", "outages",
)  # fmt: skip
_SLOWDOWN = ("start_s", "end_s", "factor")
_OUTAGE = ("start_s", "end_s")
_LINK = ("between", "bandwidth_gbit_per_s", "latency_ms", "sharing")
_PROFILE = (
  "name", "seconds_per_sample", "seconds_per_batch", "bytes_per_sample",
  "bytes_of_model", "pull_bytes", "push_bytes", "seconds_per_encoding",
)  # fmt: skip


def load_cluster(
  path: str | pathlib.Path,
) -> tuple[_cluster.Cluster, _profile.Profile | None]:
  """Reads a cluster, and the profile of a model if there is one.

  The file::

      server = "server"            # what runs the parameter server

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

  Without links messages take no time.  Of two links between the same ends the
  later one counts, in whatever order it names them.

  Args:
    path: of the file.

  Returns:
    The cluster and the profile, or None.

  Raises:
    ValueError: when the file is no TOML, has a key that is not known, or a
      value is out of its range; the message names the file and the place.
    FileNotFoundError: when there is no such file.
  """
  path = pathlib.Path(path)
  try:
    found = tomllib.loads(path.read_text())
  except tomllib.TOMLDecodeError as error:
    raise ValueError(f"{path} is no TOML file: {error}") from None
  try:
    return _read(found)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from None


def _read(
  found: Mapping[str, Any],
) -> tuple[_cluster.Cluster, _profile.Profile | None]:
  _check_keys("the file", found, _TOP)
  tables = found.get("nodes", [])
  if not isinstance(tables, list) or not tables:
    raise ValueError("`nodes` must be one [[nodes]] table at least.")
  nodes: list[_node.Node] = []
  for i, table in enumerate(tables):
    nodes += _read_nodes(table, f"[[nodes]] number {i + 1}")
  server = found.get("server", "server")
  topology = None
  if found.get("links"):
    names = [node.name for node in nodes] + [server]
    topology = _read_links(found["links"], names)
  profile = None
  if "profile" in found:
    _check_keys("[profile]", found["profile"], _PROFILE)
    _check_numbers("[profile]", found["profile"], except_for=("name",))
    profile = _profile.Profile(**{"seconds_per_sample": 0, **found["profile"]})
  return _cluster.Cluster(tuple(nodes), topology, server), profile


def _read_nodes(table: Any, place: str) -> list[_node.Node]:
  _check_keys(place, table, _NODE)
  if "name" not in table:
    raise ValueError(f"{place} must have a `name`.")
  _check_numbers(place, table, except_for=("name", "slowdowns", "outages"))
  count = table.get("count")
  if count is not None and (not isinstance(count, int) or count < 1):
    raise ValueError(f"`count` of {place} must be an int >= 1, got {count!r}.")
  slowdowns = [
    _node.Slowdown(**each)
    for each in _read_times(table, "slowdowns", _SLOWDOWN, place)
  ]
  outages = [
    _node.Outage(**each)
    for each in _read_times(table, "outages", _OUTAGE, place)
  ]
  memory = table.get("memory_gb")
  names = (
    [table["name"]]
    if count is None
    else [f"{table['name']}{i}" for i in range(count)]
  )
  return [
    _node.Node(
      name,
      speed=table.get("speed", 1.0),
      jitter=table.get("jitter", 0.0),
      memory_bytes=math.inf if memory is None else 1e9 * memory,
      slowdowns=tuple(slowdowns),
      outages=tuple(outages),
    )
    for name in names
  ]


def _read_times(
  table: Mapping[str, Any], key: str, keys: tuple[str, ...], place: str
) -> list[dict[str, float]]:
  """Reads times from a list of tables, in which `end_s` may be left out."""
  times = table.get(key, [])
  within = f"`{key}` of {place}"
  if not isinstance(times, list):
    raise ValueError(f"{within} must be a list of tables, got {times!r}.")
  for each in times:
    _check_keys(within, each, keys)
    _check_numbers(within, each)
    missing = [name for name in keys if name not in each and name != "end_s"]
    if missing:
      raise ValueError(
        f"{within} must have {missing[0]!r}; only `end_s` may be left out."
      )
  return times


def _read_links(tables: Any, names: list[str]) -> _topology.Topology:
  links: dict[tuple[str, str], _links.Link] = {}
  for i, table in enumerate(tables):
    place = f"[[links]] number {i + 1}"
    _check_keys(place, table, _LINK)
    ends = table.get("between")
    if not isinstance(ends, list) or len(ends) != 2:
      raise ValueError(f"`between` of {place} must be two names, got {ends!r}.")
    if "bandwidth_gbit_per_s" not in table:
      raise ValueError(f"{place} must have a `bandwidth_gbit_per_s`.")
    _check_numbers(place, table, except_for=("between", "sharing"))
    link = _links.Link(
      bandwidth_bits_per_s=1e9 * table["bandwidth_gbit_per_s"],
      latency_s=1e-3 * table.get("latency_ms", 0.0),
      sharing=table.get("sharing", "first_come"),
    )
    for one in _matching(ends[0], names, place):
      for other in _matching(ends[1], names, place):
        if one != other:
          ends_before = (other, one) in links
          links[(other, one) if ends_before else (one, other)] = link
  return _topology.Topology(links)


def _matching(pattern: Any, names: list[str], place: str) -> list[str]:
  if not isinstance(pattern, str):
    raise ValueError(f"`between` of {place} must be names, got {pattern!r}.")
  if not any(letter in pattern for letter in "*?["):
    # A machine, or a switch, which nothing else declares.
    return [pattern]
  found = fnmatch.filter(names, pattern)
  if not found:
    raise ValueError(
      f"`between` of {place} must name machines, and {pattern!r} matches none "
      f"of {', '.join(names)}."
    )
  return found


def _check_keys(place: str, table: Any, known: tuple[str, ...]) -> None:
  if not isinstance(table, Mapping):
    raise ValueError(f"{place} must be a table, got {table!r}.")
  for key in table:
    if key not in known:
      near = difflib.get_close_matches(key, known, n=1)
      remedy = (
        f"did you mean {near[0]!r}?"
        if near
        else "known are " + (", ".join(map(repr, known)) + ".")
      )
      raise ValueError(f"{key!r} is no key of {place}; {remedy}")


def _check_numbers(
  place: str, table: Mapping[str, Any], except_for: tuple[str, ...] = ()
) -> None:
  for key, value in table.items():
    if key in except_for:
      continue
    if isinstance(value, bool) or not isinstance(value, int | float):
      raise ValueError(f"`{key}` of {place} must be a number, got {value!r}.")
