"""The arithmetic of the peers' page, by hand; and its programs, for minutes."""

import functools
import os
import types

import pytest

from tests.experiments import _loading


@pytest.fixture
def report(monkeypatch):
  monkeypatch.syspath_prepend(_loading.FOLDER)
  _loading.enter("peers", monkeypatch)
  return _loading.load("peers_report", "peers/report.py", monkeypatch)


def _time(framework, method, *step_s):
  return {
    "config": {"hosts": 2, "speed": 1.0, "mbit_per_s": 100.0},
    "framework": framework, "method": method, "step_s": list(step_s),
    "interface_bytes": [10.0], "counted_bytes": None,
  }  # fmt: skip


def _run(framework, method, seed, rate, *curve, hosts=2):
  config = {
    "framework": framework, "method": method, "rate": rate, "target": 0.9,
    "hosts": hosts,
  }  # fmt: skip
  return {"config": config, "seed": seed, "curve": [list(x) for x in curve]}


def test_a_rate_is_tuned_by_the_first_seed_and_counts_at_all(report):
  slow, fast, wild = (
    _run("jdist", "PowerSGD", 0, 0.1, (8, 0.5), (16, 0.9)),
    _run("jdist", "PowerSGD", 0, 0.2, (8, 0.95)),
    _run("jdist", "PowerSGD", 0, 0.4, (8, 0.1), (16, float("nan"))),
  )
  fresh = [_run("jdist", "PowerSGD", x, 0.2, (16, 0.9)) for x in (1, 2)]
  late = _run("jdist", "PowerSGD", 2, 0.2, (320, 0.5))
  key = ("jdist", "PowerSGD")
  found = report.tuned([slow, fast, wild, *fresh])
  assert found == {key: {"rate": 0.2, "steps": [8, 16, 16]}}
  assert report.mean_steps(found, key) == 40 / 3
  # A run that does not get there leaves no mean of the others.
  found = report.tuned([slow, fast, wild, fresh[0], late])
  assert found[key]["steps"] == [8, 16, None]
  assert report.mean_steps(found, key) is None
  # A rate at an end of the grid is not tuned.
  assert not report.tuned([slow, fast, *fresh])


def test_seconds_are_steps_times_the_seconds_of_a_step(report):
  times = [
    _time("jdist", "alone", 2.0), _time("jdist", "SSGD", 14.0, 13.0, 30.0),
    _time("jdist", "MSDPU streamed", 2.5), _time("PyTorch", "alone", 1.0),
    _time("PyTorch", "DDP", 13.0), _time("PyTorch", "PowerSGD", 3.0),
    _time("PyTorch", "averaging", 6.0),
    _time("PyTorch", "torchft Local SGD", 7.0),
  ]  # fmt: skip
  tuning = {
    key: {"rate": 0.1, "steps": steps}
    for key, steps in {
      ("jdist", "MSDPU streamed"): [30, 32],
      ("PyTorch", "DDP"): [20], ("PyTorch", "PowerSGD"): [28],
      ("PyTorch", "averaging"): [30],
    }.items()
  }  # fmt: skip
  (cell,) = report.cells(times, {2: tuning, 4: {}})
  # Its updates are those of DDP.
  assert cell.seconds(("jdist", "SSGD")) == 20 * 14
  assert cell.seconds(("jdist", "MSDPU streamed")) == 31 * 2.5
  # Its first 8 steps are those of DDP.
  assert cell.seconds(("PyTorch", "PowerSGD")) == 8 * 13 + 20 * 3
  # Its updates are those of averaging.
  assert cell.seconds(("PyTorch", "torchft Local SGD")) == 30 * 7
  assert report.ratio(cell, "jdist") == 6
  assert report.ratio(cell, "PyTorch") == 12
  # 30 steps of averaging take 5 s more than alone, 31 of ours half a second.
  assert cell.waited_s(("PyTorch", "averaging")) == 150
  assert cell.waited_s(("jdist", "MSDPU streamed")) == 15.5
  best, theirs_s, ours_s = report.fewest_above(cell)
  assert (best, theirs_s, ours_s) == (("PyTorch", "averaging"), 150, 15.5)
  said = report.verdict([cell])
  assert "averaging, 150.0 s (aim 5 times as much: met)" in said
  assert (
    "; 3.6 times sooner than SSGD, whose bound is 7.0 (aim 5 times: " in said
  )
  assert "the best peer, PowerSGD, 164.0 s (aim at least level: met)" in said
  # Six synchronous steps fewer, of which each takes 10 s more.
  assert "it would need 104.0 s at 2 hosts, 100 Mbit/s." in report.warm_up(
    [cell]
  )
  (line,) = report.short_table([cell]).splitlines()[2:3]
  assert line == "| jdist | SSGD | 280.0 |"


def test_hosts_with_less_than_a_core_are_named_and_tuned_alone(report):
  times = [_time("jdist", "SSGD int4", 2.0), _time("jdist", "SSGD int4", 3.0)]
  times[1]["config"] |= {"hosts": 4, "core_share": 0.5, "speed": 0.25}
  runs = [
    _run("jdist", "SSGD int4", seed, rate, (steps, 0.95), hosts=hosts)
    for hosts, steps in ((4, 8), (2, 16))
    for seed, rate in ((0, 0.1), (0, 0.2), (0, 0.4), (1, 0.2), (2, 0.2))
  ]
  # The middle rate ends more accurately than its neighbours.
  for run in runs[:3:2] + runs[5:8:2]:
    run["curve"][-1][1] = 0.92
  tunings = report.tuned_by_hosts(runs)
  assert list(tunings) == [2, 4]
  two, four = report.cells(times, tunings)
  assert two.name == "2 hosts, 100 Mbit/s"
  assert four.name == (
    "4 hosts of 0.5 core, 100 Mbit/s, one at 0.25 of the speed"
  )
  assert two.seconds(("jdist", "SSGD int4")) == 16 * 2
  assert four.seconds(("jdist", "SSGD int4")) == 8 * 3


def test_hosts_share_cores_evenly_when_there_are_more(report, monkeypatch):
  monkeypatch.setattr(os, "cpu_count", lambda: 2)
  assert [report.run.core_share(x) for x in (1, 2, 4)] == [1, 1, 0.5]


def test_a_round_of_flower_is_said_beside_ours_and_with_the_load(report):
  cell = report.Cell([_time("jdist", "Local SGD", 0.1, 0.2, 0.3)], {})
  row = {
    "config": {"hosts": 2, "bits_per_s": 1e8}, "flower": "1.42.0",
    "round_s": [9.0, 13.0, 11.0], "load": 3.86,
  }  # fmt: skip
  assert report.flower([row], [cell]) == (
    "- FedAvg by Flower 1.42.0 at 100 Mbit/s: a round of 8 steps takes 11.0 s "
    "in the median of 3, one of jdist's Local SGD 1.60 s. The machine's load "
    "was 3.9, Flower's own included."
  )
  assert report.flower([], [cell]) == "- No round of Flower was timed."


@pytest.mark.slow
def test_both_frameworks_take_the_same_steps(report, tmp_path):
  python = os.environ.get("PEERS_PYTHON")
  if not python:
    pytest.skip("needs PEERS_PYTHON, a Python with torch and torchft")
  options = types.SimpleNamespace(
    problem=tmp_path / "problem.npz", hosts=2, python=python, test=500,
    frameworks=tuple(report.run.FRAMEWORKS),
  )  # fmt: skip
  try:
    report.run.prepare(options)
  except FileNotFoundError:
    pytest.skip("needs MNIST")
  accuracy = {}
  with report.run.groups(options) as groups:
    for framework, group in groups.items():
      for method in report.run.FRAMEWORKS[framework][1]:
        # At a rate of 0.05 rounding decides the accuracy after 13 steps.
        both = group.ask(
          do="train", method=method, seed=1, rate=0.01, limit=16, target=1.0,
          every=16,
        )  # fmt: skip
        # All processes measure the same.
        assert both[0] == both[1]
        ((_, accuracy[framework, method]),) = both[0]["curve"]
  # Rounding decides about some images.
  same = functools.partial(pytest.approx, abs=0.01)
  for one, twin in report.run.TWINS.items():
    assert accuracy[one] == same(accuracy[twin])
