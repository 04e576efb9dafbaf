"""Rows and summaries of runs: each figure by hand, from numbers that differ."""

import collections
import dataclasses
import math
import os
import platform
import subprocess
import types

import jax
import pytest

from jdist import pipeline, training
from jdist.cli import _commands
from jdist.cli.programs import _overlap
from jdist.server import _driver
from jdist.server.runtime import _delivery, _live_server
from jdist.training import _results


def _driven(kind=_driver.Driver, **change):
  """Returns a driver of three machines, of which two have ended iterations."""
  totals = _driver.NodeTotals
  nodes = {
    "a": totals(compute_s=3.0, updates=2, ages={2: 2}, iteration_s=0.5),
    "b": totals(compute_s=5.0, updates=4, ages={0: 3, 4: 1}, iteration_s=2.0),
    "c": totals(),
  }
  made = object.__new__(kind)
  vars(made).update({
    "nodes": nodes, "staleness": collections.Counter({1: 4, 0: 2, 3: 2}),
    "applied_samples": 60, "lost_samples": 7, "_last_s": 4.0,
    "refused": collections.Counter(a=1), "pulled_bytes": 11.0,
    "pushed_bytes": 13.0,
    "state": types.SimpleNamespace(version=9, discarded={"b": 2}),
    "protocol": types.SimpleNamespace(summary=lambda state: {"own": state}),
  } | change)  # fmt: skip
  return made


SUMMARY = {
  "updates": 9, "samples": 60, "samples_per_s": 15.0, "utilisation": 8 / 12,
  "iteration_spread": 4.0,
  "staleness": {
    "mean_over_updates": 10 / 8, "mean_over_nodes": 1.5, "maximum": 3,
    "counts": {"0": 2, "1": 4, "3": 2},
  },
  "discarded": {"b": 2}, "refused": {"a": 1}, "lost_samples": 7,
  "pulled_bytes": 11.0, "pushed_bytes": 13.0,
}  # fmt: skip


def test_summary_of_a_run_has_its_figures():
  made = _driven()
  own = {"own": made.state}
  assert made.summary() == {"virtual_s": 4.0} | SUMMARY | own
  # A machine computes in all of the time at most.
  assert _driven(_last_s=1.0).summary()["utilisation"] == 1.0
  live = _driven(_delivery.Delivery)
  nodes = {x: dataclasses.asdict(y) for x, y in live.nodes.items()}
  found = live.summary()
  assert found == {"wall_s": 4.0, "nodes": nodes} | SUMMARY | {
    "own": live.state
  }


def test_summary_before_anything_has_happened_has_no_rates():
  made = _driven(
    nodes={"a": _driver.NodeTotals()}, staleness=collections.Counter(),
    applied_samples=0, _last_s=0.0,
  )  # fmt: skip
  found = made.summary()
  assert found["samples_per_s"] == found["utilisation"] == 0.0
  assert math.isnan(found["iteration_spread"])
  assert found["staleness"] == {
    "mean_over_updates": 0.0, "mean_over_nodes": 0.0, "maximum": 0,
    "counts": {},
  }  # fmt: skip


@pytest.mark.parametrize(("wall_s", "rate", "share"), [
  (4.0, 15.0, 8 / 12), (2.0, 30.0, 1.0), (0.0, 60e9, 1.0)
])  # fmt: skip
def test_summary_of_a_live_server_is_by_its_own_clock(wall_s, rate, share):
  delivery = _driven(_delivery.Delivery)
  made = object.__new__(_live_server.LiveServer)
  made._busy_s = 0.75
  made._core = types.SimpleNamespace(
    delivery=delivery, ended_s=wall_s, boxes="abc", over_s={"a": 0.5},
    marks=types.SimpleNamespace(pulled_bytes=17, pushed_bytes=19),
  )  # fmt: skip
  found = made.summary()
  assert found == delivery.summary() | {
    "wall_s": wall_s, "samples_per_s": pytest.approx(rate),
    "utilisation": pytest.approx(share), "pulled_bytes": 17,
    "pushed_bytes": 19, "server_busy_s": 0.75, "over_s": {"a": 0.5},
  }  # fmt: skip


def test_row_of_a_candidate_has_no_plan_and_no_table():
  plan = types.SimpleNamespace(cuts=(1,), nodes=("a", "b"), bottleneck_s=2.0)
  times = types.SimpleNamespace(
    iteration_s=3.0, memory_bytes=(4,), utilisation=(0.5,)
  )
  one = pipeline.Candidate(
    "1f1b", 4, 2, None, True, plan=plan, times=times, made="table"
  )
  row = one.row()
  assert row["recompute"] is True and row["num_microbatches"] == 4
  assert row["cuts"] == (1,) and row["nodes"] == ("a", "b")
  assert (row["bottleneck_s"], row["iteration_s"]) == (2.0, 3.0)
  assert (row["memory_bytes"], row["utilisation"]) == ((4,), (0.5,))
  fields = {x.name for x in dataclasses.fields(one)}
  own = {"cuts", "nodes", "bottleneck_s", "iteration_s", "memory_bytes",
         "utilisation"}  # fmt: skip
  assert row.keys() == fields - {"plan", "made", "times"} | own
  none = pipeline.Candidate("1f1b", 4, 2, None, True).row()
  assert {none[x] for x in own} == {None} and none.keys() == row.keys()


def test_row_of_a_forecast_has_its_steps_and_messages(monkeypatch):
  monkeypatch.setattr(
    training, "make_row", lambda config, seed, **more: (config, seed, more)
  )

  @dataclasses.dataclass
  class Message:
    name: str
    send_s, hidden_share = 0.5, 0.25

  def step(start, *messages):
    names = "compute_s send_s exposed_s hidden_share wire_bytes flops end_s"
    figures = {x: start + i for i, x in enumerate(names.split())}
    return types.SimpleNamespace(**figures, collectives=messages), {
      ("step_s" if x == "end_s" else x): y for x, y in figures.items()
    }

  meeting, first = step(10, Message("a"), Message("b"))
  between, second = step(20)
  found = types.SimpleNamespace(
    method="diloco", interval=4, compile_s=1.5, memory_bytes=2,
    mean_step_s=2.5, hidden_share=0.75, meeting=meeting, between=between,
    mean=lambda figure: (figure(meeting), figure(between)),
  )  # fmt: skip
  options = _commands.Overlap()
  config, seed, row = _overlap.row(options, found)
  assert (config, seed) == (dataclasses.asdict(options), 0)
  assert row == {
    "method": "diloco", "interval": 4, "compile_s": 1.5, "memory_bytes": 2,
    "mean_step_s": 2.5, "mean_wire_bytes": (14, 24), "hidden_share": 0.75,
    "meeting": first, "between": second,
    "messages": [
      {"name": x, "send_s": 0.5, "hidden_share": 0.25} for x in "ab"
    ],
  }  # fmt: skip


def test_row_names_the_machine(monkeypatch):
  monkeypatch.setattr(jax, "device_count", lambda: 4)
  monkeypatch.setattr(os, "cpu_count", lambda: 3)
  monkeypatch.setattr(platform, "machine", lambda: "abc")
  assert _results._device() == "4 x abc CPU with 3 cores in 1 process"
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  kind = types.SimpleNamespace(device_kind="H1")
  monkeypatch.setattr(jax, "devices", lambda: [kind])
  assert _results._device() == "4 x H1 in 2 processes"


@pytest.mark.parametrize(
  ("changed", "given", "wanted"),
  [
    ("", None, "0123"), (" M a.py", None, "0123+"), (None, None, "unknown"),
    ("", "abc", "abc"),
  ],
)  # fmt: skip
def test_row_names_the_commit(changed, given, wanted, monkeypatch):
  asked = []

  def run(words, **options):
    asked.append((words[1], options["check"], options["text"]))
    if changed is None:
      raise subprocess.CalledProcessError(128, words)
    told = "0123\n" if words[1] == "rev-parse" else changed
    return types.SimpleNamespace(stdout=told)

  monkeypatch.delenv("JDIST_COMMIT", raising=False)
  if given:
    monkeypatch.setenv("JDIST_COMMIT", given)
  monkeypatch.setattr(subprocess, "run", run)
  assert _results._commit.__wrapped__() == wanted
  number = 0 if given else 1 if changed is None else 3
  words = ("rev-parse", "status", "ls-files")
  assert asked == [(x, True, True) for x in words[:number]]
