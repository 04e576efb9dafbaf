"""Counted bytes match hand computations and compiled programs."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import collectives
from jdist.collectives import _axis, _traffic
from jdist.profiling import _hlo

Collective = _traffic.Collective
AXIS = "worker"


def struct(*shape, dtype="float32"):
  return jax.ShapeDtypeStruct(shape, dtype)


def count(step, *args, axis=AXIS, num_workers=8):
  return _traffic.traffic(step, *args, axis=axis, num_workers=num_workers)


@pytest.mark.smoke
@pytest.mark.parametrize(
  ("kind", "sent"),
  [
    ("all-reduce", 2 * 3 / 4 * 100),
    ("all-gather", 3 * 100),
    ("reduce-scatter", 3 / 4 * 100),
    ("all-to-all", 3 / 4 * 100),
    ("permute", 100),
  ],
)
def test_bytes_in_a_ring_of_four_match_hand_computation(kind, sent):
  assert Collective(kind, 100, num_workers=4).wire_bytes == sent
  assert Collective(kind, 100, num_workers=4, count=3).wire_bytes == 3 * sent
  assert Collective(kind, 100, num_workers=1).wire_bytes == 0


def test_steps_and_rounds_add_up():
  traffic = _traffic.Traffic(
    (
      Collective("all-reduce", 100, 2),
      Collective("all-gather", 30, 2, conditional=True),
    )
  )
  assert traffic.bytes_per_step == 100
  assert traffic.bytes_per_round == 30
  assert traffic.sent_bytes(steps=10, rounds=2) == 1060


def test_local_step_matches_hand_computation():
  def step(x, is_end):
    x = x - 1.0
    x = jax.lax.cond(
      is_end,
      lambda: collectives.mean(x, AXIS),
      lambda: collectives.varying(x, AXIS),
    )
    return x, collectives.mean(jnp.sum(x), AXIS)

  traffic = count(step, struct(10), struct(dtype="bool"), num_workers=4)
  assert traffic.collectives == (
    Collective("all-reduce", 40, 4, conditional=True),
    Collective("all-reduce", 4, 4, depth=2),
  )
  assert traffic.bytes_per_step == 6
  assert traffic.bytes_per_round == 60


def warm(x):
  """Gathered in steps 1 and 2, exchanged in 3, then nothing."""

  def branch(start, stop, does):
    def run(x):
      with collectives.phase(start, stop):
        return collectives.varying(does(x), AXIS)

    return run

  return jax.lax.switch(
    x[0].astype(jnp.int32),
    [
      branch(0, 2, lambda x: collectives.gather(x, AXIS).sum(0)),
      # The names of a called function begin anew.
      branch(2, 3, jax.jit(lambda x: collectives.mean(x, AXIS))),
      branch(3, None, lambda x: x),
    ],
    x,
  )


def test_phase_counts_its_own_steps():
  traffic = count(warm, struct(10), num_workers=4)
  assert [str(p) for p in traffic.phases] == ["steps 1-2", "step 3"]
  assert (traffic.bytes_per_step, traffic.bytes_per_round) == (0, 0)
  first, second = 3 * 40, 2 * 3 / 4 * 40
  for steps, sent in (
    (0, 0), (1, first), (2, 2 * first), (3, 2 * first + second),
    (9, 2 * first + second),
  ):  # fmt: skip
    assert traffic.sent_bytes(steps, steps) == sent
    after = traffic.sent_bytes(9 - steps, 9, after_steps=steps)
    assert sent + after == 2 * first + second


def test_phase_at_the_end_of_a_round_counts_rounds():
  def step(x, is_end):
    x = jax.lax.cond(
      is_end,
      lambda: warm(x) + collectives.mean(x, AXIS),
      lambda: collectives.varying(x, AXIS),
    )
    return collectives.mean(x[0], AXIS)

  traffic = count(step, struct(10), struct(dtype="bool"), num_workers=4)
  assert [str(p) for p in traffic.phases] == ["rounds 1-2", "round 3"]
  assert (traffic.bytes_per_step, traffic.bytes_per_round) == (6, 60)
  assert traffic.sent_bytes(20, 3) == 20 * 6 + 3 * 60 + 2 * 120 + 60
  assert traffic.sent_bytes(1, 1, after_steps=9, after_rounds=2) == 6 + 60 + 60


def test_phase_in_a_phase_counts_from_its_beginning():
  def step(x):
    def late():
      with collectives.phase(5, 7):
        return warm(x)

    return jax.lax.cond(x[1] > 0, late, lambda: collectives.varying(x, AXIS))

  traffic = count(step, struct(10), num_workers=4)
  assert [str(p) for p in traffic.phases] == ["steps 6-7"]
  assert traffic.sent_bytes(20, 20) == 2 * 120


def test_phases_are_in_the_order_of_their_steps():
  phases = [
    collectives.Phase(*x)
    for x in ((0,), (2, 5), (0, 3, "step"), (2, 2), (0, 3, "round"))
  ]
  traffic = _traffic.Traffic(
    tuple(Collective("permute", 1, 2, True, phase=x) for x in phases)
  )
  # That without an end is the last of those that begin together.
  assert [str(x) for x in traffic.phases] == [
    "rounds 1-3", "steps 1-3", "from step 1 on", "steps 3-5",
  ]  # fmt: skip


def test_scan_counts_its_length():
  def step(x):
    body = lambda x, _: (collectives.mean(x, AXIS), None)  # noqa: E731
    return jax.lax.scan(body, x, length=5)

  (found,) = count(step, struct(10)).collectives
  assert found == Collective("all-reduce", 40, 8, count=5)


_swapped = jax.jit(lambda x, y: (y, x))


@pytest.mark.parametrize(
  ("step", "depths"),
  [
    (lambda x: (jax.lax.psum(x, AXIS), jax.lax.pmax(x, AXIS)), [1, 1]),
    (lambda x: jax.lax.psum(2 * jax.lax.psum(x, AXIS), AXIS), [1, 2]),
    (lambda x: jax.lax.psum(jax.jit(_sum_of_first)(x, x), AXIS), [1, 2]),
    (
      lambda x: jax.lax.psum(
        jax.lax.cond(x[0] > 0, _sum_of_first, lambda x, y: y, x, x), AXIS
      ),
      [1, 2],
    ),
    (
      lambda x: [jax.lax.psum(z, AXIS) for z in _swapped(_sum(x), x)],
      [1, 1, 2],
    ),
    (lambda x: [jax.lax.psum(y, AXIS) for y in jax.jit(_pair)(x)], [1, 2, 1]),
    (lambda x: (_sum(x), x)[1], []),  # No compiled program sends it.
  ],
)  # fmt: skip
def test_depth_counts_collectives_on_the_longest_way_of_data(step, depths):
  found = count(step, struct(4))
  assert [x.depth for x in found.collectives] == depths


def _sum(x):
  return jax.lax.psum(x, AXIS)


def _sum_of_first(x, y):
  return _sum(x) + y


def _pair(x):
  return _sum(x), x


def test_payloads_count_in_their_own_dtype():
  step = lambda x: collectives.mean(x, AXIS)  # noqa: E731
  (found,) = count(step, struct(10, dtype="bfloat16")).collectives
  assert found.payload_bytes == 20
  step = lambda x: collectives.gather(x, AXIS)  # noqa: E731
  (found,) = count(step, struct(10, dtype="uint8")).collectives
  assert found == Collective("all-gather", 10, 8)


def test_workers_that_share_a_device_count_as_machines_of_their_own():
  axis = ("inner", "outer")
  for say in (collectives.mean, collectives.gather, collectives.all_to_all):
    one = count(lambda x, say=say: say(x, AXIS), struct(8, 3))
    two = count(lambda x, say=say: say(x, axis), struct(8, 3), axis=axis)
    assert one.bytes_per_step == two.bytes_per_step > 0


def test_single_worker_sends_nothing():
  step = lambda x: collectives.mean(x, None)  # noqa: E731
  assert count(step, struct(3), axis=None).collectives == ()
  step = lambda x: collectives.mean(x, AXIS)  # noqa: E731
  assert count(step, struct(3), num_workers=1).collectives == ()
  assert count(lambda x: x + 1, struct(3)).bytes_per_step == 0


def test_collectives_over_other_axes_are_not_counted():
  def step(x):
    inner = jax.vmap(lambda y: jax.lax.psum(y, "other"), axis_name="other")
    return collectives.mean(inner(x), AXIS)

  (found,) = count(step, struct(4, 3)).collectives
  assert found == Collective("all-reduce", 48, 8)


def test_collectives_on_each_device_of_a_worker_count_for_each():
  def step(x):
    spec = jax.sharding.PartitionSpec()
    return jax.shard_map(
      lambda x: collectives.mean(x, AXIS), in_specs=spec, out_specs=spec,
      axis_names={"fsdp"}, check_vma=False,
    )(x)  # fmt: skip

  inner = {"fsdp": 3, "other": 5}
  found = _traffic.traffic(
    step, struct(10), axis=AXIS, num_workers=8, inner_axes=inner
  )
  assert found.bytes_per_step == 3 * 2 * 7 / 8 * 40


def test_leaves_go_between_cpu_hosts_in_messages_of_25_mib(monkeypatch):
  monkeypatch.setattr(_axis, "joins_cpu_hosts", lambda: True)
  leaves = [struct(2**18, size) for size in (20, 5, 1)]
  found = count(lambda *x: collectives.mean(x, AXIS), *leaves).collectives
  assert [x.payload_bytes // 2**20 for x in found] == [25, 1]


def mean_of_a_tree(x):
  return collectives.mean({"a": x, "b": x[:3], "c": x[0]}, AXIS)


def a_round_now_and_then(x):
  return jax.lax.cond(
    x[0] > 0,
    lambda: collectives.sum(x, AXIS),
    lambda: collectives.varying(x * 2.0, AXIS),
  )


def steps_in_a_scan(x):
  def body(x, _):
    return collectives.mean(x * 2.0, AXIS), collectives.gather(x, AXIS)

  return jax.lax.scan(body, x, length=3)


def gather_bytes(x):
  return collectives.gather(x.astype(jnp.uint8), AXIS)


def exchange_and_gather(x):
  mine = collectives.all_to_all(x.reshape(8, -1), AXIS).sum(0)
  return collectives.gather(mine, AXIS)


def both_in_a_conditional(x):
  rare = jax.lax.cond(
    x[0] > 0,
    lambda: collectives.gather(x * 3.0, AXIS),
    lambda: collectives.varying(jnp.zeros((8, *x.shape)), AXIS),
  )
  return rare, collectives.mean(x, AXIS)


def another_in_every_phase(x):
  return a_round_now_and_then(warm(x))


STEPS = (
  another_in_every_phase,
  mean_of_a_tree,
  a_round_now_and_then,
  steps_in_a_scan,
  gather_bytes,
  exchange_and_gather,
  both_in_a_conditional,
)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_compiled_program_sends_counted_bytes(step):
  team = collectives.workers(8, substrate="shard_map")
  x = team.place(np.ones((8, 16), np.float32))
  counted = count(step, struct(16)).collectives
  program = _hlo.read_collectives(team.jit(step).lower(x).compile())

  def total(found):
    # The compiler merges reductions, so their bytes are compared.  It lists the
    # collectives of a loop once.
    sums = collections.Counter()
    for c in found:
      sums[c.kind, c.num_workers, c.conditional, c.phase] += c.payload_bytes
    return sums

  assert counted
  assert total(program) == total(counted)
