"""The comparison of pipelines: its methods on machines known by hand."""

import dataclasses

import pytest

from jdist import cluster, pipeline
from tests.experiments import _loading

pytest.importorskip("simpy")
_LAYERS = [
  pipeline.LayerCost(
    x, 1.0, 2.0, parameter_bytes=10, output_bytes=1, saved_bytes=20
  )
  for x in "abcdefgh"
]


@pytest.fixture
def programs(monkeypatch):
  """The experiment's modules, by the names by which they import each other."""
  _loading.enter("pipeline", monkeypatch)
  return {
    name: _loading.load(name, f"pipeline/{name}.py", monkeypatch)
    for name in (
      "config",
      "pipedream_planner",
      "methods",
      "profile_layers",
      "run",
      "replan",
    )
  }


def _cell(programs, speeds=(1.0, 1.0, 1.0, 1.0)):
  config = programs["config"]
  machines = config.TOPOLOGIES["equal"](config.Config(), len(speeds))
  nodes = [
    dataclasses.replace(x, speed=speed)
    for x, speed in zip(machines.nodes, speeds, strict=True)
  ]
  return programs["methods"].Cell(
    _LAYERS,
    dataclasses.replace(machines, nodes=tuple(nodes)),
    [(len(speeds), 1e9)],
    number=4,
    samples=2,
    input_bytes=1,
  )


def test_equal_machines_have_the_gains_of_the_formulas(programs):
  methods = programs["methods"]
  cell = _cell(programs)
  ours = methods.ours(cell)["samples_per_s"]
  assert ours == pytest.approx(cell.samples / cell.bound_s(), rel=1e-3)
  for plan in (methods.by_its_paper, methods.by_our_plan):
    found = [ours / plan(cell, x)["samples_per_s"] for x in methods.BASELINES]
    assert found == pytest.approx([4, 7 / 4, 7 / 4, 1, 1], rel=1e-2)


def test_slow_machine_slows_the_papers_partitions_only(programs):
  methods = programs["methods"]
  cell = _cell(programs, (1.0, 1.0, 0.25, 1.0))
  ours = methods.ours(cell)["samples_per_s"]
  theirs = methods.by_its_paper(cell, "2bw")["samples_per_s"]
  # Two layers at a quarter of the speed, in place of three.
  assert ours / theirs == pytest.approx(8 / 3, rel=0.02)
  same = methods.by_our_plan(cell, "2bw")["samples_per_s"]
  assert ours / same == pytest.approx(1.0, rel=0.01)


def test_replicas_update_by_no_more_than_the_batch(programs):
  found = programs["methods"].by_its_paper(
    _cell(programs), "pipedream", replicate=True
  )
  assert max(found["replicas"]) * found["minibatch_samples"] <= 8


def test_stages_beyond_memory_are_recomputed_or_refused(programs):
  methods = programs["methods"]
  cell = _cell(programs)

  def limited(memory):
    nodes = [
      dataclasses.replace(x, memory_bytes=memory) for x in cell.machines.nodes
    ]
    machines = cluster.Cluster(
      tuple(nodes), cell.machines.topology, server="switch"
    )
    return dataclasses.replace(cell, machines=machines)

  # 60 bytes of parameters, their gradients and momentum; 40 a micro-batch.
  assert not methods.by_its_paper(limited(220), "gpipe")["recompute"]
  assert methods.by_its_paper(limited(200), "gpipe")["recompute"]
  with pytest.raises(ValueError, match="gpipe needs"):
    methods.by_its_paper(limited(90), "gpipe")


@pytest.mark.slow
def test_plan_recovers_when_a_machine_becomes_slow(programs):
  found = programs["replan"].result(_cell(programs), 2)
  assert found["during_samples_per_s"] < 0.4 * found["before_samples_per_s"]
  assert found["recovered"] > 0.9
  assert (found["proposals_before"], found["taken_back"]) == (0, 0)
  assert found["moved_bytes"] == 2 * 10 * found["moved_layers"] > 0


def test_flush_for_half_a_run_takes_half_the_updates_at_either_speed(
  programs, monkeypatch
):
  report = _loading.load("report", "pipeline/report.py", monkeypatch)
  equal = _loading.load(
    "equal_accuracy", "pipeline/equal_accuracy.py", monkeypatch
  )
  cell = "net", "equal", 8
  runs = {(name, "paper"): {"samples_per_s": 1.0} for name in report.BASELINES}
  runs["ours", "ours"] = {"samples_per_s": 4.0}
  lines = equal.table({cell: runs}, {cell: {"samples_per_s": 2.0}}).splitlines()
  found = [line.split(" | ")[2:4] for line in lines[2:]]
  assert found == [["4.00"] * 2, ["2.67"] * 2, ["2.00"] * 2]


def test_flushed_tables_have_no_delay_and_a_bubble(programs, monkeypatch):
  _loading.load("report", "pipeline/report.py", monkeypatch)
  equal = _loading.load(
    "equal_accuracy", "pipeline/equal_accuracy.py", monkeypatch
  )
  cell = _cell(programs)
  found = programs["methods"].planned_over(cell, equal.FLUSHED)
  assert found["delay"] == 0
  ours = programs["methods"].ours(cell)["samples_per_s"]
  assert ours / 2 < found["samples_per_s"] < ours


@pytest.mark.slow
def test_plans_in_time_match_late_ones_with_more_micro_batches(
  programs, monkeypatch
):
  _loading.load("report", "pipeline/report.py", monkeypatch)
  full = _loading.load("full_use", "pipeline/full_use.py", monkeypatch)
  cell = dataclasses.replace(_cell(programs), samples=8)
  rows = [
    {"network": "net", "topology": "equal", "stages": 2, **x}
    for x in full.results(cell)
  ]
  ours = [x for x in rows if x["method"] == "ours"]
  assert [x["delay"] for x in ours] == [0] * 3
  late = programs["methods"].ours(cell)["samples_per_s"]
  assert ours[-1]["samples_per_s"] > 0.97 * late
  head, _, first, *_ = full.table(full.rates(rows)).splitlines()
  assert len(head.split(" | ")) == len(first.split(" | ")) == 8


def test_best_of_our_plans_bounds_the_gain_at_equal_micro_batches(monkeypatch):
  _loading.enter("pipeline", monkeypatch)
  _loading.load("report", "pipeline/report.py", monkeypatch)
  full = _loading.load("full_use", "pipeline/full_use.py", monkeypatch)
  cell = {("ours", "in time", x): float(x) for x in full.FACTORS}
  for name in ("naive", "gpipe", "1f1b", "pipedream", "2bw"):
    cell |= {(name, "paper", x): 8.0 / x for x in full.FACTORS}
    cell |= {(name, "ours", x): 3.0 for x in full.FACTORS}
  said = full.room({("net", "equal", 8): cell, ("net", "equal", 4): {}}, 8)
  # The best plan of ours has a rate of 4; the papers' have 8, 4 and 2.
  assert "0.50 at M = S, 1.00 at M = 2 S, 2.00 at M = 4 S" in said
  assert "0 of 1 cells are there, the others at 0.500" in said
