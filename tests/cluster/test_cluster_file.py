"""Clusters are read from TOML files."""

import math
import textwrap

import pytest

from jdist import cluster

FILE = """
server = "ps"

[[nodes]]
name = "fast"
count = 2
speed = 8.0
jitter = 0.1
memory_gb = 16
slowdowns = [{ start_s = 60, end_s = 90, factor = 0.5 }]

[[nodes]]
name = "slow"
outages = [{ start_s = 120, end_s = 150 }, { start_s = 200 }]

[[links]]
between = ["fast*", "switch"]
bandwidth_gbit_per_s = 1.0
latency_ms = 0.5
sharing = "fair"

[[links]]
between = ["slow", "switch"]
bandwidth_gbit_per_s = 0.1

[[links]]
between = ["ps", "switch"]
bandwidth_gbit_per_s = 10.0

[profile]
seconds_per_sample = 0.002
pull_bytes = 400_000
"""


def load(tmp_path, text):
  path = tmp_path / "cluster.toml"
  path.write_text(textwrap.dedent(text))
  return cluster.load_cluster(path)


def test_file_describes_a_whole_cluster(tmp_path):
  found, profile = load(tmp_path, FILE)
  assert found.names == ("fast0", "fast1", "slow")
  fast, slow = found.node("fast1"), found.node("slow")
  assert (fast.speed, fast.jitter, fast.memory_bytes) == (8.0, 0.1, 16e9)
  assert fast.slowdowns == (cluster.Slowdown(60, 0.5, 90),)
  assert slow.outages == (
    cluster.Outage(120, 150),
    cluster.Outage(200, math.inf),
  )
  assert found.server == "ps"
  link = found.topology.link("switch", "fast0")
  assert link == cluster.Link(1e9, 5e-4, "fair")
  assert found.topology.route("slow", "ps") == (
    ("slow", "switch"),
    ("switch", "ps"),
  )
  assert profile == cluster.Profile(0.002, pull_bytes=400_000)


def test_links_and_profile_may_be_left_out(tmp_path):
  found, profile = load(tmp_path, '[[nodes]]\nname = "a"\n')
  assert (found.topology, profile) == (None, None)


def test_machine_may_be_the_server_and_a_batch_all_that_costs(tmp_path):
  text = """
  server = "a"
  nodes = [{ name = "a" }]

  [profile]
  name = "toy"
  seconds_per_batch = 0.5
  """
  found, profile = load(tmp_path, text)
  assert (found.server, found.topology) == ("a", None)
  assert profile == cluster.Profile(0.0, 0.5, name="toy")


WRONG = {
  "no TOML": ("nodes = [", "must be a TOML file"),
  "too deep": ("nodes = " + "[" * 3000 + "]" * 3000, "must be a TOML file"),
  "too many digits": ("x = " + "1" * 5000, "must be a TOML file"),
  "a server without links": (
    'server = "z"\n[[nodes]]\nname = "a"\n',
    "`server` must be named by a link, got z",
  ),
  "no nodes": ("server = 'a'", "`nodes` must"),
  "typo": (FILE.replace("speed =", "sped ="), "did you mean 'speed'"),
  "typo in the file": ("noodes = 1", "did you mean 'nodes'"),
  "unknown key": (FILE.replace("jitter", "colour"), "'colour' is no key of"),
  "negative bandwidth": (
    FILE.replace("= 10.0", "= -10.0"),
    "`bandwidth_gbit_per_s` of .* > 0, got -10.0",
  ),
  "no bandwidth at all": (
    FILE.replace("= 10.0", "= 0"),
    "`bandwidth_gbit_per_s` of .* > 0, got 0",
  ),
  "negative latency": (
    FILE.replace("latency_ms = 0.5", "latency_ms = -0.5"),
    "`latency_ms` of .* >= 0, got -0.5",
  ),
  "no memory": (
    FILE.replace("memory_gb = 16", "memory_gb = 0"),
    "`memory_gb` of .* > 0, got 0",
  ),
  "speed of 0": (FILE.replace("8.0", "0.0"), "number 1: `speed` must be in"),
  "a number beyond floats": (
    FILE.replace("memory_gb = 16", "memory_gb = 1" + 400 * "0"),
    "`memory_gb` of .* a number > 0, got an int",
  ),
  "speed in words": (FILE.replace("8.0", "'fast'"), "`speed` of .* a number"),
  "count": (FILE.replace("count = 2", "count = 0"), "`count` must"),
  "true": (FILE.replace("count = 2", "count = true"), "`count` of"),
  "huge": (FILE.replace("count = 2", "count = 100_001"), "from 1 to 100000"),
  "no route": (FILE.replace('"slow", "switch"', '"slow", "swich"'), "no route"),
  "unknown server": (FILE.replace('"ps"\n', '"pss"\n', 1), "`server` must"),
  "no such machine": (FILE.replace('"fast*"', '"quick*"'), "matches none"),
  "sharing": (FILE.replace('"fair"', '"fairly"'), "`sharing` must be"),
  "outage": (FILE.replace("end_s = 150", "end_s = 100"), "`end_s` must lie"),
  "two of a name": (FILE.replace('"slow"', '"fast0"'), "`nodes` must differ"),
  "a slow-down's factor": (
    FILE.replace(", factor = 0.5", ""),
    "`slowdowns` must have a `factor`",
  ),
  "links of a number": ("links = 3\nnodes = []", "`links` must be .*, got 3"),
  "nodes of a text": ('nodes = "a"', "`nodes` must be .*, got 'a'"),
  "slow-downs of one table": (
    FILE.replace("[{ start_s = 60", "{ start_s = 60").replace("5 }]", "5 }"),
    "`slowdowns` must be a list of tables, got {",
  ),
  "an outage of a number": (
    FILE.replace("[{ start_s = 120, end_s = 150 }, ", "[3, "),
    "`outages` must be a table, got 3",
  ),
  "one end of a link": (
    FILE.replace('["slow", "switch"]', '["slow"]'),
    r"`between` of .* number 2 must be two names, got \['slow'\]",
  ),
  "ends of a link in one text": (
    FILE.replace('["slow", "switch"]', '"up"'),
    "`between` of .* number 2 must be two names, got 'up'",
  ),
  "a number as an end": (
    FILE.replace('["slow", "switch"]', '["slow", 7]'),
    "`between` of .* number 2 must be names, got 7",
  ),
  "jitter beyond all": (FILE.replace("0.1", "1e308"), "`jitter` must be at mo"),
  "no name": ("[[nodes]]\ncount = 2", "number 1 must have a `name`"),
  "no bandwidth": (
    FILE.replace("bandwidth_gbit_per_s = 1.0", ""),
    "must have a `bandwidth_gbit_per_s`",
  ),
  "profile": (FILE.replace("0.002", "0"), "`seconds_per_sample` or"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_raise_one_line_with_the_file(tmp_path, name):
  text, message = WRONG[name]
  with pytest.raises(ValueError, match=message) as error:
    load(tmp_path, text)
  assert "cluster.toml" in str(error.value)
  assert "\n" not in str(error.value)


def test_name_with_brackets_is_no_pattern(tmp_path):
  text = """
  [[nodes]]
  name = "gpu[0]"

  [[links]]
  between = ["gpu[0]", "server"]
  bandwidth_gbit_per_s = 1.0
  """
  found, _ = load(tmp_path, text)
  assert list(found.topology.links) == [("gpu[0]", "server")]


@pytest.mark.parametrize("pattern", ["gpu?", "gpu[01]", "*u*"])
def test_pattern_names_several_machines(tmp_path, pattern):
  text = f"""
  [[nodes]]
  name = "gpu"
  count = 2

  [[links]]
  between = ["{pattern}", "server"]
  bandwidth_gbit_per_s = 1.0
  """
  found, _ = load(tmp_path, text)
  assert list(found.topology.links) == [("gpu0", "server"), ("gpu1", "server")]


def test_later_link_between_the_same_ends_counts(tmp_path):
  for ends in ('["a0", "switch"]', '["switch", "a0"]'):
    path = tmp_path / "cluster.toml"
    path.write_text(
      '[[nodes]]\nname = "a"\ncount = 2\n'
      '[[links]]\nbetween = ["a*", "switch"]\nbandwidth_gbit_per_s = 1.0\n'
      '[[links]]\nbetween = ["server", "switch"]\nbandwidth_gbit_per_s = 1.0\n'
      f"[[links]]\nbetween = {ends}\nbandwidth_gbit_per_s = 0.1\n"
    )
    machines, _ = cluster.load_cluster(path)
    links = machines.topology.links
    assert len(links) == 3
    assert links["a0", "switch"].bandwidth_bits_per_s == 1e8
    assert links["a1", "switch"].bandwidth_bits_per_s == 1e9
