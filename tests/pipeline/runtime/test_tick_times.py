"""Seconds of ticks against closed forms."""

import pytest

from jdist import pipeline
from jdist.pipeline.runtime import _grid

_F, _B = 1.0, 3.0


def _seconds(op, stage):
  return _F if op == pipeline.Op.FORWARD else _B


def _times(grid, send_s, late, **options):
  return _grid.tick_times(grid, _seconds, send_s, late=late, **options)


@pytest.mark.parametrize("send_s", [0.0, 0.5, 2.0, 5.0])
@pytest.mark.parametrize("stages", [2, 4])
def test_tick_times_of_a_full_pipeline_match_closed_forms(stages, send_s):
  count = 8
  table = pipeline.ours(stages, count, window=4)
  late = _times(_grid.make_grid(table, send_ticks=2), send_s, late=True)
  # All devices run forward passes in one tick and backward passes in the next.
  assert late.step_s == count * (max(_F, send_s) + max(_B, send_s))
  assert late.free_s == late.compute_s == count * (_F + _B)
  assert late.send_s == 2 * count * send_s
  between = _times(_grid.make_grid(table), send_s, late=False)
  # One of two neighbours runs a backward pass, and then both wait.
  assert between.free_s == 2 * count * _B
  assert between.step_s == 2 * count * (_B + send_s)
  assert between.hidden_share == (0.0 if send_s else 1.0)


def test_naive_table_exposes_every_send():
  table = pipeline.make_table("naive", 4, 1)
  late, between = (
    _times(_grid.make_grid(table, send_ticks=ticks), 0.5, late=ticks == 2)
    for ticks in (2, 1)
  )
  assert (late.ticks, between.ticks) == (14, 8)
  assert between.free_s == late.free_s == 4 * (_F + _B)
  # A send leaves with the next tick, and is waited for at its end.
  assert late.exposed_s == 6 * 0.5
  assert between.exposed_s == 8 * 0.5


@pytest.mark.parametrize(("stages", "count"), [(2, 4), (4, 8), (8, 32)])
def test_eager_1f1b_fills_the_ticks_in_which_1f1b_waits_for_late_sends(
  stages, count
):
  plain, eager, gpipe = (
    _grid.make_grid(pipeline.make_table(name, stages, count), send_ticks=2)
    for name in ("1f1b", "eager_1f1b", "gpipe")
  )
  filled = 2 * (count + 2 * (stages - 1))
  assert len(eager.rows) == len(gpipe.rows) == filled
  assert len(plain.rows) > filled
  assert eager.slots == 2 * stages - 1
  assert _times(eager, 0.5, late=True).step_s <= (
    _times(gpipe, 0.5, late=True).step_s
  )


def test_one_device_sends_nothing():
  table = pipeline.make_table("1f1b", 1, 4)
  grid = _grid.make_grid(table)
  found = _times(grid, 2.0, late=False, between_s=0.25)
  assert found.step_s == 4 * (_F + _B) + 8 * 0.25
  assert found.send_s == found.exposed_s == 0.0
