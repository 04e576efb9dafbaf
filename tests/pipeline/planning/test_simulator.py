"""Tables on a virtual clock: times, waiting, memory and links."""

import dataclasses
import itertools

import pytest

from jdist import cluster, codecs, pipeline
from jdist.pipeline.planning import _simulator
from jdist.pipeline.schedule import _table

_Cost = pipeline.LayerCost
_EQUAL = [_Cost("stage", 1.0, 2.0)] * 4


def _simulate(table, costs=_EQUAL, machines=None, **options):
  machines = machines or cluster.workers([1.0] * len(table.devices))
  return pipeline.simulate(table, costs, machines, **options)


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b", "zb_h1", "2bw"])
def test_times_without_links_follow_from_the_order(name):
  table = pipeline.make_table(name, 4, 8)
  times = _simulate(table)
  starts = _table.start_times(
    table, lambda x: _simulator.action_s(_EQUAL[0], x.op)
  )
  assert times.starts_s == starts


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 2), (4, 8), (8, 32)])
def test_bubbles_match_the_formulas(stages, microbatches):
  fill = stages - 1
  for name, wanted in {
    "naive": fill / stages,
    "gpipe": fill / (microbatches + fill),
    "1f1b": fill / (microbatches + fill),
    # A device has two stages.
    "interleaved": fill / (2 * microbatches + fill),
    # Each part of the backward pass is as long as the forward pass.
    "zb_h1": fill / (3 * microbatches + fill),
  }.items():
    table = pipeline.make_table(name, stages, microbatches)
    times = _simulate(table, [_Cost("stage", 1.0, 2.0)] * table.num_stages)
    assert times.bubble == pytest.approx(wanted), name
  # Without a flush nothing waits once the pipeline is full.
  for name in ("pipedream", "2bw", "paci", "ours"):
    number = 1 if name == "pipedream" else microbatches
    table = pipeline.make_table(name, stages, number, num_iterations=24)
    times = _simulate(table, [_Cost("stage", 1.0, 2.0)] * stages)
    assert times.utilisation == pytest.approx((1.0,) * stages), name


def test_trace_names_messages_by_their_actions():
  link = {("n0", "n1"): cluster.Link(8.0)}
  machines = cluster.Cluster(
    (cluster.Node("n0"), cluster.Node("n1")), cluster.Topology(link), "n0"
  )
  table = pipeline.make_table("1f1b", 2, 1)
  costs = [_Cost("stage", 1.0, 2.0, output_bytes=3.0)] * 2
  sent = [
    (x.resource, x.name, x.kind, x.start_s, x.end_s)
    for x in _simulate(table, costs, machines).trace
    if "->" in x.resource
  ]
  assert sent == [
    ("n0->n1", "F0/0", "activation", 1.0, 4.0),
    ("n1->n0", "B0/1", "gradient", 7.0, 10.0),
  ]


def test_slow_device_and_slow_down_lengthen_the_run():
  table = pipeline.make_table("ours", 4, 8, num_iterations=20)
  assert _simulate(table).iteration_s == pytest.approx(24.0)
  slow = cluster.workers([1.0, 0.5, 1.0, 1.0])
  assert _simulate(table, machines=slow).iteration_s == pytest.approx(48.0)
  later = cluster.Cluster(
    tuple(
      cluster.Node(
        f"n{i}", slowdowns=(cluster.Slowdown(240.0, 0.25),) * (i == 2)
      )
      for i in range(4)
    )
  )
  ends = _simulate(table, machines=later).ends_s
  steps = [b - a for a, b in itertools.pairwise(ends)]
  assert steps[2] == pytest.approx(24.0)
  assert steps[-2] == pytest.approx(96.0)


def test_steady_iterations_exclude_the_fill():
  table = pipeline.make_table("ours", 4, 8, num_iterations=20)
  # One machine is slow while the pipeline fills.
  slow = cluster.Node("b", slowdowns=(cluster.Slowdown(0.0, 0.25, 400.0),))
  names = [cluster.Node(name) for name in "acd"]
  times = _simulate(table, machines=cluster.Cluster((*names, slow)))
  assert times.ends_s[3] > 300
  assert times.iteration_s == pytest.approx(24.0)


def test_messages_overlap_the_computation():
  # An output of 8 bytes takes a second in each direction.
  link = cluster.Link(bandwidth_bits_per_s=64.0)
  ring = cluster.Topology({("a", "b"): link})
  machines = cluster.Cluster(
    (cluster.Node("a"), cluster.Node("b")), ring, server="a"
  )
  costs = [_Cost("stage", 1.0, 2.0, output_bytes=8.0)] * 2
  one = _simulate(pipeline.make_table("gpipe", 2, 1), costs, machines)
  assert one.makespan_s == 3 + 1 + 3 + 1
  many = _simulate(pipeline.make_table("gpipe", 2, 4), costs, machines)
  assert many.makespan_s == 1 + 1 + 4 * 3 + 1 + 2
  assert many.link_use == {
    "a->b": pytest.approx(4 / 17), "b->a": pytest.approx(4 / 17),
  }  # fmt: skip


def test_gradients_are_as_large_as_the_outputs_they_are_of():
  # A message of n bytes takes n seconds in each direction.
  link = cluster.Link(bandwidth_bits_per_s=8.0)
  chain = cluster.Topology({("a", "b"): link, ("b", "c"): link})
  machines = cluster.Cluster(tuple(map(cluster.Node, "abc")), chain, server="a")
  costs = [_Cost("stage", 1.0, 2.0, output_bytes=x) for x in (8.0, 2.0, 50.0)]
  found = _simulate(pipeline.make_table("naive", 3, 1), costs, machines)
  # The last stage's output is not sent, and nor is its gradient.
  assert found.makespan_s == 3 * (1 + 2) + 2 * (8 + 2)
  several = _simulate(pipeline.make_table("gpipe", 3, 4), costs, machines)
  assert several.edge_bytes == (4 * 8, 4 * 2)


def test_memory_includes_versions_and_live_micro_batches():
  costs = [_Cost("stage", 1.0, 2.0, parameter_bytes=100, saved_bytes=10)] * 4
  found = {
    name: _simulate(
      pipeline.make_table(name, 4, 8), costs, optimizer_copies=2
    ).memory_bytes
    for name in ("gpipe", "1f1b", "2bw", "zb_h1")
  }
  assert found["gpipe"] == (480, 480, 480, 480)
  assert found["1f1b"] == (440, 430, 420, 410)
  assert found["2bw"] == (540, 530, 520, 510)
  # A micro-batch is kept until its weight part has ended.
  assert found["zb_h1"] == (440, 440, 440, 440)
  # Passes of a device's stages follow each other in the room of the larger.
  costs = [_Cost("stage", 1.0, 2.0, working_bytes=x) for x in (5, 0, 7, 3)]
  chunks = _simulate(pipeline.make_table("interleaved", 2, 2), costs)
  assert chunks.memory_bytes == (7, 3)


def test_utilisation_refers_to_the_steady_state():
  table = pipeline.make_table("ours", 4, 8, num_iterations=20)
  assert _simulate(table).utilisation == pytest.approx((1.0,) * 4)
  flushed = _simulate(pipeline.make_table("1f1b", 4, 8, num_iterations=4))
  assert flushed.utilisation == pytest.approx((8 / 11,) * 4)


def test_a_trace_has_a_row_for_each_device():
  times = _simulate(pipeline.make_table("1f1b", 4, 4))
  assert set(times.trace.resources) == {f"worker{i}" for i in range(4)}
  assert times.trace.end_s == times.makespan_s


def test_unconnected_machines_raise():
  link = cluster.Link(bandwidth_bits_per_s=1.0)
  names = "abc"
  apart = cluster.Topology({("a", "b"): link, ("c", "d"): link})
  with pytest.raises(ValueError, match="no route"):
    machines = cluster.Cluster(
      tuple(map(cluster.Node, names)), apart, server="a"
    )
    _simulate(pipeline.make_table("1f1b", 3, 1), _EQUAL[:3], machines)


def test_coded_message_has_an_entry_for_each_float32():
  # Ten entries: ten signs, and a scale of 32 bits.
  coded = _Cost("a", output_bytes=40.0).coded(codecs.Sign())
  assert coded.sent_bytes == (10 + 32) / 8


def test_device_holds_all_of_its_stages():
  """Parameters, gradients and momenta of each, and the largest temporaries."""
  table = pipeline.make_table("interleaved", 2, 2)
  costs = [
    pipeline.LayerCost(
      f"{i}", 1.0, 2.0, parameter_bytes=10.0**i, working_bytes=working
    )
    for i, working in enumerate((5.0, 0.5, 0.25, 7.0))
  ]
  machines = cluster.Cluster((cluster.Node("a"), cluster.Node("b")))
  found = pipeline.simulate(table, costs, machines).memory_bytes
  assert found == (3 * (1 + 100) + 5.0, 3 * (10 + 1000) + 7.0)
  plain = pipeline.simulate(table, costs, machines, optimizer_copies=0.0)
  assert plain.memory_bytes == (2 * (1 + 100) + 5.0, 2 * (10 + 1000) + 7.0)


def test_iteration_ends_with_its_last_update():
  costs = [_Cost("a", 1.0, 2.0), _Cost("b", 1.0, 2.0, update_s=20.0)]
  times = _simulate(pipeline.make_table("naive", 2, 1), costs)
  # The update of b begins at 4 s, that of a at 6 s.
  assert times.ends_s == (24.0,) and times.makespan_s == 24.0
  # An update that takes no time is not drawn.
  drawn = [(x.resource, x.name) for x in times.trace if x.name[0] == "U"]
  assert drawn == [("worker1", "U/1")]


def test_stages_of_one_device_send_nothing():
  costs = [_Cost("a", 1.0, 2.0, output_bytes=x) for x in (8.0, 4.0, 2.0, 1.0)]
  table = pipeline.make_table("zb_v", 2, 3)
  assert table.device_of == (0, 1, 1, 0)
  costs = [dataclasses.replace(x, weight_s=1.0) for x in costs]
  assert _simulate(table, costs).edge_bytes == (3 * 8, 3 * 2)


def test_machine_that_is_away_at_times_is_refused():
  away = cluster.Node("b", outages=(cluster.Outage(1.0, 2.0),))
  machines = cluster.Cluster((cluster.Node("a"), away))
  with pytest.raises(ValueError, match="`outages` must be left out"):
    _simulate(pipeline.make_table("1f1b", 2, 2), _EQUAL[:2], machines)
