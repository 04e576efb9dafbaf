"""The faults that the check of tables finds, and its reports."""

import dataclasses
import random

import hypothesis
import hypothesis.strategies as st
import pytest

from jdist import pipeline
from jdist.pipeline.schedule import _table

_CASES = {
  "a device that lacks an action": (
    "device F0 B0 U\ndevice F0 U",
    "B0/1 is missing",
  ),
  "an action twice": ("device F0 F0 B0 U\ndevice F0 B0 U", "F0/0 is there 2"),
  "a cycle on one device": (
    "device B0 F0 U\ndevice F0 B0 U",
    "B0/0 comes before F0/0, which it needs",
  ),
  "a cycle of two devices": (
    "device F0 B0 F1 B1 U\ndevice F0 F1 B0 B1 U",
    "device 0 with B0/0 for B0/1; device 1 with F1/1 for F1/0",
  ),
  "an update before its gradients": (
    "device F0 F1 B0 U B1\ndevice F0 B0 F1 B1 U",
    "U/0 comes before B1/0",
  ),
  "an update before the weight parts": (
    "device F0 I0 U W0",
    "U/0 comes before W0/0",
  ),
  "an update before the last iteration's": (
    "iterations 2\nweights newest\ndevice F0 B0 F0@1 B0@1 U@1 U",
    "U/0@1 comes before the update of iteration 0",
  ),
  "a stage on two devices": (
    "device F0 F1 B0 B1 U\ndevice F0 B0 U\ndevice F1/1 B1/1",
    "F1/1 is on device 2, and its stage lies on device 1",
  ),
  "a version that is not there": (
    "iterations 2\ndevice F0 F0@1 B0 U B0@1 U@1\ndevice F0 B0 U F0@1 B0@1 U@1",
    r"F0/0@1 reads version 1 of the parameters, and version 0",
  ),
  "a stage beyond those named": (
    "stages 1\ndevice F0 B0 U F0/3",
    "F0/3 is of a stage beyond the 1",
  ),
  "a micro-batch beyond those named": (
    "microbatches 1\ndevice F0 B0 U B9",
    "B9/0 does not belong to it, which has 1 micro-batch",
  ),
  "a whole and a split backward pass": (
    "device F0 I0 W0 B0 U",
    "backward passes in two parts, I and W",
  ),
}


@pytest.mark.parametrize("name", _CASES)
def test_wrong_orders_raise(name):
  text, words = _CASES[name]
  with pytest.raises(ValueError, match=words):
    pipeline.check_table(pipeline.parse_table(text))


def test_stage_beyond_those_named_is_on_no_device():
  text, _ = _CASES["a stage beyond those named"]
  assert pipeline.parse_table(text).device_of == (0,)


def test_error_draws_the_place():
  table = pipeline.parse_table(_CASES["a cycle of two devices"][0])
  with pytest.raises(ValueError, match="wait for each other") as caught:
    pipeline.check_table(table)
  picture = str(caught.value).split("\n", 1)[1].splitlines()
  assert [x.split() for x in picture] == [
    ["device", "0", "|F0", "?B0"],
    ["device", "1", "|.", "F0", "?F1"],
  ]


def test_1f1b_deadlocks_with_blocking_sends_and_gpipe_does_not():
  table = pipeline.make_table("1f1b", 2, 4)
  assert not pipeline.check_table(table).blocking
  with pytest.raises(ValueError, match="Buffered sends let it run"):
    pipeline.check_table(table, sends="blocking")
  for stages in (2, 4):
    gpipe = pipeline.make_table("gpipe", stages, 4)
    assert pipeline.check_table(gpipe, sends="blocking").blocking


def test_blocking_sends_are_received_in_their_order():
  table = pipeline.parse_table("device F0 F1 B0 B1 U\ndevice F1 F0 B0 B1 U")
  stuck = "device 0 to send F0/0; device 1 to receive F1/0. "
  with pytest.raises(ValueError, match=stuck):
    pipeline.check_table(table, sends="blocking")


def test_newest_version_is_kept_besides_a_stashed_one():
  table = pipeline.parse_table(
    "iterations 2\nwindow 2\nweights stashed\ndevice F0 F0@1 B0 U B0@1 U@1"
  )
  assert pipeline.check_table(table).versions == (2,)


def test_single_iteration_keeps_one_version_whatever_its_window():
  table = pipeline.parse_table("window 2\ndevice F0 B0 U")
  assert pipeline.check_table(table).versions == (1,)


def test_limits_of_memory_are_checked():
  table = pipeline.make_table("gpipe", 2, 4)
  with pytest.raises(ValueError, match="stage 0 keeps 4, and `max_live` is 3"):
    pipeline.check_table(table, max_live=3)
  late = pipeline.make_table("2bw", 2, 4)
  with pytest.raises(ValueError, match="stage 0 keeps 2, and `max_versions`"):
    pipeline.check_table(late, max_versions=1)
  # A later stage keeps more where it delays its weight parts.
  table = pipeline.parse_table(
    "device F0 I0 W0 F1 I1 W1 U\ndevice F0 I0 F1 I1 W0 W1 U"
  )
  assert pipeline.check_table(table).live == (1, 2)
  with pytest.raises(ValueError, match="stage 1 keeps 2, and `max_live` is 1"):
    pipeline.check_table(table, max_live=1)


def _replay(table):
  """Runs a table in a random order of devices until it ends or is stuck."""
  places = [0] * len(table.devices)
  done = set()
  generator = random.Random(0)
  while True:
    can = [
      d
      for d, order in enumerate(table.devices)
      if places[d] < len(order)
      and all(x in done for x in table.needs(order[places[d]]))
    ]
    if not can:
      return places == [len(x) for x in table.devices]
    device = generator.choice(can)
    done.add(table.devices[device][places[device]])
    places[device] += 1


@hypothesis.given(
  name=st.sampled_from(["1f1b", "gpipe", "zb_h1", "2bw", "interleaved"]),
  device=st.integers(0, 2),
  swap=st.integers(0, 20),
)
def test_checked_tables_run_in_any_order_of_devices(name, device, swap):
  table = pipeline.make_table(name, 3, 3)
  order = list(table.devices[device])
  i = swap % (len(order) - 1)
  order[i], order[i + 1] = order[i + 1], order[i]
  devices = list(table.devices)
  devices[device] = tuple(order)
  changed = dataclasses.replace(table, devices=tuple(devices))
  try:
    pipeline.check_table(changed)
  except ValueError as error:
    # An order may run and still read a version that is not there.
    assert "reads version" in str(error) or not _replay(changed)
  else:
    assert _replay(changed)


def test_order_of_two_stages_on_one_device_is_checked():
  table = pipeline.parse_table("stages 2\ndevice F0/1 F0/0 B0/1 B0/0 U/1 U/0\n")
  with pytest.raises(ValueError, match="F0/1 comes before F0/0"):
    pipeline.check_table(table)


def test_input_part_ends_the_use_of_a_stashed_version():
  # The second update comes when both weight parts still wait, which read none.
  table = pipeline.parse_table(
    "weights stashed\ndevice F0 F0@1 I0 I0@1 W0 U W0@1 U@1\n"
  )
  assert pipeline.check_table(table).versions == (1,)


def test_own_result_does_not_wait_for_its_message():
  table = pipeline.make_table("gpipe", 1, 1)
  starts = _table.start_times(table, lambda _: 1.0, lambda _: 5.0)
  assert [starts[x] for x in table.devices[0]] == [0.0, 1.0, 2.0]


def test_gradient_takes_the_way_of_the_output_back():
  # The loss's gradient leaves at 6 and arrives at 9, by the link behind stage
  # 0, which runs nine forward passes until then.
  times = [pipeline.StageTimes(1, 1, send=3.0), pipeline.StageTimes(1, 1)]
  table = pipeline.greedy(times, 12, max_live=[12, 12])
  order = [str(x) for x in table.devices[0]]
  assert order[:10] == [*(f"F{i}/0" for i in range(9)), "B0/0"]
