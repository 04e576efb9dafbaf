"""Seconds of messages on links."""

import pytest

from jdist import cluster


def test_seconds_are_bits_over_bandwidth_and_messages_times_latency():
  link = cluster.Link(bandwidth_bits_per_s=100e6, latency_s=1e-3)
  # 12.5 MB are 100 Mbit: one second; ten messages are 10 ms more.
  assert link.send_s(12.5e6, messages=10) == pytest.approx(1.01)
  assert link.send_s(0) == 0


def test_ring_all_reduce_has_two_rounds_of_messages():
  assert [cluster.ring_messages(n) for n in (1, 2, 8)] == [0, 2, 14]


@pytest.mark.parametrize(
  ("kind", "messages"),
  [("all-reduce", 6), ("all-gather", 3), ("reduce-scatter", 3),
   ("all-to-all", 3), ("permute", 1)],
)  # fmt: skip
def test_messages_of_a_ring_follow_the_kind_of_collective(kind, messages):
  assert cluster.ring_messages(4, kind) == messages


def test_server_has_its_own_link_or_a_workers_one():
  slow, fast = cluster.Link(1e6), cluster.Link(1e9, 0.5)
  for given, wanted in ((None, slow), (fast, fast)):
    machines = cluster.workers([1.0, 2.0], link=slow, server_link=given)
    found = [
      machines.topology.link(name, "switch")
      for name in (*machines.names, "server")
    ]
    assert found == [slow, slow, wanted]
