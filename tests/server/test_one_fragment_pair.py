"""Decoupled DiLoCo, on every engine the law that NumPy computes."""

import collections
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import cluster, codecs, reducers, server
from jdist.reducers import _message_codec
from tests.server import _fragment_pair, _live_runs, _reference
from tests.server import test_one_pair as pair

pytest.importorskip("simpy")

NAMES, UPDATES = pair.NAMES, 10
PARAMS = {"a": jnp.zeros(4), "b": jnp.zeros(4)}
INNER, RATE = optax.sgd(0.05), 0.05
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
INT4 = reducers.MessageCodec(codecs.Quantize(4), reducers.ErrorFeedback())


def protocol(**options):
  return server.DecoupledDiLoCo(
    batches=server.FixedBatches(4), interval=4, **options
  )


PROTOCOLS = {
  "together": protocol(quorum=1.0, grace=0.0, ahead=0),
  "two fragments ahead": protocol(fragments=2, quorum=0.5, grace=0.2, ahead=2),
  "a window": protocol(fragments=2, quorum=0.5, grace=0.5),
}


def loss(params, model_state, batch, key):
  joined = jnp.concatenate([params["a"], params["b"]])
  return _reference.loss(joined, model_state, batch, key)


class Reference:
  """Trains from zeros as the messages say, fragment by fragment."""

  def __init__(self, rule, codec):
    self.rule, self.codec, count = rule, codec, rule.fragments
    self.parts = np.split(np.arange(8), count)
    self.params, self.trace = np.zeros(8, np.float32), np.zeros(8, np.float32)
    self.position, self.tasks, self.pushed = 0, {}, {}
    self.settled = {name: [-1] * count for name in NAMES}
    self.own, self.base = {}, {}
    self.residual = {name: np.zeros(8, np.float32) for name in NAMES}
    self.unmerged = collections.defaultdict(dict)

  def run(self, messages):
    state = self.rule.init(NAMES)
    for now_s, message in messages:
      if isinstance(message, server.Push) and message.task in state.tasks:
        self.compute(*self.tasks[message.task])
      for action in self.rule.receive(state, now_s, message):
        getattr(self, type(action).__name__.lower())(action)
    return self.params

  def timer(self, action):
    """Has no effect: its end is a message of the run."""

  def reply(self, reply):
    settled = list(self.settled[reply.worker])
    self.tasks[reply.task] = reply, self.position, self.params, settled
    self.position += reply.samples

  def receive(self, reply, params, settled):
    worker = reply.worker
    if reply.pulled is None:
      self.own[worker], self.base[worker] = params.copy(), params.copy()
      return
    for p in reply.pulled:
      at, kept = self.parts[p], self.unmerged[worker, p]
      for task in [task for task in kept if task <= settled[p]]:
        del kept[task]
      ahead = self.base[worker][at] - self.own[worker][at]
      self.own[worker][at] = params[at] - sum(kept.values()) - ahead
      self.base[worker][at] = self.own[worker][at] + ahead

  def compute(self, reply, start, params, settled):
    self.receive(reply, params, settled)
    worker, at = reply.worker, self.parts[reply.fragment]
    for _ in range(reply.passes):
      size = reply.samples // reply.passes
      rows = _reference.ROWS[(start + np.arange(size)) % len(_reference.ROWS)]
      x, y = rows[:, :8], rows[:, 8]
      gradient = x.T @ (x @ self.own[worker] - y) / size
      self.own[worker] = self.own[worker] - np.float32(RATE) * gradient
      start += size
    progress = self.base[worker][at] - self.own[worker][at]
    self.base[worker][at] = self.own[worker][at]
    wanted = progress + self.residual[worker][at]
    sent = wanted if self.codec is None else self.decoded(wanted)
    self.residual[worker][at] = wanted - sent
    self.unmerged[worker, reply.fragment][reply.task] = sent
    self.pushed[reply.task] = sent

  def decoded(self, x):
    codec = reducers.MessageCodec(self.codec.codec)
    state = _message_codec.MessageState(jnp.int32(0), ())
    # A message has its fragment's leaves.
    leaves = np.split(x, len(x) // 4)
    return np.concatenate(_reference._round_trip(codec)(leaves, state))

  def apply(self, update):
    fragment = self.tasks[update.tasks[0]][0].fragment
    at, total = self.parts[fragment], 0.0
    for task, weight in zip(update.tasks, update.weights, strict=True):
      total = total + np.float32(weight) * self.pushed.pop(task)
      self.settled[self.tasks[task][0].worker][fragment] = task
    self.trace[at] = total + 0.9 * self.trace[at]
    # What was sent before stays as it was.
    self.params = self.params.copy()
    self.params[at] -= 0.7 * (total + 0.9 * self.trace[at])


def on_clock(rule, codec, tmp_path):
  del tmp_path
  learner = _fragment_pair.fragment_pair(
    loss, INNER, PARAMS, _reference.Samples(), workers=NAMES, outer=OUTER,
    fragments=rule.fragments, push_codec=codec,
  )  # fmt: skip
  run = pair.Noting(
    cluster.workers([2.5, 1.0]), rule, cluster.Profile(0.1), learner=learner
  )
  run.run(updates=UPDATES)
  return run.log, np.concatenate(jax.tree.leaves(learner.model.params))


def work(name, rule, codec, channel):
  learner = server.FragmentRunner(
    loss, INNER, PARAMS, _reference.Samples(), number=NAMES.index(name),
    num_workers=2, fragments=rule.fragments, push_codec=codec,
  )  # fmt: skip
  server.WorkerLoop(channel, name, learner, depth=rule.depth).run()


def make_server(rule, codec, plan):
  learner = server.FragmentSyncer(
    PARAMS, workers=NAMES, outer=OUTER, fragments=rule.fragments,
    push_codec=codec,
  )  # fmt: skip
  return server.LiveServer(rule, learner, plan)


def live(rule, codec, tmp_path, engine):
  path = tmp_path / "messages"
  works = {name: functools.partial(work, name, rule, codec) for name in NAMES}
  try:
    result = _live_runs.run(
      engine, functools.partial(make_server, rule, codec), works, UPDATES,
      plan=server.LivePlan(workers=NAMES, record=str(path)),
    )  # fmt: skip
  finally:
    engine.stop()
  # The anchor's leaves are the first of what the syncer saves.
  return pair.recorded(path), result.payload[:32].view(np.float32)


ENGINES = {
  "clock": on_clock,
  "threads": lambda *args: live(*args, server.ThreadEngine()),
  "ray": lambda *args: live(*args, server.RayEngine(2, cpus_per_worker=0.1)),
}


def cases():
  for engine in ENGINES:
    needs_ray = pytest.mark.skipif(
      importlib.util.find_spec("ray") is None, reason="needs Ray"
    )
    marks = (pytest.mark.slow, needs_ray) if engine == "ray" else ()
    for name in PROTOCOLS:
      for codec in (None, INT4):
        words = [engine, name, codec and "int4"]
        yield pytest.param(
          engine, name, codec, id=", ".join(filter(None, words)), marks=marks
        )


@pytest.mark.parametrize(("engine", "name", "codec"), list(cases()))
def test_engine_trains_by_the_law(engine, name, codec, tmp_path):
  rule = PROTOCOLS[name]
  log, params = ENGINES[engine](rule, codec, tmp_path)
  wanted = Reference(rule, codec).run(log)
  assert np.abs(wanted).max() > 0.05
  np.testing.assert_allclose(params, wanted, rtol=1e-5, atol=1e-5)
