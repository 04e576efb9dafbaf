"""Real gradients on the virtual clock: identities that must hold."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import (
  cluster,
  codecs,
  collectives,
  data,
  methods,
  models,
  reducers,
  server,
  training,
)
from jdist.server.gradients import _merge, _packed

pytest.importorskip("simpy")

DIGITS = data.load("digits")
MODEL = models.build(
  "mlp", input_shape=(8, 8, 1), num_classes=10, hidden_sizes=(16,)
)
LOSS = training.classification_loss(MODEL.apply, normalize=DIGITS.normalize)
SGD = optax.sgd(0.1, momentum=0.9)
COSTS = cluster.Profile(seconds_per_sample=0.01, seconds_per_batch=0.02)


def learn(protocol, speeds, updates, *, optimizer=SGD, **options):
  samples = data.SampleStream(DIGITS, len(speeds), seed=0)
  machines = cluster.workers(speeds, jitter=options.pop("jitter", 0.0))
  learner = server.GradientLearner(
    options.pop("loss_fn", LOSS), optimizer,
    options.pop("params", MODEL.params),
    samples, workers=machines.names, **options,
  )  # fmt: skip
  run = server.Simulation(machines, protocol, COSTS, learner=learner)
  run.run(updates=updates)
  return learner, run


def synchronous(num_workers, batch_size, steps):
  """The same by `methods.ssgd` in the usual loop."""
  team = collectives.workers(num_workers, substrate="vmap")
  optimizer = methods.ssgd(SGD, axis=team.axis)
  step = team.jit(training.make_step(LOSS, optimizer, axis=team.axis))
  state = training.init_state(team, optimizer, MODEL.params)
  batches = data.Batches(DIGITS, num_workers, batch_size, seed=0)
  for number in range(steps):
    state, _ = step(state, team.place(batches[number]))
  return team.view(state.params)


def test_equal_workers_under_a_full_barrier_match_synchronous_sgd():
  protocol = server.BSP(batches=server.FixedBatches(8))
  learner, run = learn(protocol, [1.0] * 4, 20)
  assert set(run.staleness) == {0}
  chex.assert_trees_all_close(
    learner.model.params, synchronous(4, 8, 20), rtol=1e-6, atol=1e-6
  )


ALONE = {
  "bsp": server.BSP(batches=server.FixedBatches(32)),
  "asp": server.ASP(batches=server.FixedBatches(32)),
  "ssp": server.SSP(batches=server.FixedBatches(32)),
  "softsync": server.NSoftsync(n=1, batches=server.FixedBatches(32)),
  "ringmaster": server.Ringmaster(
    max_staleness=1, batches=server.FixedBatches(32)
  ),
  "dbs": server.dbs(32),
}


@pytest.mark.parametrize("name", ALONE)
def test_one_worker_matches_plain_optax(name):
  learner, _ = learn(ALONE[name], [3.0], 20)
  chex.assert_trees_all_close(
    learner.model.params, synchronous(1, 32, 20), rtol=1e-6, atol=1e-6
  )


def test_server_has_the_bits_of_the_optimizers_own_program():
  """The clock's former programs rounded a momentum's sum in another order."""
  samples = data.SampleStream(DIGITS, 1, seed=0)
  learner, _ = learn(server.ASP(batches=server.FixedBatches(8)), [1.0], 4)
  gradient = jax.jit(training.make_gradient(LOSS))

  @jax.jit
  def update(params, state, grads):
    updates, state = SGD.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params, state = MODEL.params, SGD.init(MODEL.params)
  for number in range(4):
    batch = samples.batch(0, 8 * number, 8, size=8)
    grads = gradient(params, {}, batch, jax.random.key(0)).grads
    params, state = update(params, state, grads)
  chex.assert_trees_all_equal(learner.model.params, params)


def test_same_seed_gives_the_same_bits():
  found = [
    learn(server.dbs(64), [8.0, 4.0, 1.0], 40, jitter=0.2)[0].model
    for _ in range(2)
  ]
  chex.assert_trees_all_equal(*found)


def test_padding_changes_only_rounding():
  exact, run = learn(server.dbs(64), [8.0, 4.0, 1.0], 20, sizes=range(1, 80))
  padded, _ = learn(server.dbs(64), [8.0, 4.0, 1.0], 20, sizes=[48, 96])
  assert len({node.samples for node in run.nodes.values()}) == 3
  chex.assert_trees_all_close(
    exact.model.params, padded.model.params, rtol=1e-5, atol=1e-5
  )


def test_few_programs_are_compiled():
  traces = []

  def counted(*arguments):
    traces.append(1)
    return LOSS(*arguments)

  learn(server.dbs(96), [8.0, 4.0, 1.0], 60, loss_fn=counted, jitter=0.3)
  # Batches from 7 to 60 in powers of two, each traced once.
  assert len(traces) <= 5


def linear(params, model_state, batch, key):
  del key
  losses = (params * batch["label"].astype(jnp.float32) - 1.0) ** 2
  return training.masked_mean(losses, batch["mask"]), (model_state, {})


def test_batch_statistics_travel_with_the_push():
  def loss_fn(params, model_state, batch, key):
    loss, _ = linear(params, model_state, batch, key)
    mean = training.masked_mean(
      batch["label"].astype(jnp.float32), batch["mask"]
    )
    seen = {"mean": 0.9 * model_state["mean"] + 0.1 * mean}
    return loss, (seen, {})

  learner, _ = learn(
    server.BSP(batches=server.FixedBatches(4)), [1.0, 1.0], 1,
    loss_fn=loss_fn, params=jnp.array(0.0),
    model_state={"mean": jnp.array(2.0)},
  )  # fmt: skip
  labels = data.SampleStream(DIGITS, 2, seed=0).batch(0, 0, 8)["label"]
  wanted = 0.9 * 2.0 + 0.1 * labels.mean()
  np.testing.assert_allclose(learner.model.model_state["mean"], wanted, 1e-6)


def test_batch_statistics_are_weighted_by_samples():
  def loss_fn(params, model_state, batch, key):
    del model_state, key
    mean = training.masked_mean(
      batch["label"].astype(jnp.float32), batch["mask"]
    )
    return params + mean, ({"mean": mean}, {})

  batches = server.SpeedBatches(total=8, smoothing=0.0)
  learner, _ = learn(
    server.BSP(batches=batches), [3.0, 1.0], 2, loss_fn=loss_fn,
    params=jnp.array(0.0), model_state={"mean": jnp.array(0.0)},
  )  # fmt: skip
  # After two batches of 4 the next 8 samples are divided into 6 and 2.
  labels = data.SampleStream(DIGITS, 2, seed=0).batch(0, 8, 8)["label"]
  np.testing.assert_allclose(
    learner.model.model_state["mean"], labels.mean(), 1e-6
  )
  # The loss of an update is the mean over its samples, too: the first update
  # has moved the parameter by a rate of 0.1 and a gradient of 1.
  np.testing.assert_allclose(
    learner.losses[-1][1], labels.mean() - 0.1, rtol=1e-6
  )


def test_asynchronous_sgd_learns_and_skips_discarded_gradients():
  protocol = server.Ringmaster(max_staleness=2, batches=server.FixedBatches(32))
  learner, run = learn(protocol, [8.0, 4.0, 2.0, 1.0], 200)
  first, last = learner.losses[0][1], learner.losses[-1][1]
  assert last < 0.4 * first
  assert run.state.discarded["late"] > 0
  assert len(learner.server.tasks) <= 4


def test_programs_of_a_small_net_return_few_arrays():
  """A tiny net's programs take longer for each array that they return."""
  codec = reducers.MessageCodec(codecs.Quantize(4), reducers.ErrorFeedback())
  protocol = server.ASP(batches=server.FixedBatches(8))
  learner, _ = learn(protocol, [1.0] * 2, 4, push_codec=codec)
  worker = learner.workers["worker0"]
  more, push = worker.compute({
    "task": 9, "version": 4, "samples": 8, "push_plan": 0,
    "more": {"start": 0, "settled": -1},
  })  # fmt: skip
  # The gradient and the loss; the residual and the count of messages.
  assert len(jax.tree.leaves((more, push, worker._own))) == 4
  # The parameters and the momentum, of four tensors each.
  assert len(jax.tree.leaves(learner.server.model)) == 2
  assert len(jax.tree.leaves(learner.model)) == 8


def test_a_model_that_is_replaced_trains_as_before():
  """With delay compensation, which reads gradients and parameters alike."""
  found = []
  for replaces in (False, True):
    learner, run = learn(server.dbs(16), [2.0, 1.0], 5, compensation=0.1)
    if replaces:
      learner.server.model = learner.model
    run.run(updates=10)
    found.append(learner.model)
  chex.assert_trees_all_equal(*found)


def test_packing_changes_no_bit(monkeypatch):
  codec = reducers.MessageCodec(codecs.Quantize(4), reducers.ErrorFeedback())
  protocol = server.ASP(batches=server.FixedBatches(8))
  found = []
  for most in (_packed._MAX_BYTES, -1):
    _packed.pack.clear_cache()
    monkeypatch.setattr(_packed, "_MAX_BYTES", most)
    learner, _ = learn(protocol, [2.0, 1.0], 20, push_codec=codec)
    packs = isinstance(learner.server.model.params, _packed.Packed)
    assert packs == (most > 0)
    found.append(learner.model.params)
  _packed.pack.clear_cache()
  chex.assert_trees_all_equal(*found)


def test_packed_trees_are_what_they_were():
  tree = {
    "count": jnp.int32(3), "w": jnp.arange(6.0).reshape(2, 3), "none": None,
    "b": (jnp.array([True, False]), jnp.bfloat16(1.5)), "empty": jnp.zeros(0),
  }  # fmt: skip
  (packed,) = _packed.pack(tree)
  assert len(jax.tree.leaves(packed)) == 4  # One for each dtype.
  assert _packed.pack(packed)[0].layout is packed.layout
  chex.assert_trees_all_equal(_packed.unpack({"x": packed})["x"], tree)
  keys = {"key": jax.random.key(0), "w": jnp.zeros(2)}
  large = {"a": jnp.zeros(1 << 14), "b": jnp.zeros(1)}
  for whole in (keys, large, jnp.zeros(3)):
    assert not isinstance(_packed.pack(whole)[0], _packed.Packed)


def test_padding_of_a_merge_weighs_nothing():
  pushes = [_merge.Pushed(x, x) for x in "abc"]
  pushes, factors = _merge.narrowed(pushes, (1.0, 2.0, 3.0), (0.5,) * 3, 8)
  # Integers of the last push are returned.
  assert [x.grads for x in pushes] == ["a", "b", "c", "c"]
  np.testing.assert_array_equal(factors, [[1, 2, 3, 0], [0.5, 0.5, 0.5, 0]])


def test_one_push_with_the_weight_one_is_merged_as_it_is():
  push = _merge.Pushed({"w": jnp.array([0.1, -3.0])}, {"count": jnp.int32(2)})
  for weights in ((1.0,), (0.5,)):
    (found,), factors = _merge.narrowed([push], weights, (1.0,), 4)
    assert found is push and (factors is None) == (weights == (1.0,))
    merged = jax.jit(_merge.merge)([push], factors)
    np.testing.assert_array_equal(
      merged.grads["w"], weights[0] * push.grads["w"]
    )
    assert merged.change == push.change
  # `prepare` compiles all that updates need.
  assert [(x, y is None) for x, y in _merge.forms(4)] == [
    (4, False), (2, False), (1, False), (1, True),
  ]  # fmt: skip


def test_last_settled_task_is_the_latest_in_every_order():
  """A worker may have several tasks, of which a later one is dropped first."""
  found, resumed = (
    server.GradientServer(
      SGD, {"w": jnp.zeros(2)}, plans=server.message_plans(), workers=["a"]
    )
    for _ in range(2)
  )
  for task in (0, 1):
    assert found.reply(server.Reply("a", task, 0, 4))[0]["settled"] == -1
  for task in (1, 0):
    found.discard(task)
  # A checkpoint keeps it: a worker would take its local step twice otherwise.
  resumed.load(*found.save())
  for one in (found, resumed):
    assert one.reply(server.Reply("a", 2, 0, 4))[0]["settled"] == 1


def test_checkpoint_keeps_pushes_in_the_order_of_their_arrival():
  found, resumed = (
    server.GradientServer(
      SGD, {"w": jnp.zeros(2)}, plans=server.message_plans(), workers=["a", "b"]
    )
    for _ in range(2)
  )
  for task, worker in enumerate("ab"):
    found.reply(server.Reply(worker, task, 0, 4))
  for task in (1, 0):
    push = _merge.Pushed({"w": jnp.full(2, 1.0 + task)}, {})
    found.push(task, {"loss": 5.0 + task}, push)
  resumed.load(*found.save())
  for task in (0, 1):
    assert resumed._losses[task] == 5.0 + task
    pushed = resumed._pushes[task].grads["w"]
    np.testing.assert_array_equal(pushed, 1.0 + task)


def test_messages_to_every_worker_draw_numbers_of_their_own():
  plans = server.message_plans(plans=server.BitPlans(((32,), (4,)), (256,)))
  names, pulls, pushes = ["a", "b", "c"], [], []
  samples = data.SampleStream(DIGITS, 3, seed=0)
  for seed in range(2):
    learner = server.GradientServer(
      SGD, jnp.zeros(256), plans, workers=names, seed=seed
    )
    pulls += [int(state.step) for state in learner._pull_states]
    for number in range(3):
      worker = server.GradientWorker(
        LOSS, jnp.zeros(256), samples, plans, number=number, num_workers=3,
        seed=seed,
      )  # fmt: skip
      pushes.append(int(worker._own[0].step))
  assert len(set(pulls)) == len(set(pushes)) == 2 * 3
