"""Refusals of machines, links and profiles: an argument and its rule."""

from jdist import cluster
from tests import _refusals

LINK = cluster.Link(1.0)
OUTAGES = (cluster.Outage(1.0, 3.0), cluster.Outage(2.0))


@_refusals.table(
  ("speed", lambda: cluster.Node("a", speed=0.0), "in (0, 1e+09]"),
  ("speed", lambda: cluster.Node("a", speed=1e300), "in (0, 1e+09]"),
  ("jitter", lambda: cluster.Node("a", jitter=-1.0), "in [0, inf]"),
  ("jitter", lambda: cluster.Node("a", jitter=float("inf")), "a finite number"),
  ("jitter", lambda: cluster.Node("a", jitter=20.5), "at most 20"),
  ("speed", lambda: cluster.Node("a", speed=float("inf")), "a finite number"),
  ("name", lambda: cluster.Node(""), "text"),
  ("memory_bytes", lambda: cluster.Node("a", memory_bytes=0), "in (0, inf]"),
  ("factor", lambda: cluster.Slowdown(0.0, 0.0), "in (0, 1e+09]"),
  ("start_s", lambda: cluster.Outage(-1.0), "in [0, inf]"),
  ("end_s", lambda: cluster.Outage(1.0, 1.0), "after `start_s`"),
  (
    "outages",
    lambda: cluster.Node("a", outages=OUTAGES),
    "one after the other",
  ),
  ("nodes", lambda: cluster.Cluster(()), "one at least"),
  ("links", lambda: cluster.Topology({("a", "a"): LINK}), "two ends"),
  (
    "links",
    lambda: cluster.Topology({("a", "b"): LINK, ("b", "a"): LINK}),
    "name a pair once, got 'b' and 'a' twice",
  ),
  ("num_workers", lambda: cluster.ring_messages(0), "an int >= 1"),
  ("bandwidth_bits_per_s", lambda: cluster.Link(0), "in (0, inf]"),
  ("bandwidth_bits_per_s", lambda: cluster.Link(-1), "in (0, inf]"),
  ("bandwidth_bits_per_s", lambda: cluster.Link(float("nan")), "in (0, inf]"),
  ("latency_s", lambda: cluster.Link(1.0, -1), "in [0, inf]"),
  ("latency_s", lambda: cluster.Link(1.0, float("nan")), "a finite number"),
  ("latency_s", lambda: cluster.Link(1.0, float("inf")), "a finite number"),
  ("sharing", lambda: cluster.Link(1.0, sharing="even"), "'fair' or None"),
  (
    "pull_bytes",
    lambda: cluster.Profile(1.0, pull_bytes=-1.0),
    "in [0, inf]",
  ),
  (
    "end_s",
    lambda: cluster.Trace().add("gpu", "matmul", 2.0, 1.0),
    "at least `start_s`, got 2.0 and 1.0",
  ),
  ("end_s", lambda: cluster.Trace().add("gpu", "a", 0.0, float("nan")), "nan"),
  ("trace", lambda: cluster.plot_trace(cluster.Trace(), "none.png"), "a span"),
)
def test_invalid_arguments_raise(argument, call, rule):
  _refusals.check(argument, call, rule)
