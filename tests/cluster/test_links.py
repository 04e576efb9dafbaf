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
