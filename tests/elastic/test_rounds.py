"""Elastic methods with rounds: undisturbed, they are the collective ones."""

import functools
import signal
import threading

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
  elastic,
  methods,
  reducers,
  server,
  training,
  transforms,
)
from jdist.elastic import _rounds
from jdist.transforms import intervals
from tests.server import _reference

pytest.importorskip("simpy")

NAMES, EACH, STEPS = ("a", "b", "c"), 4, 24
# NumPy's: a process of Ray that imports this may still choose its devices.
PARAMS = {"a": np.zeros((2, 2), np.float32), "b": np.zeros(4, np.float32)}


@pytest.fixture(autouse=True)
def _deadline():
  """Ends a test whose run does not, with what it was doing."""

  def late(number, frame):
    raise TimeoutError("The run has not ended within 300 s.")

  before = signal.signal(signal.SIGALRM, late)
  signal.alarm(300)
  yield
  signal.alarm(0)
  signal.signal(signal.SIGALRM, before)


def rate(step):
  return 0.1 / (1.0 + 0.1 * jnp.asarray(step, jnp.float32))


SGD = optax.sgd(rate, momentum=0.9)
# A server sends merges exactly, as a gather does and an all-to-all does not.
GATHERED = reducers.Compression(
  reducers.compressed(codecs.Quantize(4), wire="gather"),
  reducers.ErrorFeedback(),
)


class Samples:
  """Rows of each worker's own."""

  shared = False

  def batch(self, worker, start, count, *, size=None):
    rows = 7 * worker + start + np.arange(size or count)
    return {"rows": _reference.ROWS[rows % len(_reference.ROWS)]}


def loss(params, model_state, batch, key):
  joined = jnp.concatenate([params["a"].reshape(-1), params["b"]])
  x, y = batch["rows"][:, :8], batch["rows"][:, 8]
  return ((x @ joined - y) ** 2 / 2).mean(), (model_state, {})


def streaming(optimizer, *, axis, **options):
  return methods.streaming_diloco(optimizer, 4, 2, axis=axis, **options)


def msdpu(optimizer, *, axis, **options):
  return methods.msdpu(
    optimizer, intervals.fixed(4), rate, axis=axis,
    overlap=transforms.Delayed(), **options,
  )  # fmt: skip


METHODS = {
  "local_sgd": functools.partial(methods.local_sgd, interval=4),
  "diloco": functools.partial(methods.diloco, interval=4),
  "diloco int4": functools.partial(
    methods.diloco, interval=4, compression=GATHERED
  ),
  "diloco late": functools.partial(
    methods.diloco, interval=4, overlap=transforms.Delayed()
  ),
  "streaming": functools.partial(streaming, delay_steps=0, mix=0.0),
  "streaming late": functools.partial(streaming, delay_steps=2, mix=0.5),
  "streaming late int4": functools.partial(
    streaming, delay_steps=2, mix=0.5,
    compression=GATHERED,
  ),
  "msdpu": msdpu,
  "fed_prox": functools.partial(methods.fed_prox, interval=4, strength=0.1),
  "cocod": functools.partial(methods.cocod, interval=4),
}  # fmt: skip


def rounds(name, **options):
  options = {"samples": EACH, "quorum": 1.0, "grace": 0.0} | options
  return elastic.Rounds(
    METHODS[name](SGD, axis=None), PARAMS, workers=NAMES, **options
  )


def collective(name, steps=STEPS):
  """The same method by collectives, workers under vmap: its anchor."""
  team = collectives.workers(len(NAMES), substrate="vmap")
  chain = METHODS[name](SGD, axis=team.axis)
  step = team.jit(training.make_step(loss, chain, axis=team.axis))
  state = training.init_state(team, chain, PARAMS)
  for number in range(steps):
    own = [Samples().batch(i, number * EACH, EACH) for i in range(len(NAMES))]
    batch = {"rows": np.stack([x["rows"] for x in own])}
    state, _ = step(state, team.place(batch))
  return team.view(state.opt_state).anchor


def on_clock(
  found, updates, speeds=(1.0, 1.0, 1.0), *, loss_fn=loss, **options
):
  workers = {x: found.runner(x, loss_fn, Samples()) for x in NAMES}
  pair = server.Pair(found.syncer(shared=False), workers)
  machines = cluster.Cluster(
    tuple(
      cluster.Node(x, speed=s, **options.get(x, {}))
      for x, s in zip(NAMES, speeds, strict=True)
    )
  )
  run = server.Simulation(
    machines, found.protocol, cluster.Profile(0.01), learner=pair,
    detection_s=0.05,
  )  # fmt: skip
  run.run(updates=updates)
  return pair, run


def merges(name):
  """Merges after STEPS steps; a late one of the last task is not in yet."""
  return STEPS // 2 if "streaming" in name else STEPS // 4


# The others combine what these have.
DEFAULT = ("local_sgd", "diloco", "diloco int4", "streaming late", "msdpu")


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(x, marks=() if x in DEFAULT else pytest.mark.slow)
    for x in METHODS
  ],
)
def test_undisturbed_run_matches_the_collective_method(name):
  found = rounds(name)
  late = int(found.protocol.in_step)
  pair, _ = on_clock(found, merges(name) - late, speeds=(1.0, 2.0, 0.5))
  assert np.abs(pair.model.params["b"]).max() > 0.05
  chex.assert_trees_all_close(
    pair.model.params, collective(name), rtol=1e-5, atol=1e-5
  )


def test_streamed_message_has_the_sub_tensors_of_the_collective_one():
  """Three rounds: later a sum that is rounded elsewhere takes another code."""
  METHODS["streamed"] = functools.partial(
    methods.diloco, interval=4, compression=GATHERED,
    overlap=transforms.Delayed(stream=transforms.Stream(8)),
  )  # fmt: skip
  METHODS["whole"] = functools.partial(
    methods.diloco, interval=4, compression=GATHERED,
    overlap=transforms.Delayed(),
  )  # fmt: skip
  try:
    pair, whole = (on_clock(rounds(x), 2)[0] for x in ("streamed", "whole"))
    chex.assert_trees_all_close(
      pair.model.params, collective("streamed", 12), rtol=1e-6, atol=1e-6
    )
  finally:
    del METHODS["streamed"], METHODS["whole"]
  # A whole message has other scales: those of leaves.
  away = np.abs(whole.model.params["a"] - pair.model.params["a"])
  assert away.max() > 1e-3


def live(found, own, updates, **options):
  """Runs in threads; returns the session, its model and its summary."""
  engine, like = server.ThreadEngine(), (PARAMS, {})
  session = found.session(engine, own, model=like, shared=False, **options)
  models = []
  try:
    server.ServerRun(session).fit(
      updates, evaluate=lambda model: models.append(model.params) or {}
    )
    return session, models[-1], session.summary()
  finally:
    engine.stop()


def test_own_loop_trains_as_the_librarys(tmp_path):
  found = rounds("diloco")
  step = jax.jit(
    lambda params, opt_state, batch: one_step(params, opt_state, batch)
  )

  def own(channel, name):
    loop = found.loop(channel, name)
    for number, state in enumerate(loop):
      batch = Samples().batch(NAMES.index(name), number * EACH, EACH)
      params, opt_state, value = step(state.params, state.opt_state, batch)
      loop.advance(params, opt_state, value)

  _, params, summary = live(found, own, 6)
  chex.assert_trees_all_close(
    params, collective("diloco"), rtol=1e-5, atol=1e-5
  )
  assert summary["merged_share"] == 1.0
  assert [x[2:4] for x in summary["changes"]] == [("joined", x) for x in NAMES]


def one_step(params, opt_state, batch):
  value, grads = jax.value_and_grad(lambda w: loss(w, {}, batch, None)[0])(
    params
  )
  updates, opt_state = SGD.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, value


def test_own_loop_must_advance():
  found = rounds("diloco")

  def own(channel, name):
    with pytest.raises(ValueError, match="`advance` must be called once"):
      for _ in found.loop(channel, name):
        pass
    found.work(channel, name, loss, Samples())

  _, params, _ = live(found, own, 1)
  assert np.abs(params["b"]).max() > 0.01


def in_turn(found, failed, back):
  """Workers of which b is lost in its third task; the others wait for it."""

  class Failing(server.FragmentRunner):
    def compute(self, header):
      if header["worker"] == "b" and header["version"] >= 2:
        if not failed.is_set():
          failed.set()
          raise RuntimeError("The power has failed.")
        back.set()
      elif header["version"] >= 6:
        back.wait(100.0)
      return super().compute(header)

  def own(channel, name):
    learner = found.runner(name, loss, Samples(), kind=Failing)
    learner.prepare()
    server.WorkerLoop(channel, name, learner, depth=1).run()

  return own


@pytest.mark.parametrize(
  "name",
  ("diloco int4", pytest.param("streaming late", marks=pytest.mark.slow)),
)
def test_disturbed_run_is_replayed_to_the_same_bits(name, tmp_path):
  found = rounds(name, quorum=0.5, grace=1.0)
  own = in_turn(found, threading.Event(), threading.Event())
  path = str(tmp_path / "messages")
  session, _, summary = live(found, own, 12, record=path)
  assert [x["kind"] for x in session.events] == ["lost", "back"]
  kinds = [x[2:4] for x in summary["changes"]]
  assert kinds[3:] == [("left", "b"), ("returned", "b")]
  assert all(0 < merged <= living for _, merged, living in summary["merges"])
  syncer = found.syncer(shared=False)
  delivery = server.replay(path, found.protocol, syncer)
  np.testing.assert_array_equal(syncer.save()[1], session.payload)
  assert delivery.summary()["merges"] == summary["merges"]


class FailingRunner(server.FragmentRunner):
  """Says hello, and fails at its task."""

  def compute(self, header):
    raise RuntimeError("There is no memory.")


def leaves_after(steps, found, channel, name):
  """A loop of one's own that ends before the run."""
  loop = found.loop(channel, name)
  for _, state in zip(range(steps), loop, strict=False):
    loop.advance(state.params, state.opt_state, 0.0)


# Worker b does this, and the run gives this reason.
LOST = {
  "fails before it has joined": (lambda *args: 1 / 0, "division by zero"),
  "fails at each of its tasks": (
    lambda found, channel, name: server.WorkerLoop(
      channel, name,
      found.runner(name, loss, Samples(), kind=FailingRunner), depth=1,
    ).run(),
    "There is no memory.",
  ),
  "returns before it has joined": (lambda *args: None, "its work returned"),
  "leaves its loop": (functools.partial(leaves_after, 6), "its work returned"),
}  # fmt: skip


@pytest.mark.parametrize("way", LOST)
def test_survivors_go_on_without_a_worker_that_is_lost_for_good(way):
  """The server forgets it, so that a quorum of all can be reached."""
  found, (work, reason) = rounds("local_sgd", grace=10.0), LOST[way]
  gone = threading.Event()

  class Waiting(Samples):
    def batch(self, worker, start, count, *, size=None):
      # Without it, the survivors could end the run between two losses.
      assert start < 2 * 4 * EACH or gone.wait(100.0)
      return super().batch(worker, start, count, size=size)

  def own(channel, name):
    if name == "b":
      work(found, channel, name)
    else:
      found.work(channel, name, loss, Waiting())

  def on_event(event):
    if event["kind"] == "gone":
      gone.set()

  session, _, summary = live(found, own, 4, on_event=on_event)
  assert session.events[-1]["kind"] == "gone"
  assert reason in session.events[-1]["reason"]
  if "returned" in reason:
    assert len(session.events) == 1
  assert summary["merges"][-1][1:] == (2, 2)


def test_run_ends_if_the_work_of_all_workers_returns():
  with pytest.raises(server.LostRunError, match=r"[abc]: its work returned"):
    live(rounds("local_sgd"), lambda channel, name: None, 4)


def counts_of(runner):
  """The positions of the schedules in an inner optimizer."""
  kind = optax.ScaleByScheduleState
  leaves = jax.tree.leaves(
    runner._state.opt_state, is_leaf=lambda x: isinstance(x, kind)
  )
  return [int(x.count) for x in leaves if isinstance(x, kind)]


@pytest.mark.parametrize("name", ("diloco", "msdpu"))
def test_joiner_continues_from_what_is_merged(name):
  """Its parameters, and the position of its schedule, are the run's."""
  away = {"outages": (cluster.Outage(0.0, 0.5),)}
  found = rounds(name, quorum=0.5, grace=1.0)
  pair, run = on_clock(found, 8, c=away)
  changes = [x[1:4] for x in run.summary()["changes"]]
  assert changes == [(0, "joined", "a"), (0, "joined", "b"), (3, "joined", "c")]
  assert [x[1:] for x in run.summary()["merges"]] == [(2, 2)] * 3 + [(3, 3)] * 5
  late = int(found.protocol.in_step)
  assert set(run.staleness) == ({0, late} if late else {0})
  # Late members have begun their next task before the last merge is complete.
  (joiner,), (other,) = (counts_of(pair.workers[x]) for x in "ca")
  assert joiner == other == 4 * (8 + late)


def test_schedules_follow_the_run_after_all_workers_have_been_away():
  """No member has made all steps; the one that returns begins where all are."""
  out = {
    x: {"outages": (cluster.Outage(0.2 + 0.4 * i, 0.5 + 0.4 * i),)}
    for i, x in enumerate(NAMES)
  }
  pair, run = on_clock(rounds("diloco", quorum=0.5, grace=1.0), 12, **out)
  changes = [x[2] for x in run.summary()["changes"]]
  assert changes.count("left") == changes.count("returned") == len(NAMES)
  for worker in pair.workers.values():
    assert counts_of(worker) == [4 * 12]


@pytest.mark.slow  # Compiles programs for two devices.
@pytest.mark.parametrize("peers", (False, True))
def test_worker_may_be_sharded_over_devices(peers):
  """One worker has two devices and shards its state, another has one."""
  found, learners = rounds("diloco int4", peers=peers), {}

  def own(channel, name):
    devices = jax.devices()
    params = None
    if name == "a":
      mesh = jax.sharding.Mesh(np.array(devices[1:3]), ("fsdp",))
      rows = jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec("fsdp")
      )
      params = jax.device_put(PARAMS, rows)
    elif name == "b":
      params = jax.device_put(PARAMS, devices[3])
    learner = found.runner(name, loss, Samples(), params=params)
    learners[name] = learner
    learner.prepare()
    server.WorkerLoop(channel, name, learner, depth=1).run()

  _, params, _ = live(found, own, 6)
  pair, _ = on_clock(found, 6)
  chex.assert_trees_all_close(params, pair.model.params, rtol=1e-5, atol=1e-5)
  for leaf in jax.tree.leaves(
    (learners["a"]._state, [x.feedback for x in learners["a"]._push_states])
  ):
    if leaf.ndim:
      assert len(leaf.sharding.device_set) == 2
      assert not leaf.sharding.is_fully_replicated
  assert learners["b"]._state.params["b"].devices() == {jax.devices()[3]}


@pytest.mark.parametrize(
  "name", ("msdpu", pytest.param("streaming late int4", marks=pytest.mark.slow))
)
def test_resumed_run_ends_with_the_same_bits(name, tmp_path):
  away = {"outages": (cluster.Outage(0.3, 0.6),)}

  def fit(found, updates, **options):
    pair, run = on_clock(found, 0, c=away)
    server.ServerRun(server.ClockSession(run)).fit(updates, every=4, **options)
    return pair.server.save()[1], run.summary()

  found = rounds(name, quorum=0.5, grace=1.0)
  whole, summary = fit(found, 8)
  fit(found, 4, checkpoints=tmp_path)
  resumed, again = fit(found, 8, checkpoints=tmp_path)
  np.testing.assert_array_equal(resumed, whole)
  assert again["changes"] == summary["changes"] and len(again["merges"]) == 8


def test_pushes_weigh_by_their_samples():
  rule = rounds("local_sgd").protocol
  state = rule.init(NAMES)
  for name in NAMES:
    rule.receive(state, 0.0, server.Pull(name))
  for task, samples in enumerate((30, 10)):
    rule.receive(state, 1.0, server.Push(NAMES[task], task, samples, 1.0))
  update, *_ = rule.receive(state, 1.0, server.Push("c", 2, 40, 1.0))
  assert update.weights == pytest.approx((3 / 8, 1 / 8, 4 / 8))


def test_learner_has_the_mixture_and_the_seed_of_its_method():
  codec = reducers.Compression(
    codecs.Quantize(4, rounding="stochastic"), reducers.ErrorFeedback(), seed=5
  )
  method = streaming(SGD, axis=None, delay_steps=2, mix=0.25, compression=codec)
  found = elastic.Rounds(method, PARAMS, workers=NAMES).runner(
    "a", loss, Samples()
  )
  assert found._codec.seed == 5
  state = found.first_state(jax.tree.leaves(PARAMS), {})
  parts = found._parts(state.anchor)
  anchors = [[jnp.full_like(x, 4.0) for x in part] for part in parts]
  merged = found.merged(state, dict(enumerate(anchors)), {})
  # A quarter of its own parameters, which are zero, and the rest of the merge.
  for leaf in jax.tree.leaves(merged.params):
    np.testing.assert_array_equal(leaf, 3.0)


@pytest.mark.parametrize(("steps", "ahead"), [(0, 0), (2, 2)])
def test_mixture_and_tasks_ahead_follow_the_delay(steps, ahead):
  method = streaming(SGD, axis=None, delay_steps=steps, mix=0.25)
  found = elastic.Rounds(method, PARAMS, workers=NAMES)
  assert found._parts.mix == 0.25
  assert (found.protocol.ahead, found.protocol.in_step) == (ahead, ahead > 0)


def test_own_loop_that_gives_no_statistics_keeps_them():
  found = rounds("local_sgd", model_state={"mean": np.float32(1.0)})
  loop = found.runner("a", loss, None, kind=_rounds.OwnLoop)
  loop.connect(None, "a", 1)
  statistics = {"mean": jnp.float32(3.0)}  # As a merge has brought them.
  state = loop.first_state(jax.tree.leaves(PARAMS), statistics)
  loop.advance(state.params, state.opt_state, 0.5)
  state, _ = loop._local_step(state, (0, 1, 1), jax.random.key(0))
  assert state.model_state["mean"] == 3.0
  loop.advance(state.params, state.opt_state, 0.5, {"mean": jnp.float32(7.0)})
  state, _ = loop._local_step(state, (0, 1, 1), jax.random.key(0))
  assert state.model_state["mean"] == 7.0


def test_losses_draw_their_numbers_by_the_seed():
  def noisy(params, model_state, batch, key):
    noise = jax.random.normal(key, (4,))
    return (noise * params["b"]).sum() + 0 * params["a"].sum(), (
      model_state, {},
    )  # fmt: skip

  first, again, other = (
    on_clock(rounds("local_sgd", seed=x), 1, loss_fn=noisy)[0].model.params
    for x in (3, 3, 4)
  )
  chex.assert_trees_all_equal(first, again)
  assert not np.allclose(first["b"], other["b"])


def test_workers_with_samples_of_their_own_take_all_of_them():
  found, taken = rounds("local_sgd"), {x: set() for x in range(len(NAMES))}

  class Noted(Samples):
    def batch(self, worker, start, count, *, size=None):
      taken[worker].add(start)
      return super().batch(worker, start, count, size=size)

  def own(channel, name):
    found.work(channel, name, loss, Noted())

  live(found, own, 2)
  # Two tasks of four steps, each of four samples; a third may have begun.
  for starts in taken.values():
    assert starts >= set(range(0, 2 * 4 * EACH, EACH)), taken


def test_work_compiles_first_and_has_room_for_all_tasks(monkeypatch):
  noted = []

  class Learner:
    def __init__(self, *given, **options):
      noted.append(options["number"])

    def prepare(self):
      noted.append("compiled")

  class Loop:
    def __init__(self, channel, name, learner, *, depth):
      noted.append((name, depth))

    def run(self):
      noted.append("run")

  monkeypatch.setattr(server, "WorkerLoop", Loop)
  found = rounds("streaming late")
  found.work(None, "b", loss, Samples(), kind=Learner)
  # Two merges travel at once, each under a task of its own.
  assert noted == [1, "compiled", ("b", 2), "run"]


def test_own_loop_takes_the_options_of_a_learner(monkeypatch):
  noted = []

  class Loop:
    def connect(self, channel, name, depth):
      noted.append((channel, name, depth))

  def runner(self, *given, **options):
    noted.append(options)
    return Loop()

  monkeypatch.setattr(elastic.Rounds, "runner", runner)
  rounds("streaming late").loop("channel", "b", params=PARAMS)
  assert noted == [
    {"kind": _rounds.OwnLoop, "params": PARAMS}, ("channel", "b", 2),
  ]  # fmt: skip


def test_threads_of_an_own_loop_keep_no_process_alive():
  loop = rounds("local_sgd").runner("a", loss, None, kind=_rounds.OwnLoop)
  loop.connect(None, "a", 1)
  noted = []
  loop._loop.run = lambda: noted.append(threading.current_thread().daemon)
  assert list(loop) == [] and noted == [True]


def test_parameters_wait_on_the_host():
  """A process that unpickles them may still choose its devices."""
  params = jax.tree.map(jnp.asarray, PARAMS)
  found = elastic.Rounds(
    METHODS["local_sgd"](SGD, axis=None), params, workers=NAMES,
    model_state={"mean": jnp.ones(2)},
  )  # fmt: skip
  kept = jax.tree.leaves((found._params, found._common["model_state"]))
  assert {type(x) for x in kept} == {np.ndarray}


def test_by_default_a_merge_waits_for_half_of_the_members():
  found = elastic.Rounds(
    METHODS["local_sgd"](SGD, axis=None), PARAMS, workers=NAMES
  ).protocol
  assert (found.quorum, found.grace) == (0.5, 1.0)


def test_own_loop_raises_what_ended_its_connection():
  loop = rounds("local_sgd").runner("a", loss, None, kind=_rounds.OwnLoop)
  loop.connect(None, "a", 1)

  def broken():
    raise ConnectionError("The server is gone.")

  loop._loop.run = broken
  with pytest.raises(ConnectionError, match="The server is gone"):
    list(loop)
