"""Forecasts of steps, from a program that XLA made for 8 H200."""

import pathlib
import re

import pytest

from jdist import (
  cluster,
  profiling,
)

_TEXT = (pathlib.Path(__file__).parent / "delayed_on_8_h200.hlo").read_text()
_PRODUCT = 2 * 1024**3  # Operations of one of the four products.
_SENT = 2 * 7 / 8 * 2 * 1024**2  # Bytes of the mean, in a ring.
# A product takes a second, and nothing else any time.
_DEVICE = cluster.Device("toy", _PRODUCT, memory_bytes_per_s=1e30)


def _link(send_s):
  return cluster.Link(8 * _SENT / send_s)


def _undelayed():
  """The text with the mean waited for at once, as if it were needed."""
  done = re.search(r"  %all-reduce-done = .*\n", _TEXT)[0]
  start = re.search(r"  %all-reduce-start = .*\n", _TEXT)[0]
  return _TEXT.replace(done, "").replace(start, start + done)


def test_message_from_the_state_hides_under_all_products():
  found = profiling.forecast(_TEXT, _DEVICE, _link(3.0))
  (sent,) = found.collectives
  assert (sent.kernels, sent.products) == (4, 4)
  assert sent.wire_bytes == found.wire_bytes == _SENT
  assert sent.compute_s == pytest.approx(4.0)
  assert sent.send_s == pytest.approx(3.0)
  assert sent.hidden_share == found.hidden_share == 1.0
  assert found.end_s == pytest.approx(4.0)
  assert found.flops == 4 * _PRODUCT


def test_without_the_delay_nothing_is_hidden():
  found = profiling.forecast(_undelayed(), _DEVICE, _link(3.0))
  (sent,) = found.collectives
  assert (sent.kernels, sent.products, sent.compute_s) == (0, 0, 0)
  assert sent.hidden_share == found.hidden_share == 0.0
  assert found.end_s == pytest.approx(7.0)


def test_message_longer_than_the_computation_is_exposed():
  found = profiling.forecast(_TEXT, _DEVICE, _link(10.0))
  (sent,) = found.collectives
  assert sent.exposed_s == pytest.approx(6.0)
  assert sent.hidden_share == pytest.approx(0.4)
  trace = found.trace
  assert trace.end_s == found.end_s
  # The device computes or waits all the time.
  assert trace.utilisation() == pytest.approx({"device": 1.0, "link": 1.0})
  waits = [span.seconds for span in trace if span.kind == "wait"]
  assert waits == pytest.approx([6.0])


def test_hidden_share_of_a_queued_message_is_not_negative():
  text = """
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %a = f32[8]{0} all-reduce-start(%x), replica_groups={{0,1}}
  %b = f32[8]{0} all-reduce-start(%x), replica_groups={{0,1}}
  %e = f32[8]{0} all-reduce-done(%b)
  ROOT %d = f32[8]{0} all-reduce-done(%a)
}"""
  found = profiling.forecast(text, _DEVICE, cluster.Link(8.0))
  first, second = found.collectives
  assert first.exposed_s == 0.0 and second.exposed_s == 64.0
  assert second.hidden_share == found.hidden_share == 0.0
  # The device waits for the second one while the first is still sent.
  spans = [(x.kind, x.start_s, x.end_s) for x in found.trace]
  assert spans == [
    ("hidden", 0.0, 32.0), ("wait", 0.0, 64.0), ("exposed", 32.0, 64.0),
  ]  # fmt: skip


def test_forecast_matches_hand_computation():
  """One second a byte of memory, one second a byte on the link."""
  text = """
ENTRY %main (x: f32[10], y: f32[4], z: f32[6]) -> f32[4] {
  %x = f32[10]{0} parameter(0)
  %y = f32[4]{0} parameter(1)
  %z = f32[6]{0} parameter(2)
  %a = f32[10]{0} all-reduce-start(%x), replica_groups={{0,1}}
  %b = f32[4]{0} all-reduce-start(%y), replica_groups={{0,1}}
  %long = f32[6]{0} negate(%z)
  %c = f32[10]{0} all-reduce-done(%a)
  ROOT %d = f32[4]{0} all-reduce-done(%b)
}"""
  device = cluster.Device("toy", flops_per_s=1e12, memory_bytes_per_s=1.0)
  found = profiling.forecast(text, device, cluster.Link(8.0))
  # 40 and 16 bytes on the link, 48 in memory: a is hidden under the kernel, b
  # comes 8 seconds late.
  assert (found.compute_s, found.send_s) == (48.0, 56.0)
  assert (found.end_s, found.exposed_s) == (56.0, 8.0)
  assert [sent.exposed_s for sent in found.collectives] == [0.0, 8.0]
  assert found.hidden_share == 1 - 8 / 56
  assert [sent.products for sent in found.collectives] == [0, 0]
  assert [sent.compute_s for sent in found.collectives] == [48.0, 48.0]
  assert [span.kind for span in found.trace if span.name == "long"] == ["other"]


def test_step_that_sends_nothing_hides_all_of_it():
  found = profiling.forecast(
    """
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %y = f32[8]{0} negate(%x)
}""",
    _DEVICE,
    cluster.Link(8.0),
  )
  assert (found.send_s, found.hidden_share) == (0.0, 1.0)


def test_collective_without_done_ends_with_the_program():
  text = """
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %a = f32[8]{0} all-reduce-start(%x), replica_groups={{0,1}}
  ROOT %y = f32[8]{0} negate(%x)
}"""
  found = profiling.forecast(text, _DEVICE, cluster.Link(8.0))
  assert (found.end_s, found.exposed_s) == (32.0, 32.0)
  assert found.collectives[0].kernels == 1


@pytest.mark.parametrize(
  ("operation", "messages"),
  [("all-reduce", 14), ("all-gather", 7), ("collective-permute", 1)],
)
def test_latencies_of_a_ring_add_up(operation, messages):
  groups = (
    "source_target_pairs={{0,1},{1,0}}"
    if operation == "collective-permute"
    else "replica_groups={{0,1,2,3,4,5,6,7}}"
  )
  text = f"""
ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %a = f32[8]{{0}} {operation}(%x), {groups}
}}"""
  link = cluster.Link(1e30, latency_s=1.0)
  found = profiling.forecast(text, _DEVICE, link)
  assert found.collectives[0].send_s == pytest.approx(messages)
