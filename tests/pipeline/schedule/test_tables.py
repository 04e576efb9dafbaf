"""Tables by name: their order, bubbles, memory and versions."""

import pytest

from jdist import conformance, pipeline
from jdist.pipeline.schedule import (
  _asynchronous_tables,
  _list_schedule,
  _table,
)
from tests import _refusals

_SECONDS = {
  pipeline.Op.FORWARD: 1.0,
  pipeline.Op.BACKWARD: 2.0,
  pipeline.Op.BACKWARD_INPUT: 1.0,
  pipeline.Op.BACKWARD_WEIGHT: 1.0,
  pipeline.Op.UPDATE: 0.0,
}
_SIZES = [(1, 1), (1, 4), (2, 1), (2, 8), (3, 5), (4, 4), (4, 8), (8, 16)]


def _seconds(action):
  return _SECONDS[action.op]


def _makespan(table, seconds=_seconds):
  starts = _table.start_times(table, seconds)
  return max(start + seconds(action) for action, start in starts.items())


def _bubble(table):
  busy = sum(map(_seconds, table)) / len(table.devices)
  return 1 - busy / _makespan(table)


def _sizes(name):
  if name == "interleaved":
    return [(s, m) for s, m in _SIZES if m % s == 0]
  if name == "2bw":
    return [(s, m) for s, m in _SIZES if m >= s - 1]
  return _SIZES


def test_1f1b_matches_hand_written_order():
  table = pipeline.make_table("1f1b", 3, 4)
  orders = [" ".join(str(x).split("/")[0] for x in x) for x in table.devices]
  assert orders == [
    "F0 F1 F2 B0 F3 B1 B2 B3 U",
    "F0 F1 B0 F2 B1 F3 B2 B3 U",
    "F0 B0 F1 B1 F2 B2 F3 B3 U",
  ]


def test_interleaved_matches_megatron():
  table = pipeline.make_table("interleaved", 2, 4)
  # Megatron-LM has this order; stages 0 and 2 lie on one device, 1 and 3 on
  # the other.
  assert [" ".join(map(str, x)) for x in table.devices] == [
    "F0/0 F1/0 F0/2 F1/2 F2/0 B0/2 F3/0 B1/2 F2/2 B0/0 F3/2 B1/0 "
    "B2/2 B3/2 U/2 B2/0 B3/0 U/0",
    "F0/1 F1/1 F0/3 B0/3 F1/3 B1/3 F2/1 B0/1 F3/1 B1/1 F2/3 B2/3 "
    "F3/3 B3/3 U/3 B2/1 B3/1 U/1",
  ]


def test_interleaved_with_a_stage_on_each_device_is_1f1b():
  for stages, microbatches in _sizes("interleaved"):
    table = pipeline.make_table(
      "interleaved", stages, microbatches, num_chunks=1
    )
    flushed = pipeline.make_table("1f1b", stages, microbatches)
    assert table.devices == flushed.devices


def test_zb_h1_delays_the_weight_part_of_stage_s_by_s_micro_batches():
  table = pipeline.make_table("zb_h1", 2, 3)
  orders = [" ".join(str(x).split("/")[0] for x in x) for x in table.devices]
  assert orders == [
    "F0 F1 I0 W0 F2 I1 W1 I2 W2 U",
    "F0 I0 F1 I1 W0 F2 I2 W1 W2 U",
  ]


def test_zb_h1_of_one_micro_batch_has_its_weight_parts_at_the_end():
  table = pipeline.make_table("zb_h1", 3, 1)
  assert [[str(x) for x in order] for order in table.devices] == [
    [f"{x}/{s}" for x in ("F0", "I0", "W0", "U")] for s in range(3)
  ]


@pytest.mark.parametrize("name", pipeline.TABLES)
def test_every_table_can_run_in_all_sizes(name):
  for stages, microbatches in _sizes(name):
    assert len(pipeline.make_table(name, stages, microbatches).devices)
  conformance.check(pipeline.TABLES[name])


@pytest.mark.parametrize(("stages", "microbatches"), _SIZES)
def test_bubbles_match_the_formulas(stages, microbatches):
  s, m = stages, microbatches
  make = pipeline.make_table
  assert _bubble(make("naive", s, m)) == pytest.approx(1 - 1 / s)
  for name in ("gpipe", "1f1b", "eager_1f1b"):
    assert _bubble(make(name, s, m)) == pytest.approx((s - 1) / (m + s - 1))
  if m % s == 0:
    for v in (1, 2, 3):
      table = make("interleaved", s, m, num_chunks=v)
      wanted = (s - 1) / (v * m + s - 1)
      assert _bubble(table) == pytest.approx(wanted)
  if m >= s:
    wanted = (s - 1) / (3 * m + s - 1)
    assert _bubble(make("zb_h1", s, m)) == pytest.approx(wanted)


@pytest.mark.parametrize(
  ("name", "live"),
  [
    ("naive", (1, 1, 1, 1)),
    ("gpipe", (8, 8, 8, 8)),
    ("1f1b", (4, 3, 2, 1)),
    ("eager_1f1b", (7, 5, 3, 1)),
    ("zb_h1", (4, 4, 4, 4)),
    ("pipedream", (4, 3, 2, 1)),
    ("2bw", (4, 3, 2, 1)),
    ("paci", (4, 3, 2, 1)),
    ("ours", (4, 3, 2, 1)),
    ("zb_h2", (7, 7, 7, 7)),
    # A device has two stages, each of half the size.
    ("zb_v", (4,) * 8),
  ],
)
def test_live_micro_batches_match_the_formulas(name, live):
  table = pipeline.make_table(name, 4, 8)
  assert pipeline.check_table(table).live == live


@pytest.mark.parametrize(
  ("table", "versions", "delays"),
  [
    (("1f1b", 4, 8), (1, 1, 1, 1), (0, 0, 0, 0)),
    (("pipedream", 4, 1), (4, 3, 2, 1), (3, 2, 1, 0)),
    (("2bw", 4, 8), (2, 2, 2, 2), (1, 1, 1, 1)),
    (("paci", 4, 8), (1, 1, 1, 1), (1, 1, 1, 0)),
    (("paci", 4, 1), (1, 1, 1, 1), (3, 2, 1, 0)),
    (("zb_h2", 4, 8), (1, 1, 1, 1), (0, 0, 0, 0)),
    (("zb_v", 2, 8), (1, 1, 1, 1), (0, 0, 0, 0)),
    (("ours", 4, 8), (2, 2, 2, 2), (1, 1, 1, 1)),
    (("ours", 4, 1), (4, 4, 4, 4), (3, 3, 3, 3)),
  ],
)
def test_versions_and_delays_match_the_formulas(table, versions, delays):
  table = pipeline.make_table(*table)
  report = pipeline.check_table(table)
  assert (report.versions, report.delays) == (versions, delays)
  assert table.window == 1 + max(delays)


def test_full_pipeline_of_ours_never_waits():
  for stages, microbatches in _SIZES:
    few, many = (
      _makespan(
        pipeline.make_table("ours", stages, microbatches, num_iterations=n)
      )
      for n in (10, 20)
    )
    # Ten more iterations take no longer than their work.
    assert many - few == pytest.approx(10 * microbatches * 3.0)


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("more", [0, 1, 8])
def test_zb_h2_has_no_bubble_from_2_s_less_1_micro_batches_on(stages, more):
  microbatches = 2 * stages - 1 + more

  def makespan(count):
    return _makespan(
      pipeline.make_table("zb_h2", stages, microbatches, num_iterations=count)
    )

  assert makespan(20) - makespan(10) == pytest.approx(10 * microbatches * 3)
  # With one micro-batch less a device has to wait.
  if stages > 1 and not more:
    few, many = (
      _makespan(
        pipeline.make_table("zb_h2", stages, microbatches - 1, num_iterations=n)
      )
      for n in (10, 20)
    )
    assert many - few > 10 * (microbatches - 1) * 3


def test_zb_v_waits_less_than_zb_h1_in_the_memory_of_1f1b():
  def period(name):
    few, many = (
      _makespan(pipeline.make_table(name, 8, 16, num_iterations=n))
      for n in (10, 20)
    )
    return (many - few) / 10

  # Passes of zb_v's stages, of which a device has two, take half as long.
  assert period("zb_v") / 2 == 51.5 and period("zb_h1") == 55
  report = pipeline.check_table(pipeline.make_table("zb_v", 8, 16))
  assert sum(x for x in report.live) / 2 == 8 * 8


def test_zero_bubble_of_unequal_stages_keeps_the_slowest_busy():
  times = [
    pipeline.StageTimes(*x)
    for x in ((1, 1, 1), (2, 3, 1), (1, 2, 1), (1, 1, 0))
  ]

  def seconds(action):
    each = times[action.stage]
    return {
      pipeline.Op.FORWARD: each.forward,
      pipeline.Op.BACKWARD_INPUT: each.backward,
      pipeline.Op.BACKWARD_WEIGHT: each.weight,
      pipeline.Op.UPDATE: 0.0,
    }[action.op]

  few, many = (
    _makespan(pipeline.zb_h2(times, 16, num_iterations=n), seconds)
    for n in (6, 12)
  )
  # The slowest stage needs 6 a micro-batch.
  assert (many - few) / 6 == pytest.approx(16 * 6, rel=0.03)


def test_live_micro_batches_cover_messages_in_both_directions():
  times = [pipeline.StageTimes(send=1.0)] * 3
  # Messages there and back take ten units, the time of five micro-batches.
  assert _asynchronous_tables.least_window(times, 1) == 5
  table = pipeline.greedy(times, 8)
  assert pipeline.check_table(table).live == (5, 3, 1)
  # 0.1 + 0.2 is not exact: seven stages take more than seven times as long.
  times = [pipeline.StageTimes(0.1, 0.2)] * 7
  assert _list_schedule.live_for_full_use(times) == [7, 6, 5, 4, 3, 2, 1]


def test_smaller_window_makes_devices_wait():
  table = pipeline.make_table("ours", 4, 1, window=2, num_iterations=20)
  assert pipeline.check_table(table, max_versions=2).versions == (2,) * 4
  assert _makespan(table) > 20 * 3.0 + 20


def test_window_of_one_is_synchronous():
  table = pipeline.make_table("ours", 4, 8, window=1, num_iterations=2)
  flushed = pipeline.make_table("1f1b", 4, 8, num_iterations=2)
  assert _makespan(table) == _makespan(flushed)
  assert pipeline.check_table(table).delays == (0, 0, 0, 0)


def test_greedy_matches_1f1b_and_is_better_for_slow_links():
  equal = [pipeline.StageTimes(1.0, 2.0)] * 4
  table = pipeline.greedy(equal, 8)
  assert _makespan(table) == _makespan(pipeline.make_table("1f1b", 4, 8))
  far = [pipeline.StageTimes(1.0, 2.0, send=2.0)] * 4

  def send_s(action):
    return 2.0

  def end(table):
    starts = _table.start_times(table, _seconds, send_s)
    return max(x + _seconds(action) for action, x in starts.items())

  assert end(pipeline.greedy(far, 8)) < end(pipeline.make_table("1f1b", 4, 8))


@pytest.mark.parametrize("times", [[(1, 2), (0, 0)], [(0, 0), (0, 0)]])
def test_stages_may_take_no_time(times):
  times = [pipeline.StageTimes(*x, weight=0.0) for x in times]
  for make in (pipeline.greedy, pipeline.ours, pipeline.zb_h2, pipeline.zb_v):
    pipeline.check_table(make(times, 4))
  assert pipeline.check_table(pipeline.greedy(times, 4)).live == (1, 1)


def test_greedy_is_faster_with_split_backward_passes():
  for stages, microbatches in ((3, 8), (4, 8), (4, 16)):
    split, whole = (
      _makespan(pipeline.greedy(times, microbatches, split=split))
      for times, split in (
        ([pipeline.StageTimes(1.0, 1.0, 1.0)] * stages, True),
        ([pipeline.StageTimes(1.0, 2.0)] * stages, False),
      )
    )
    assert split < whole


def test_greedy_respects_the_memory_of_each_stage():
  times = [pipeline.StageTimes(1.0, 2.0)] * 3
  table = pipeline.greedy(times, 8, max_live=[2, 2, 1])
  assert pipeline.check_table(table, max_live=2).live == (2, 2, 1)
  split = pipeline.greedy(times, 8, split=True)
  assert max(pipeline.check_table(split).live) <= 3


_TABLE = pipeline.make_table("1f1b", 2, 2)


@_refusals.table(
  *(
    ("stage", lambda call=call, stage=stage: call(stage), "int from 0 to 1")
    for stage in (-1, 2)
    for call in (
      _TABLE.last_backward,
      lambda x: _TABLE.needs(pipeline.Action(pipeline.Op.FORWARD, x)),
      lambda x: _TABLE.sends_to(pipeline.Action(pipeline.Op.BACKWARD, x)),
    )
  ),
  (
    "num_stages",
    lambda: pipeline.make_table("interleaved", 2, 2, num_chunks=99_999),
    "at most 100,000, got 199998 times 2 times 1",
  ),
  ("name", lambda: pipeline.make_table("dapple", 2, 2), "'naive'"),
  ("num_stages", lambda: pipeline.make_table("1f1b", 0, 2), "an int"),
  ("num_microbatches", lambda: pipeline.make_table("gpipe", 2, 0), "must"),
  (
    "num_iterations",
    lambda: pipeline.make_table("1f1b", 2, 2, num_iterations=0),
    "an int",
  ),
  ("num_microbatches", lambda: pipeline.make_table("paci", 4, 0), "must"),
  ("num_microbatches", lambda: pipeline.make_table("pipedream", 4, 0), "must"),
  ("num_microbatches", lambda: pipeline.make_table("2bw", 2, "x"), "must"),
  ("num_stages", lambda: pipeline.make_table("2bw", {"x": 1}, 2), "must"),
  (
    "times",
    lambda: pipeline.zb_v([pipeline.StageTimes()] * 3, 4),
    "two stages for each device in a V, got 3",
  ),
  ("max_live", lambda: pipeline.ours(4, 4, max_live=[2]), "each of the 4"),
  ("max_live", lambda: pipeline.ours(4, 4, max_live=2), "must"),
  (
    "window",
    lambda: pipeline.make_table("1f1b", 2, 2, window=3),
    "no option of 1f1b, which has num_iterations",
  ),
  (
    "num_microbatches",
    lambda: pipeline.make_table("interleaved", 4, 6),
    "a multiple of the devices",
  ),
  (
    "num_microbatches",
    lambda: pipeline.make_table("2bw", 4, 2),
    "an int >= 3, got 2",
  ),
  (
    "window",
    lambda: pipeline.make_table("ours", 2, 2, window=0),
    "an int >= 1",
  ),
  ("times", lambda: pipeline.greedy([], 2), "one stage's"),
  (
    "max_live",
    lambda: pipeline.greedy([pipeline.StageTimes()], 2, max_live=[0]),
    "an int >= 1",
  ),
  ("forward", lambda: pipeline.StageTimes(-1.0), "in [0, inf]"),
  ("devices", lambda: pipeline.Table("x", (), 1, 1), "one at least"),
  (
    "weights",
    lambda: pipeline.Table("x", ((),), 1, 1, weights="old"),
    "'delayed', 'stashed' or 'newest'",
  ),
)
def test_invalid_arguments_raise(argument, call, rule):
  _refusals.check(argument, call, rule)


def test_needs_and_sends_stay_in_their_iteration():
  table = pipeline.make_table("zb_h1", 3, 2, num_iterations=2)

  def action(text):
    return next(x for x in table if str(x) == text)

  def needs(text):
    return list(map(str, table.needs(action(text))))

  assert needs("F1/0@1") == []
  assert needs("F1/2@1") == ["F1/1@1"]
  assert needs("I1/1@1") == ["F1/1@1", "I1/2@1"]
  assert needs("W1/1@1") == ["I1/1@1"]
  assert needs("U/1@1") == ["W0/1@1", "W1/1@1"]
  assert str(table.sends_to(action("F1/0@1"))) == "F1/1@1"
  assert str(table.sends_to(action("I1/2@1"))) == "I1/1@1"
  assert table.sends_to(action("F1/2@1")) is None
  # Stages of one device send each other nothing.
  alone = pipeline.make_table("interleaved", 1, 2)
  assert {alone.sends_to(x) for x in alone} == {None}


def test_greedy_refuses_more_passes_than_a_table_can_list():
  times = [pipeline.StageTimes(1.0, 2.0)] * 2
  for numbers in ((10**6, 10**6), (0, 1), (1, 0)):
    with pytest.raises(ValueError, match=r"`num_|must be at most"):
      pipeline.greedy(times, numbers[0], num_iterations=numbers[1])
