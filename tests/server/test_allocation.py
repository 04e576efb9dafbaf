"""Tests of batches that follow speeds."""

import itertools

import hypothesis
from hypothesis import strategies as st

from jdist import server
from jdist.server import _allocation

SHARES = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12)


@hypothesis.given(SHARES, st.integers(1, 8), st.integers(1, 64), st.data())
def test_batches_sum_exactly_within_their_bounds(shares, low, room, data):
  high = [low + data.draw(st.integers(0, room)) for _ in shares]
  total = data.draw(st.integers(low * len(shares), sum(high)))
  sizes = _allocation.largest_remainder(
    shares, total, minimum=low, maximum=high
  )
  assert sum(sizes) == total
  assert all(low <= s <= h for s, h in zip(sizes, high, strict=True))


@hypothesis.given(SHARES, st.integers(0, 10_000))
def test_unbounded_batches_are_within_one_of_their_share(shares, total):
  sizes = _allocation.largest_remainder(shares, total)
  for size, share in zip(sizes, shares, strict=True):
    assert abs(size - total * share / sum(shares)) < 1 + 1e-6
  # A larger share has no smaller part.
  pairs = sorted(zip(shares, sizes, strict=True))
  assert all(
    b[1] >= a[1]
    for a, b in itertools.pairwise(pairs)
    if b[0] > a[0] * (1 + 1e-9)
  )


def test_batches_make_iterations_equally_long():
  """The cost may be one of each batch and of its samples."""
  fixed, each = [0.05, 0.01, 0.2], [0.001, 0.004, 0.002]
  protocol = server.dbs(300, smoothing=0.0)
  state = protocol.init("abc")
  seconds = {}
  for _ in range(60):
    for i, worker in enumerate("abc"):
      (reply,) = protocol.receive(state, 0.0, server.Pull(worker))
      seconds[worker] = fixed[i] + each[i] * reply.samples
      push = server.Push(worker, reply.task, reply.samples, seconds[worker])
      protocol.receive(state, 0.0, push)
  assert max(seconds.values()) / min(seconds.values()) < 1.1
  assert sum(member.samples for member in state.members.values()) == 300


def test_new_worker_takes_a_mean_batch_until_its_speed_is_known():
  protocol = server.dbs(60)
  state = protocol.init("ab")
  protocol.receive(state, 0.0, server.Join("c"))
  assert [member.samples for member in state.members.values()] == [30, 30, 30]
  for worker in "ab":
    (reply,) = protocol.receive(state, 0.0, server.Pull(worker))
    protocol.receive(
      state, 0.0, server.Push(worker, reply.task, reply.samples, 1.0)
    )
  assert [member.samples for member in state.members.values()] == [20, 20, 20]


def test_default_gives_every_worker_one_sample_at_least():
  batches = server.SpeedBatches(total=4)
  assert batches.sizes([1000.0, 1.0]) == (3, 1)
  assert server.SpeedBatches(total=4, minimum=2).sizes([1000.0, 1.0]) == (2, 2)


def test_limit_below_the_smallest_batch_yields_to_it():
  batches = server.SpeedBatches(total=12, minimum=4)
  assert batches.sizes([1.0, 1.0], limits=[2, None]) == (4, 8)


def test_overheads_count_only_once_a_speed_is_known():
  """They are in seconds, of which an assumed speed makes no samples."""
  batches, overheads_s = server.SpeedBatches(total=12), [4.0, 0.0]
  assert batches.sizes([None, None], overheads_s=overheads_s) == (6, 6)
  assert batches.sizes([1.0, 1.0], overheads_s=overheads_s) == (4, 8)


def test_rounding_of_a_huge_total_takes_nothing_from_a_small_share():
  """The shares of floats sum to one more; the second's exact one is 1.43."""
  sizes = _allocation.largest_remainder([7.0, 1e-16], 10**17)
  assert sizes == (10**17 - 1, 1)


def test_new_worker_takes_no_more_than_its_memory_holds():
  protocol = server.dbs(60, limits={"c": 4})
  state = protocol.init("ab")
  protocol.receive(state, 0.0, server.Join("c"))
  assert state.members["c"].samples == 4


def test_worker_without_a_speed_takes_the_mean_of_the_known_ones():
  # The mean of 3 and 1 is 2, of which a speed of zero is no part.
  assert server.SpeedBatches(total=12).sizes([0.0, 3.0, 1.0]) == (4, 6, 2)


def test_sum_is_the_nearest_that_the_bounds_allow():
  assert server.SpeedBatches(total=2).sizes([1.0, 1.0, 1.0]) == (1, 1, 1)
  assert server.SpeedBatches(total=12, maximum=3).sizes([1.0, 1.0]) == (3, 3)


def test_remainder_goes_to_the_first_of_equal_ones_inside_the_bounds():
  assert _allocation.largest_remainder([1.0, 1.0], 3) == (2, 1)
  # Floats give one sample too many, which the second cannot give back.
  sizes = _allocation.largest_remainder([7.0, 1e-30], 10**17, minimum=1)
  assert sizes == (10**17 - 1, 1)


def test_rounding_of_the_slope_moves_no_sample():
  # Two are at their bounds long before the third begins.
  found = _allocation.largest_remainder(
    [3.3, 0.05, 1.1], 14, maximum=[9, 2, 12], offsets=[50.0, 0.3, 0.1]
  )
  assert found == (0, 2, 12)
