"""Traces are exported and drawn."""

import json
import math
import re

import pytest

from jdist import cluster
from jdist.cluster import _trace


def drawn():
  trace = cluster.Trace()
  trace.add("a", "task 0", 0.0, 2.0)
  trace.add("a->server", "push 0", 2.0, 3.0, "push")
  trace.add("b", "task 1", 0.5, 4.0)
  return trace


def test_endless_spans_are_no_trace_events(tmp_path):
  """The page could not read the file."""
  trace = cluster.Trace()
  trace.add("gpu", "away", 0.0, math.inf)
  with pytest.raises(ValueError, match="`end_s` must be a finite number"):
    trace.save_perfetto(tmp_path / "trace.json")
  assert not [*tmp_path.iterdir()]


def test_perfetto_file_has_a_thread_for_each_resource(tmp_path):
  drawn().save_perfetto(tmp_path / "trace.json")
  events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
  names = {
    event["tid"]: event["args"]["name"]
    for event in events
    if event["ph"] == "M"
  }
  spans = [event for event in events if event["ph"] == "X"]
  found = [
    (names[s["tid"]], s["name"], s["cat"], s["ts"], s["dur"]) for s in spans
  ]
  assert found == [
    ("a", "task 0", "compute", 0.0, 2e6),
    ("a->server", "push 0", "push", 2e6, 1e6),
    ("b", "task 1", "compute", 0.5e6, 3.5e6),
  ]
  # The page groups threads by their process.
  assert {event["pid"] for event in events} == {0}


def test_picture_has_a_row_for_each_resource(tmp_path):
  pytest.importorskip("matplotlib")
  path = cluster.plot_trace(drawn(), tmp_path / "trace.svg", title="A run")
  # Letters are paths in an SVG, and a comment names each text.
  names = re.findall("<!-- (.+?) -->", path.read_text())
  assert names[-6:-3] == ["a", "a-&gt;server", "b"]


def test_picture_has_its_bars_in_milliseconds(tmp_path, monkeypatch):
  figure = pytest.importorskip("matplotlib.figure")
  figures = []
  monkeypatch.setattr(
    figure.Figure, "savefig", lambda self, *_, **__: figures.append(self)
  )
  trace = cluster.Trace()
  trace.add("a", "task 0", 0.0, 0.002)
  trace.add("a", "task 1", 0.003, 0.004)
  trace.add("b", "push 0", 0.001, 0.004, "push")
  trace.add("c", "task 2", 0.0, 0.001)
  path = cluster.plot_trace(
    trace, tmp_path / "x.png", title="Of two", resources=("b", "a"), end_s=0.01
  )
  assert path == tmp_path / "x.png"
  (found,) = figures
  (axes,) = found.axes
  assert [x.get_text() for x in axes.get_yticklabels()] == ["b", "a"]
  assert axes.get_xlabel() == "time, ms" and found.get_suptitle() == "Of two"
  assert axes.get_xlim() == (0, 10) and axes.get_ylim() == (1.5, -0.5)
  bars = [
    (
      matplotlib_colour(bar),
      [x.get_extents().bounds for x in bar.get_paths()],
    )
    for bar in axes.collections
  ]
  assert bars == [
    ("#4477aa", [pytest.approx((0, 0.62, 2, 0.76)),
                 pytest.approx((3, 0.62, 1, 0.76))]),
    ("#ee6677", [pytest.approx((1, -0.38, 3, 0.76))]),
  ]  # fmt: skip
  labels = [x.get_text() for x in axes.get_legend().get_texts()]
  assert labels == ["compute", "push"]


def matplotlib_colour(bar):
  import matplotlib.colors

  return matplotlib.colors.to_hex(bar.get_facecolor()[0])


@pytest.mark.parametrize(
  ("seconds", "unit"), [(1.0, "s"), (0.999, "ms"), (1e-3, "ms"), (9e-4, "µs")]
)
def test_times_have_a_digit_before_the_point(seconds, unit):
  factor, found = _trace._time_unit(seconds)
  assert found == unit and 1 <= factor * seconds < 1000


def test_picture_names_the_kinds_that_begin_before_its_end(tmp_path):
  pytest.importorskip("matplotlib")
  trace = cluster.Trace()
  # More kinds of a user's own than there are colours.
  for i in range(18):
    trace.add("a", f"task {i}", i, i + 1.0, f"kind {i}")
  path = cluster.plot_trace(trace, tmp_path / "trace.svg", end_s=17.0)
  found = set(re.findall(r"<!-- (kind \d+) -->", path.read_text()))
  assert found == {f"kind {i}" for i in range(17)}


def test_picture_without_an_end_is_refused(tmp_path):
  pytest.importorskip("matplotlib")
  trace = cluster.Trace()
  trace.add("a", "task", 0.0, math.inf)
  with pytest.raises(ValueError, match="`end_s` must be a finite number"):
    cluster.plot_trace(trace, tmp_path / "trace.svg")


def test_trace_has_the_spans_that_begin_before_its_end():
  trace = cluster.Trace(until_s=2.0)
  for start in (0.0, 1.5, 2.0, 3.0):
    trace.add("a", f"at {start}", start, start + 1.0)
  assert [span.name for span in trace] == ["at 0.0", "at 1.5"]
  assert trace.end_s == 2.5


def test_cut_ends_the_last_span_of_its_resource_and_lengthens_none():
  trace = drawn()
  trace.add("a", "task 2", 5.0, 6.0)
  trace.cut("a", 5.5)
  assert [span.end_s for span in trace] == [2.0, 3.0, 4.0, 5.5]
  trace.cut("a", 9.0)
  trace.cut("b", 9.0)
  assert [span.end_s for span in trace] == [2.0, 3.0, 4.0, 5.5]


def test_resources_are_in_the_order_of_their_first_spans():
  trace = cluster.Trace()
  for resource in ("b", "server", "a", "b"):
    trace.add(resource, "task", 0.0, 1.0)
  assert trace.resources == ("b", "server", "a")
