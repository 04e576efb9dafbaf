"""One server and worker pair, on every engine the law that NumPy computes."""

import functools
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import cluster, codecs, reducers, server
from jdist.server.clock import _pair_messages
from jdist.server.gradients import _gradient_messages, _learner
from jdist.server.runtime import _message_record
from jdist.storage import plain_data
from tests.server import _live_runs, _reference

pytest.importorskip("simpy")

NAMES, EIGHT, UPDATES = ("worker0", "worker1"), server.FixedBatches(8), 10
PARAMS = jnp.zeros(8)
SGD = optax.sgd(_reference.RATE, momentum=_reference.MOMENTUM)
STEP = server.LocalStep(0.02, 0.9, nesterov=True)
FEEDBACK = reducers.ErrorFeedback()
INT4 = reducers.MessageCodec(codecs.Quantize(4), FEEDBACK)
CODECS = {
  "exact": None,
  "int8": reducers.MessageCodec(codecs.Quantize(8), FEEDBACK),
  "int4": INT4,
  "top-k": reducers.MessageCodec(codecs.TopK(0.25), FEEDBACK),
}
PLANS = server.BitPlans(bits=((32,), (8,)), sizes=(8,), block=8)
PROTOCOLS = {
  "bsp": server.BSP(batches=EIGHT),
  "backups": server.BSP(batches=EIGHT, backups=1),
  "asp": server.ASP(
    batches=EIGHT,
    weighting=server.Weighting(staleness=server.inverse_staleness),
  ),
  "ssp": server.SSP(batches=EIGHT, bound=1),
  "n_softsync": server.NSoftsync(n=1, batches=EIGHT),
  "fedbuff": server.fedbuff(batches=EIGHT, buffer=3),
  "dbs": server.dbs(16),
  "ringmaster": server.Ringmaster(batches=EIGHT, max_staleness=1),
  "h_ps": server.h_ps(16, plans=None),
}
KINDS = _message_record.MESSAGES
PLANNED = server.h_ps(16, plans=PLANS)


class Noting(server.Simulation):
  """Notes the messages that the protocol is given."""

  def deliver(self, message, now_s=None):
    self.__dict__.setdefault("log", []).append((self.now_s, message))
    super().deliver(message, now_s)


def on_clock(protocol, tmp_path, *, codec, plans, step, strength=0.0):
  del tmp_path
  learner = server.GradientLearner(
    _reference.loss, SGD, PARAMS, _reference.Samples(), workers=NAMES,
    push_codec=codec, plans=plans, local_step=step, compensation=strength,
  )  # fmt: skip
  run = Noting(
    cluster.workers([2.5, 1.0]), protocol, cluster.Profile(0.1),
    learner=learner,
  )  # fmt: skip
  run.run(updates=UPDATES)
  return run.log, learner.model.params


def work(name, protocol, codec, plans, step, channel):
  learner = server.GradientWorker(
    _reference.loss, PARAMS, _reference.Samples(),
    server.message_plans(codec, plans), number=NAMES.index(name),
    num_workers=2, local_step=step,
  )  # fmt: skip
  server.WorkerLoop(channel, name, learner, depth=protocol.depth).run()


def make_server(protocol, codec, plans, plan):
  codecs_of = server.message_plans(codec, plans)
  learner = server.GradientServer(SGD, PARAMS, codecs_of, workers=NAMES)
  return server.LiveServer(protocol, learner, plan)


def live(protocol, tmp_path, *, codec, plans, step, engine):
  path = tmp_path / "messages"
  works = {
    name: functools.partial(work, name, protocol, codec, plans, step)
    for name in NAMES
  }
  try:
    result = _live_runs.run(
      engine, functools.partial(make_server, protocol, codec, plans), works,
      UPDATES, plan=server.LivePlan(workers=NAMES, record=str(path)),
    )  # fmt: skip
  finally:
    engine.stop()
  # The parameters are the first leaf of what the server saves.
  return recorded(path), result.payload[: PARAMS.nbytes].view(np.float32)


def recorded(path):
  """Returns the messages of a recording, each with its time."""
  return [
    (x["now_s"], plain_data.from_plain(x["message"], KINDS[x["kind"]]))
    for x, _ in _message_record.read(path)
    if "message" in x
  ]


ENGINES = {
  "clock": on_clock,
  "threads": lambda *args, **options: live(
    *args, **options, engine=server.ThreadEngine()
  ),
  "ray": lambda *args, **options: live(
    *args, **options, engine=server.RayEngine(2, cpus_per_worker=0.1)
  ),
}


STEPS = {"no step": None, "step": STEP}


def is_frequent(protocol, codec, step, engine):
  """Returns whether a combination is in the default set.

  A fourth of them has all pairs of two protocols, codecs, steps or engines.
  """
  protocol, codec = list(PROTOCOLS).index(protocol), list(CODECS).index(codec)
  chosen = (protocol + codec) % 2, (protocol + codec // 2) % 2
  return chosen == (step == "step", engine == "threads")


def cases():
  """All combinations; on Ray of each protocol that which has most parts."""
  needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray"
  )

  def case(protocol, codec, step, engine, frequent, run, plans=None):
    marks = [] if frequent else [pytest.mark.slow]
    marks += [needs_ray] if engine == "ray" else []
    options = {"codec": CODECS[codec], "plans": plans, "step": STEPS[step]}
    words = ", ".join((engine, protocol, codec, step))
    return pytest.param(engine, run, options, id=words, marks=marks)

  for name, run in PROTOCOLS.items():
    for names in itertools.product(CODECS, STEPS, ("clock", "threads")):
      yield case(name, *names, is_frequent(name, *names), run)
    yield case(name, "int4", "step", "ray", False, run)
  for step, engine in itertools.product(STEPS, ENGINES):
    yield case(
      "h_ps with plans", "exact", step, engine, engine != "ray", PLANNED, PLANS
    )


def test_default_set_has_all_pairs():
  parts = PROTOCOLS, CODECS, STEPS, ("clock", "threads")
  frequent = [x for x in itertools.product(*parts) if is_frequent(*x)]
  assert len(frequent) == len(PROTOCOLS) * len(CODECS)
  for first, second in itertools.combinations(range(len(parts)), 2):
    found = {(x[first], x[second]) for x in frequent}
    assert len(found) == len(parts[first]) * len(parts[second])


def test_every_protocol_of_gradients_is_compared():
  """Decoupled DiLoCo sends fragments, and has a reference of its own."""
  assert set(server.PROTOCOLS) - {"decoupled_diloco"} <= set(PROTOCOLS)


@pytest.mark.parametrize(("engine", "protocol", "options"), list(cases()))
def test_engine_trains_by_the_law(engine, protocol, options, tmp_path):
  log, params = ENGINES[engine](protocol, tmp_path, **options)
  # Between two codes the last bit of a sum decides, and later gradients follow:
  # the result must be that of one of the two.
  for nudge in range(9):
    law = _reference.Reference(protocol, NAMES, **options, nudge=nudge)
    wanted = law.run(log)
    if np.allclose(params, wanted, rtol=1e-5, atol=1e-5):
      break
  assert np.abs(wanted).max() > 0.05
  np.testing.assert_allclose(params, wanted, rtol=1e-5, atol=1e-5)


def test_compensation_follows_the_law(tmp_path):
  options = {"codec": None, "plans": None, "step": None, "strength": 0.5}
  protocol = PROTOCOLS["asp"]
  log, params = on_clock(protocol, tmp_path, **options)
  found = _reference.Reference(protocol, NAMES, **options).run(log)
  np.testing.assert_allclose(params, found, rtol=1e-5, atol=1e-5)
  options["strength"] = 0.0
  without = _reference.Reference(protocol, NAMES, **options).run(log)
  assert np.abs(params - without).max() > 1e-3


# Rounding, and what is not finite.


class Marked:
  """Samples that say whose they are."""

  shared = True

  def batch(self, worker, start, count, *, size=None):
    size = size or count
    return {"mask": np.ones(size, np.float32), "worker": np.int32(worker)}


def linear(params, model_state, batch, key):
  gradient = jnp.linspace(0.1, 1.0, params.size)
  bad = jnp.where(batch["worker"] == 1, jnp.nan, 0.0)
  return jnp.vdot(gradient + bad * params, params), (model_state, {})


def simulated(loss, workers, codec=None):
  learner = server.GradientLearner(
    loss, optax.sgd(1.0), jnp.zeros(400), Marked(),
    workers=cluster.workers([1.0] * workers).names, push_codec=codec,
  )  # fmt: skip
  run = server.Simulation(
    cluster.workers([1.0] * workers),
    server.BSP(batches=server.FixedBatches(1)),
    cluster.Profile(1.0),
    learner=learner,
  )
  return run, learner


def mean_on_clock(loss, workers, codec):
  run, learner = simulated(loss, workers, codec)
  run.run(updates=20)
  return -np.asarray(learner.model.params) / 20


def mean_on_threads(loss, workers, codec):
  names = cluster.workers([1.0] * workers).names
  protocol, params = server.BSP(batches=server.FixedBatches(1)), jnp.zeros(400)
  plans = server.message_plans(codec)

  def work(number, channel):
    learner = server.GradientWorker(
      loss, params, Marked(), plans, number=number, num_workers=workers
    )
    server.WorkerLoop(channel, names[number], learner, depth=1).run()

  def make(plan):
    own = server.GradientServer(optax.sgd(1.0), params, plans, workers=names)
    return server.LiveServer(protocol, own, plan)

  engine = server.ThreadEngine()
  try:
    result = _live_runs.run(
      engine, make,
      {name: functools.partial(work, i) for i, name in enumerate(names)}, 20,
      plan=server.LivePlan(workers=names),
    )  # fmt: skip
  finally:
    engine.stop()
  return -result.payload[: params.nbytes].view(np.float32) / 20


@pytest.mark.parametrize("mean_of", (mean_on_clock, mean_on_threads))
def test_workers_round_independently(mean_of):
  """The error of a mean of N gradients falls with the square root of N."""

  def loss(params, model_state, batch, key):
    gradient = jnp.linspace(0.1, 1.0, params.size)
    return jnp.vdot(gradient, params), (model_state, {})

  wanted, errors = np.linspace(0.1, 1.0, 400), {}
  for workers in (1, 16):
    codec = reducers.MessageCodec(codecs.Ternary())
    mean = mean_of(loss, workers, codec)
    errors[workers] = np.sqrt(np.mean((mean - wanted) ** 2))
  assert errors[16] == pytest.approx(errors[1] / 4, rel=0.1)


def test_push_that_is_not_finite_is_refused_on_the_clock():
  run, learner = simulated(linear, 2)
  run.run(updates=6)
  assert np.isfinite(learner.model.params).all()
  # The worker joins twice again, and is expelled the third time.
  assert run.refused == {"nan": 3} and run.expelled("worker1")
  assert set(run.state.members) == {"worker0"} and not run.all_expelled


@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "complex64"))
@pytest.mark.parametrize("shape", ((), (3,), (2**13, 1), (3, 5, 7), (3, 2**13)))
def test_one_number_that_is_not_finite_is_found(shape, dtype):
  found = jax.jit(_gradient_messages.all_finite)
  # The largest number is finite, as are integers and nothing.
  x = np.full(shape, jnp.finfo(dtype).max, dtype)
  rest = [x, np.ones(2, np.int32), np.zeros(0, dtype)]
  assert found(rest)
  for place in {0, x.size // 2, x.size - 1}:
    for number in (np.nan, np.inf, -np.inf):
      spoiled = x.copy()
      spoiled.flat[place] = number
      assert not found([spoiled, *rest]) and not found([*rest, spoiled])


class Spoiled(_reference.Samples):
  """Samples whose rows from the 24th to the 31st are not numbers, once."""

  def batch(self, worker, start, count, *, size=None):
    found = super().batch(worker, start, count, size=size)
    return found | {"rows": found["rows"] * (np.nan if start == 24 else 1.0)}


@pytest.mark.parametrize("engine", ("clock", "threads"))
def test_refused_worker_keeps_nothing_that_is_not_finite(
  engine, tmp_path, monkeypatch
):
  """Neither its residual nor its local step spoils the next pushes."""
  monkeypatch.setattr(_reference, "Samples", Spoiled)
  options = {"codec": INT4, "plans": None, "step": STEP}
  log, params = ENGINES[engine](PROTOCOLS["asp"], tmp_path, **options)
  assert np.isfinite(params).all()
  assert sum(isinstance(message, server.Leave) for _, message in log) == 1


@pytest.mark.parametrize("begins", [False, True])
def test_failed_machine_loses_its_messages(begins):
  pair = _learner.Pair(
    server.EmptyServer(8),
    {x: server.EmptyWorker(stateless=False) for x in NAMES},
  )
  messages = _pair_messages.PairMessages(pair, NAMES)
  for task, name in enumerate(NAMES):
    reply = server.Reply(name, task, 0, 8)
    messages.send(name, task, *pair.server.reply(reply))
    if begins:
      messages.begin(reply, discards=True)
  messages.clear(NAMES[0])
  notes, _ = messages.save()
  assert [*notes["messages"]] == ["push 1" if begins else "pull 1"]


def test_messages_without_a_model_have_its_size():
  learner, worker = server.EmptyServer(48), server.EmptyWorker()
  more, pulled = learner.reply(server.Reply("a", 0, 0, 8))
  worker.receive({"more": more}, pulled)
  _, pushed = worker.compute({"more": more})
  assert pulled.nbytes == pushed.nbytes == 48


def test_failed_machine_loses_its_residual_as_a_process_does():
  machines = cluster.Cluster((
    cluster.Node("worker0"),
    cluster.Node("worker1", outages=(cluster.Outage(5.0, 9.0),)),
  ))  # fmt: skip
  learner = server.GradientLearner(
    _reference.loss, SGD, PARAMS, _reference.Samples(), workers=NAMES,
    push_codec=INT4,
  )  # fmt: skip
  run = server.Simulation(
    machines, PROTOCOLS["asp"], cluster.Profile(0.1), learner=learner
  )
  worker = learner.workers["worker1"]
  first = worker.save()[1]
  run.run(seconds=4.9)
  assert (worker.save()[1] != first).any()
  run.run(seconds=5.1)
  np.testing.assert_array_equal(worker.save()[1], first)


def test_complex_gradient_survives_a_push():
  def loss(params, model_state, batch, key):
    errors = jnp.abs(params - (1.0 + 2.0j)) ** 2
    return errors.mean() * batch["mask"].mean(), (model_state, {})

  params = jnp.full(3, 0.5 - 0.5j)
  wanted = params - jax.grad(lambda p: loss(p, {}, {"mask": np.ones(1)}, 0)[0])(
    params
  )
  learner = server.GradientLearner(
    loss, optax.sgd(1.0), params, _reference.Samples(), workers=NAMES
  )
  server.Simulation(
    cluster.workers([1.0, 1.0]), PROTOCOLS["bsp"], cluster.Profile(0.1),
    learner=learner,
  ).run(updates=1)  # fmt: skip
  np.testing.assert_allclose(learner.model.params, wanted, rtol=1e-6)
  # The same push, in the bytes that a channel carries.
  plans = server.message_plans()
  worker = server.GradientWorker(
    loss, params, _reference.Samples(), plans, number=0, num_workers=1
  )
  alone = server.GradientServer(optax.sgd(1.0), params, plans, workers=("a",))
  reply = server.Reply("a", 0, 0, 8)
  more, payload = alone.reply(reply)
  header = reply._asdict() | {"more": more}
  worker.receive(header, _gradient_messages.bytes_of(payload))
  more, payload = worker.compute(header)
  alone.push(0, more, _gradient_messages.bytes_of(payload))
  alone.apply(server.Apply((0,), (1.0,), (0,)))
  np.testing.assert_allclose(alone.model.params, wanted, rtol=1e-6)


def test_residual_outlives_a_restart_without_a_loss():
  """A refused push, or a lost connection, takes nothing from a worker."""
  learner = server.GradientLearner(
    _reference.loss, SGD, PARAMS, _reference.Samples(), workers=NAMES,
    push_codec=INT4,
  )  # fmt: skip
  server.Simulation(
    cluster.workers([1.0, 1.0]), PROTOCOLS["asp"], cluster.Profile(0.1),
    learner=learner,
  ).run(updates=3)  # fmt: skip
  worker = learner.workers["worker1"]
  before = worker.save()[1]
  worker.restart()
  np.testing.assert_array_equal(worker.save()[1], before)
  worker.restart(lost=True)
  assert (worker.save()[1] != before).any()
