"""Shards of a server: the same bits as one, and what is refused."""

import functools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import codecs, reducers, server
from jdist.server.gradients import _division, _gradient_messages
from jdist.server.runtime import _engine, _server_shards
from tests.server import _live_runs

pytest.importorskip("simpy")

PARAMS = {
  "a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(4), "c": jnp.zeros((2, 2)),
}  # fmt: skip
MOMENTUM = optax.sgd(0.1, momentum=0.9)
CAST = reducers.MessageCodec(codecs.Cast("bfloat16"))
BITS = server.BitPlans(bits=((32,) * 3, (8, 16, 8)), sizes=(6, 4, 4))


class Near:
  """Channels to servers of this process."""

  def __init__(self, servers):
    self.servers = servers

  def shard(self, number):
    return Near([self.servers[number - 1]])

  def push(self, header, payload=None):
    return self.servers[0].push(header, payload)

  def ask(self, method, *args):
    return getattr(self.servers[0], method)(*args)

  def pull(self, worker, life):
    return self.servers[0].pull(worker, life).result(timeout=60)


def whole(plans, optimizer=None, params=PARAMS, **options):
  return server.GradientServer(
    optimizer or MOMENTUM, params, plans, workers=("x", "y"),
    model_state={"mean": jnp.zeros(2)}, seed=3, **options,
  )  # fmt: skip


class Samples:
  """A stream that all share."""

  shared = True

  def batch(self, worker, start, count, *, size=None):
    return {"x": np.sin(np.arange(start, start + count, dtype=np.float32))}


def loss_fn(params, model_state, batch, key):
  total = sum(jnp.sum(x * x) for x in jax.tree.leaves(params))
  change = {"mean": model_state["mean"] + 1.0}
  return total * jnp.mean(batch["x"] ** 2), (change, {})


def worker(plans, name):
  return server.GradientWorker(
    loss_fn, PARAMS, Samples(), plans, number="xy".index(name), num_workers=2,
    sizes=[8], model_state={"mean": jnp.zeros(2)},
  )  # fmt: skip


def divided(plans, count=2, **options):
  """Returns the coordinator's learner, and the shards."""
  one = whole(plans, **options)
  shards = [_server_shards.Shard(x) for x in server.divide(one, count)]
  plan = server.LivePlan(workers=("x", "y"), shards=count, channel=Near(shards))
  return _server_shards.ShardedServer(one, plan), shards


def push_of(plans, plan, number):
  """Returns the bytes of a push."""
  rng = np.random.default_rng(number)
  grads = jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), PARAMS
  )
  change = {"mean": jnp.full(2, 0.5)}
  codec = plans.push[plan]
  if codec is not None:
    grads, _ = codec.encode(grads, codec.init(PARAMS))
  return _gradient_messages.tree_bytes((grads, change))


# Random rounding compiles for longer.
@pytest.mark.parametrize(
  "options",
  [
    pytest.param({}, id="exact"),
    pytest.param({"push_codec": CAST}, id="cast"),
    pytest.param({"plans": BITS}, id="bits", marks=pytest.mark.slow),
  ],
)
def test_shards_send_and_update_the_bits_of_one_server(options):
  plans = server.message_plans(**options)
  one = whole(plans, compensation=0.5)
  many, shards = divided(plans, compensation=0.5)
  last = len(plans.push) - 1
  for task in range(4):
    plan = min(task // 2, last)
    reply = server.Reply("xy"[task % 2], task, 0, 8, 1, plan, plan)
    more, payload = one.reply(reply)
    told, nothing = many.reply(reply)
    assert nothing is None and told.pop("size") and told == more
    found = [x.pull("", task).result(timeout=60) for x in shards]
    assert all(header["there"] for header, _ in found)
    parts = [part for _, part in found]
    np.testing.assert_array_equal(
      _division.join(parts, many.told["pull"][plan]),
      _gradient_messages.bytes_of(payload),
    )
    message, notes = push_of(plans, plan, task), {"loss": 1.0 + task}
    one.push(task, notes, message)
    split = _division.split(message, many.told["push"][plan])
    for shard, part in zip(shards, split, strict=True):
      assert shard.push({"task": task, "more": notes}, part) == {}
    many.push(task, notes, None)
    if task % 2:
      for update in (
        server.Apply((task,), (0.5,), (0,), frozenset({task})),
        server.Apply((task - 1, task), (0.25, 0.75), (0, 0)),
      ):
        one.apply(update)
        many.apply(update)
  np.testing.assert_array_equal(many.snapshot(), one.snapshot())
  assert many.finite and many.losses == one.losses
  # A checkpoint puts other shards in the same state.
  again, _ = divided(plans, compensation=0.5)
  again.load(*many.save())
  np.testing.assert_array_equal(again.snapshot(), one.snapshot())
  assert again.samples == one.samples == 32


ONE = {"a": jnp.ones(2)}


@pytest.mark.parametrize(
  ("arguments", "count", "rule"),
  (
    (
      {"optimizer": optax.chain(optax.clip_by_global_norm(1.0), MOMENTUM)},
      2,
      "`optimizer` must update each tensor by its gradient alone",
    ),
    (
      {"optimizer": optax.chain(optax.clip_by_global_norm(100.0), MOMENTUM)},
      2,
      "`optimizer` must update each tensor by its gradient alone",
    ),
    ({}, 4, "`shards` must leave each a tensor, got 4 for 3 tensors"),
    ({"params": PARAMS | {"a": jnp.ones(99)}}, 3, "one of 93% of the bytes"),
    ({"params": ONE}, 2, "`shards` must leave each a tensor, got 2 for 1"),
  ),
)
def test_parameters_that_cannot_be_divided_are_refused(arguments, count, rule):
  one = whole(server.message_plans(), **arguments)
  with pytest.raises(ValueError, match=re.escape(rule)):
    server.divide(one, count)


@pytest.mark.parametrize(
  ("sizes", "count", "owners"),
  [
    # A leaf belongs to the part with its middle byte: 1.5, 3.5 and 6 of 8.
    ((3, 1, 4), 2, [0, 0, 1]),
    ((1, 4, 3), 2, [0, 0, 1]),
    ((1, 5, 2), 2, [0, 0, 1]),
    ((1, 1, 1, 1), 4, [0, 1, 2, 3]),
  ],
)
def test_leaves_belong_to_the_part_of_their_middle_byte(sizes, count, owners):
  params = {f"{i}": jnp.ones(size) for i, size in enumerate(sizes)}
  parts = server.divide(whole(server.message_plans(), params=params), count)
  found = [i for i, x in enumerate(parts) for _ in jax.tree.leaves(x["params"])]
  assert found == owners
  assert [x["model_state"] for x in parts[:-1]] == [{}] * (count - 1)


def test_bytes_of_a_coded_message_belong_to_the_parts_of_their_leaves():
  # Leaves of 6, 4 and 4 entries in 8, 16 and 8 bits, and a scale of 32 bits.
  codes, scales = [6, 4 * 2, 4], [4] * 3
  one = whole(server.message_plans(plans=BITS))
  model = one.model.params, one.model.model_state
  found = _division.places(one.plans.push[1], model, server.divide(one, 2))
  sizes = [sum(size for part, size in found if part == i) for i in range(2)]
  # A byte for each leaf says that it is finite; statistics of 8 bytes are last.
  assert sizes == [
    sum(codes[:1] + scales[:1]) + 1,
    sum(codes[1:] + scales[1:]) + 2 + 8,
  ]


@pytest.mark.parametrize("shards", (0, -1, 1.5, "2", None))
def test_number_of_shards_is_checked_when_a_plan_is_made(shards):
  with pytest.raises(ValueError, match="`shards` must be"):
    server.LivePlan(workers=("x",), shards=shards)


def test_other_learners_are_not_divided():
  plan = server.LivePlan(workers=("x",), shards=2)
  protocol = server.ASP(batches=server.FixedBatches(1))
  with pytest.raises(ValueError, match="unless the learner is a"):
    server.LiveServer(protocol, server.EmptyServer(8), plan)


def test_parts_that_are_late_wrong_or_gone():
  plans = server.message_plans()
  many, (one, other) = divided(plans)
  waits = other.pull("x", 0)  # Before the task is given.
  assert not waits.done()
  many.reply(server.Reply("x", 0, 0, 8))
  assert waits.result(timeout=60)[0] == {"there": True}
  # A shard refuses what is not finite, and the coordinator what it refused.
  header = {"task": 0, "more": {"loss": 1.0}}
  nothing = np.full(40, 255, np.uint8)
  assert one.push(header, nothing) == {"wrong": "shape"}
  with pytest.raises(server.RefusedError, match="refused its part") as error:
    many.push(0, {"loss": 1.0, "wrong": "shape"}, None)
  assert error.value.reason == "shape"
  many.discard(0)
  assert not many.tasks
  assert many.finite  # It is asked after the commands before.
  assert one.pull("x", 0).result(timeout=60)[0] == {"there": False}
  assert one.push(header, nothing) == {}  # Its task was taken back.
  # A task without parameters leaves nothing behind.
  many.reply(server.Reply("x", 1, 0, 8, pull_plan=None))
  assert many.finite and not one._ready


def test_lost_shard_is_an_error_of_the_coordinator():
  class Lost(Near):
    def ask(self, method, *args):
      raise _engine.LostServerError("It was killed.")

    def shard(self, number):
      return Lost(self.servers) if number == 2 else super().shard(number)

  one = whole(server.message_plans())
  shards = [_server_shards.Shard(x) for x in server.divide(one, 2)]
  plan = server.LivePlan(workers=("x", "y"), shards=2, channel=Lost(shards))
  many = _server_shards.ShardedServer(one, plan)
  with pytest.raises(_engine.LostServerError, match="It was killed"):
    for task in range(6000):
      many.reply(server.Reply("x", task, 0, 8))
      time.sleep(0.01)


def test_watcher_of_a_server_sees_that_a_shard_is_lost():
  class Lost(Near):
    def shard(self, number):
      return Lost(self.servers)

    def ask(self, method, *args):
      raise _engine.LostServerError("It was killed.")

  plan = server.LivePlan(workers=("x",), shards=2, channel=Lost([]))
  protocol = server.ASP(batches=server.FixedBatches(8))
  coordinator = server.LiveServer(protocol, whole(server.message_plans()), plan)
  try:
    coordinator.push({"kind": "hello", "worker": "x"})
    coordinator.start()
    with pytest.raises(_engine.LostServerError, match="It was killed"):
      for _ in range(1000):  # The next message to the shard finds it.
        coordinator.lost("x")
        time.sleep(0.05)
        assert coordinator.status()["error"] is None
    # Workers wait for servers that begin again, and are not sent home.
    time.sleep(0.1)
    assert not coordinator.pull("x", 1).done()
  finally:
    coordinator.stop()


def test_threads_train_with_shards_as_with_one_server(tmp_path):
  # A barrier's order is that of the workers, whichever is first.
  protocol = server.BSP(batches=server.FixedBatches(8))
  plans, found, path = server.message_plans(), [], str(tmp_path / "record")

  def work(name, channel):
    learner = worker(plans, name)
    server.WorkerLoop(channel, name, learner, depth=protocol.depth).run()

  slow = optax.sgd(1e-4, momentum=0.9)

  def make_server(plan):
    return server.LiveServer(protocol, whole(plans, slow), plan)

  for shards in (1, 2):
    engine = server.ThreadEngine()
    try:
      _live_runs.run(
        engine, make_server,
        {name: functools.partial(work, name) for name in "xy"}, 4,
        plan=server.LivePlan(workers=("x", "y"), shards=shards, record=path),
        model=(PARAMS, {"mean": jnp.zeros(2)}),
        evaluate=lambda model: found.append(model) or {},
      )  # fmt: skip
    finally:
      engine.stop()
  jax.tree.map(np.testing.assert_array_equal, *found)
  # One server makes of the recorded order what the shards have made.
  again = whole(plans, slow)
  assert server.replay(path, protocol, again).state.version == 4
  jax.tree.map(
    np.testing.assert_array_equal, again.model.params, found[1].params
  )


def test_workers_of_own_streams_have_positions_of_their_own():
  one = whole(server.message_plans(), shared=False)
  starts = [
    one.reply(server.Reply(name, task, 0, 8, 1, 0, 0))[0]["start"]
    for task, name in enumerate("xyx")
  ]
  assert starts == [0, 0, 8]


def test_parameters_of_a_task_that_is_discarded_are_dropped():
  one = whole(server.message_plans(), compensation=0.5)
  one.reply(server.Reply("x", 0, 0, 8, 1, 0, 0))
  assert list(one._sent) == [0]
  one.discard(0)
  assert not one._sent


def test_optimizer_begins_with_the_parameters():
  slow = optax.GradientTransformation(lambda p: p, lambda u, s, p=None: (u, s))
  one = whole(server.message_plans(), optimizer=slow)
  jax.tree.map(np.testing.assert_array_equal, one.model.opt_state, PARAMS)
