"""Real gradients of real workers: the same bits again, and as on the clock."""

import functools

import jax
import numpy as np
import optax
import pytest

from jdist import codecs, data, models, reducers, server, training
from jdist.server.gradients import _gradient_messages
from tests import _refusals
from tests.server import _live_runs

pytest.importorskip("simpy")

DIGITS = data.load("digits")
MODEL = models.build(
  "mlp", input_shape=(8, 8, 1), num_classes=10, hidden_sizes=(16,)
)
LOSS = training.classification_loss(MODEL.apply, normalize=DIGITS.normalize)
SGD = optax.sgd(0.1, momentum=0.9)
NAMES = ("worker0", "worker1")
SIZES = tuple(x.size for x in jax.tree.leaves(MODEL.params))


def gradient_server(plans):
  return server.GradientServer(SGD, MODEL.params, plans, workers=NAMES)


def gradient_worker(plans, name, local_step=None):
  return server.GradientWorker(
    LOSS, MODEL.params, data.SampleStream(DIGITS, 2, seed=0), plans,
    number=NAMES.index(name), num_workers=2, sizes=[32, 64],
    local_step=local_step,
  )  # fmt: skip


def run(
  protocol, plans, path, updates=10, local_step=None, shards=1, **options
):
  engine = server.ThreadEngine()

  def work(name, channel):
    learner = gradient_worker(plans, name, local_step)
    learner.prepare()
    server.WorkerLoop(channel, name, learner, depth=protocol.depth).run()

  try:
    return _live_runs.run(
      engine,
      lambda plan: server.LiveServer(protocol, gradient_server(plans), plan),
      {name: functools.partial(work, name) for name in NAMES},
      updates,
      plan=server.LivePlan(workers=NAMES, record=str(path), shards=shards),
      model=(MODEL.params, {}),
      **options,
    )
  finally:
    engine.stop()


BITS = server.BitPlans(bits=((32,) * 4, (16,) * 4, (8,) * 4), sizes=SIZES)
SSP = server.SSP(batches=server.FixedBatches(32), bound=1)
CASES = {
  "bsp": (server.BSP(batches=server.FixedBatches(32)), {}),
  "asp in four bits": (
    server.ASP(batches=server.FixedBatches(32)),
    {
      "push_codec": reducers.MessageCodec(
        codecs.Quantize(4), reducers.ErrorFeedback()
      )
    },
  ),
  "h_ps": (server.h_ps(64, plans=BITS), {"plans": BITS}),
}


@pytest.mark.parametrize("name", CASES)
def test_replayed_run_ends_with_the_same_bits(name, tmp_path):
  protocol, codecs_of = CASES[name]
  plans = server.message_plans(**codecs_of)
  result = run(
    protocol,
    plans,
    tmp_path / "run",
    local_step=server.LocalStep(0.01, 0.9, nesterov=True),
  )
  learner = gradient_server(plans)
  delivery = server.replay(tmp_path / "run", protocol, learner)
  assert delivery.state.version == result.summary["updates"] == 10
  _, payload = learner.save()
  np.testing.assert_array_equal(payload, result.payload)
  # Another seed rounds otherwise: the replay does compare.
  if "bits" in name:
    return
  other = server.GradientServer(
    optax.sgd(0.2), MODEL.params, plans, workers=NAMES
  )
  with pytest.raises(ValueError, match="the reply of task"):
    server.replay(tmp_path / "run", protocol, other)


def test_unusable_pushes_are_refused():
  plans = server.message_plans()
  learner = gradient_server(plans)
  reply = server.Reply("worker0", 0, 0, 32)
  payload = _gradient_messages.bytes_of(learner.reply(reply)[1])
  with pytest.raises(server.RefusedError) as error:
    learner.push(0, {"loss": 1.0}, payload[:-1])
  assert error.value.reason == "shape"
  for loss, pushed in (
    (float("nan"), payload),
    (1.0, np.full_like(payload, 255)),
  ):
    with pytest.raises(server.RefusedError) as error:
      learner.push(0, {"loss": loss}, pushed)
    assert error.value.reason == "nan"
  learner.push(0, {"loss": 1.0}, payload)
  learner.apply(server.Apply((0,), (1.0,), (0,)))
  assert learner.samples == 32


@pytest.mark.parametrize("codec", [None, codecs.Cast("bfloat16")])
def test_push_with_nan_in_its_statistics_is_refused(codec):
  codec = None if codec is None else reducers.MessageCodec(codec)
  change, sent = {"mean": np.ones(3, np.float32)}, MODEL.params
  learner = server.GradientServer(
    SGD, MODEL.params, server.message_plans(push_codec=codec), workers=NAMES,
    model_state=change,
  )  # fmt: skip
  learner.reply(server.Reply("worker0", 0, 0, 32))
  if codec is not None:
    sent, _ = codec.encode(sent, codec.init(sent))
  payload = _gradient_messages.bytes_of((sent, change))
  nan = payload.copy()
  nan[-4:] = 255
  with pytest.raises(server.RefusedError, match="must be finite"):
    learner.push(0, {"loss": 1.0}, nan)
  for loss in (None, "1.0", float("inf")):
    with pytest.raises(server.RefusedError, match="must be finite"):
      learner.push(0, {"loss": loss}, payload)
  learner.push(0, {"loss": 1.0}, payload)


def test_task_is_cut_into_batches_that_fit_in_memory():
  # 34 samples in three batches of 12 at most, padded to 16, give the whole's
  # mean.
  sizes = []

  def loss(params, model_state, batch, key):
    sizes.append(len(batch["mask"]))
    return LOSS(params, model_state, batch, key)

  def push(passes, padded):
    worker = server.GradientWorker(
      loss, MODEL.params, data.SampleStream(DIGITS, 2, seed=0),
      server.message_plans(), number=0, num_workers=2, sizes=padded,
    )  # fmt: skip
    header = {
      "pull_plan": None, "push_plan": 0, "task": 3, "version": 0,
      "samples": 34, "passes": passes, "more": {"start": 5, "settled": 0},
    }  # fmt: skip
    more, payload = worker.compute(header)
    found = _gradient_messages.bytes_of(payload)
    return float(more["loss"]), found.view(np.float32)

  loss_of, whole = push(1, [64])
  del sizes[:]
  loss_of_parts, parts = push(3, [11, 16])
  assert set(sizes) == {16}
  assert loss_of_parts == pytest.approx(loss_of, rel=1e-5)
  np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-6)


def test_random_keys_in_a_model_state_travel_as_bytes():
  def loss(params, state, batch, key):
    del key
    mine, following = jax.random.split(state["key"])
    change = jax.random.normal(mine) * batch["mask"].mean()
    return change * params["w"], ({"key": following}, {})

  params, state = {"w": jax.numpy.ones(())}, {"key": jax.random.key(3)}
  plans = server.message_plans()
  learner = server.GradientServer(
    SGD, params, plans, workers=NAMES, model_state=state
  )
  worker = server.GradientWorker(
    loss, params, data.SampleStream(DIGITS, 2, seed=0), plans,
    number=0, num_workers=2, sizes=[32], model_state=state,
  )  # fmt: skip
  worker.prepare()
  payload = learner.reply(server.Reply("worker0", 0, 0, 32))[1]
  worker.receive({"pull_plan": 0}, _gradient_messages.bytes_of(payload))
  more, payload = worker.compute(
    {
      "pull_plan": None, "push_plan": 0, "task": 0, "version": 0,
      "samples": 32, "more": {"start": 0, "settled": 0},
    }
  )  # fmt: skip
  pushed = {"loss": float(more["loss"])}
  learner.push(0, pushed, _gradient_messages.bytes_of(payload))
  learner.apply(server.Apply((0,), (1.0,), (0,)))
  found = learner.model.model_state["key"]
  assert found.dtype == state["key"].dtype and (found != state["key"]).all()


def test_prepared_pair_compiles_nothing_for_its_tasks():
  def loss(params, state, batch, key):
    del key
    error = params["w"].sum() * batch["mask"].mean() - params["b"].sum()
    return jax.numpy.square(error - 1.0), (state, {})

  # No other test has leaves of these sizes, whose programs would be there.
  params = {"b": jax.numpy.zeros(5), "w": jax.numpy.zeros((3, 37))}
  bits = server.BitPlans(((32, 32), (16, 16), (8, 8)), (5, 111))
  plans = server.message_plans(plans=bits)
  learner = server.GradientServer(SGD, params, plans, workers=NAMES)
  worker = server.GradientWorker(
    loss, params, data.SampleStream(DIGITS, 2, seed=0), plans,
    number=0, num_workers=2, sizes=[32],
  )  # fmt: skip
  learner.prepare()
  worker.prepare()
  compiled = []
  jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, fun_name="", **__: (
      compiled.append(fun_name) if "backend_compile" in event else None
    )
  )
  try:
    for task, plan in enumerate((0, 1, 2, 2)):
      reply = server.Reply(
        "worker0", task, task, 32, push_plan=plan, pull_plan=plan
      )
      more, payload = learner.reply(reply)
      payload = _gradient_messages.bytes_of(payload)
      worker.receive({"pull_plan": plan}, payload)
      header = {"push_plan": plan, "task": task, "version": task}
      header |= {"pull_plan": None, "samples": 32, "more": more}
      more, payload = worker.compute(header)
      payload = _gradient_messages.bytes_of(payload)
      learner.push(task, {"loss": float(more["loss"])}, payload)
      learner.apply(server.Apply((task,), (1.0,), (0,)))
  finally:
    jax.monitoring.clear_event_listeners()
  assert compiled == []


@pytest.mark.parametrize("rows", (1, 3, 0, 5))
def test_samples_that_end_are_no_samples_of_a_task(rows):
  """A mean over fewer would weigh as much as the others."""

  class Samples:
    shared = True

    def batch(self, worker, start, count, *, size=None):
      return {"x": np.ones((rows, 2), np.float32)}

  loss = functools.partial(pytest.fail, "It is compiled.")
  gradient = server.GradientWorker(
    lambda *given: loss(), np.zeros(2), Samples(), server.message_plans(),
    number=0, num_workers=1, sizes=[4],
  )  # fmt: skip
  task = {
    "task": 0, "version": 0, "samples": 2, "push_plan": 0,
    "more": {"start": 0, "settled": -1},
  }  # fmt: skip
  runner = server.FragmentRunner(
    lambda *given: loss(), SGD, np.zeros(2), Samples(), number=0,
    num_workers=1, sizes=[4],
  )  # fmt: skip
  runner._state = runner.first_state(runner._anchor, {}, 0)
  for own in (gradient, runner):
    with _refusals.refused(
      "samples.batch", f"2 samples, padded to 4, got {rows}."
    ):
      own.compute(task | {"fragment": 0, "passes": 1})


def test_server_and_workers_say_the_shapes_of_one_model():
  params, model_state = {"w": np.zeros((2, 3))}, {"mean": np.zeros(4)}
  plans, samples = server.message_plans(), data.SampleStream(DIGITS, 2, seed=0)
  own = {"number": 0, "num_workers": 2, "model_state": model_state}
  both = {"workers": NAMES, "model_state": model_state}
  for learner in (
    server.GradientServer(SGD, params, plans, **both),
    server.FragmentSyncer(params, **both),
    server.GradientWorker(LOSS, params, samples, plans, **own),
    server.FragmentRunner(LOSS, SGD, params, samples, **own),
  ):
    assert learner.shapes == {
      "as the shape of leaf 0": [2, 3], "as the shape of leaf 1": [4],
    }  # fmt: skip
