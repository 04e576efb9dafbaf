"""Traces are exported and drawn."""

import json

import pytest

from jdist import cluster


def drawn():
  trace = cluster.Trace()
  trace.add("a", "task 0", 0.0, 2.0)
  trace.add("a->server", "push 0", 2.0, 3.0, "push")
  trace.add("b", "task 1", 0.5, 4.0)
  return trace


def test_perfetto_file_has_a_thread_for_each_resource(tmp_path):
  drawn().save_perfetto(tmp_path / "trace.json")
  events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
  names = {
    event["tid"]: event["args"]["name"]
    for event in events
    if event["ph"] == "M"
  }
  spans = [event for event in events if event["ph"] == "X"]
  assert [(names[s["tid"]], s["ts"], s["dur"]) for s in spans] == [
    ("a", 0.0, 2e6),
    ("a->server", 2e6, 1e6),
    ("b", 0.5e6, 3.5e6),
  ]


def test_picture_has_a_row_for_each_resource(tmp_path):
  matplotlib = pytest.importorskip("matplotlib.figure")
  axes = matplotlib.Figure().subplots()
  trace = drawn()
  cluster.draw_trace(trace, axes, rows=trace.resources)
  labels = [label.get_text() for label in axes.get_yticklabels()]
  assert labels == ["a", "a->server", "b"]
  assert len(axes.collections) == 3
  path = cluster.plot_trace(trace, tmp_path / "trace.png", title="A run")
  assert path.stat().st_size > 1000
