"""Seconds of ticks against closed forms."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

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


def test_all_devices_may_wait_for_the_slowest_of_a_tick():
  # In turn the first and the last of three devices take long.
  seconds = [[8.0, 1.0, 1.0], [1.0, 1.0, 8.0]]
  rows = np.zeros((2, 3, _grid.NUM_COLUMNS), np.int32)
  rows[..., _grid.FORWARD] = int(pipeline.Op.FORWARD)
  rows[1, :, _grid.FORWARD + 1] = 1  # The second chunk.
  kept = _grid.Grid(rows, 3, 1, 0, 0, 1, 1, 1, frozenset())

  def of(op, stage):
    return seconds[stage // 3][stage % 3]

  near, every = (
    _grid.tick_times(kept, of, 0.5, late=False, all_wait=x)
    for x in (False, True)
  )
  # The last one does not wait for the first, two devices away.
  assert (near.free_s, near.step_s) == (9.0, 10.0)
  assert (every.free_s, every.step_s) == (16.0, 17.0)
  # In a ring, of two stages on each, they are neighbours.
  ring = dataclasses.replace(kept, num_stages=6)
  assert _grid.tick_times(ring, of, 0.5, late=False) == every


def test_permute_of_cpu_devices_waits_for_all_of_them():
  like, ends = jax.ShapeDtypeStruct((), jnp.float32), {}

  def pause(device, _):
    time.sleep(0.3 if device == 0 else 0.0)
    return np.float32(0)

  def end(device, _):
    ends[int(device)] = time.monotonic()
    return np.float32(0)

  def device(x):
    number = jax.lax.axis_index("stage")
    x = x + jax.pure_callback(pause, like, number, x[0])
    x = jax.lax.ppermute(x, "stage", [(0, 1), (1, 2), (2, 3)])
    return x + jax.pure_callback(end, like, number, x[0])

  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((4,), ("stage",), axis_types=auto)
  spec = PartitionSpec("stage")
  run = jax.jit(
    jax.shard_map(
      device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
  )
  jax.block_until_ready(run(jnp.arange(4.0)))
  start = time.monotonic()
  jax.block_until_ready(run(jnp.arange(4.0)))
  # The last device receives from the third one, which was ready at once.
  assert sorted(ends) == [0, 1, 2, 3]
  assert min(ends.values()) - start > 0.29
