"""Every gradient is of the version that its task names, on every engine."""

import collections
import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import cluster, server
from jdist.server import _links
from tests.server import _live_runs

simpy = pytest.importorskip("simpy")

NAMES = ("worker0", "worker1")
UPDATES, BATCH, MARK = 10, 8, 6
# A header without bytes must not overtake bytes that take 5 ms.
SLOW = cluster.workers([1.0, 1.0], link=cluster.Link(4e6, latency_s=0.005))
FAST = cluster.workers([1.0, 1.0])
PARAMS = jnp.zeros(64)
PLANS = server.BitPlans(bits=((32,), (16,)), sizes=(PARAMS.size,))


class Samples:
  shared = True

  def batch(self, worker, start, count, *, size=None):
    return {"mask": np.ones(size or count, np.float32)}


def loss(params, model_state, batch, key):
  """The mean of the parameters, to each of which every update adds 1."""
  return params.mean(), (model_state, {})


class Noting(server.GradientWorker):
  """Notes the version that a task names, and the one that it is computed at."""

  def __init__(self, log, name, plans, fails=()):
    super().__init__(
      loss, PARAMS, Samples(), server.message_plans(plans=plans),
      number=NAMES.index(name), num_workers=2, sizes=[BATCH],
    )  # fmt: skip
    self._log, self._fails = log[name], fails

  def compute(self, header):
    if header["task"] in self._fails:
      raise RuntimeError("Killed.")
    more, payload = super().compute(header)
    self._log.append((header["version"], round(more["loss"])))
    return more, payload


def gradient_server(plans):
  return server.GradientServer(
    optax.scale(float(PARAMS.size)), PARAMS, server.message_plans(plans=plans),
    workers=NAMES,
  )  # fmt: skip


def on_clock(protocol, machines, *, outages=(), resumes=False):
  log = collections.defaultdict(list)
  if outages:
    nodes = (machines.nodes[0], cluster.Node("worker1", outages=outages))
    machines = cluster.Cluster(nodes, machines.topology, machines.server)

  def make():
    pair = server.Pair(
      gradient_server(protocol.plans),
      {name: Noting(log, name, protocol.plans) for name in NAMES},
    )
    costs = cluster.Profile(0.01, push_bytes=256.0, pull_bytes=256.0)
    return server.Simulation(
      machines, protocol, costs, learner=pair, detection_s=0.001
    )

  run = make()
  if resumes:
    run.run(updates=MARK)
    saved, run = run.save(), make()
    run.resume(*saved)
  run.run(updates=UPDATES)
  return log


def on_threads(protocol, machines, *, fails=(), folder=None):
  log = collections.defaultdict(list)
  alive = list(fails)

  def work(name, channel):
    killed, alive[:] = tuple(alive) if name == NAMES[1] else (), []
    learner = Noting(log, name, protocol.plans, killed)
    learner.prepare()
    server.WorkerLoop(channel, name, learner, depth=protocol.depth).run()

  def run(updates):
    engine = server.ThreadEngine()
    try:
      _live_runs.run(
        engine,
        lambda plan: server.LiveServer(
          protocol, gradient_server(protocol.plans), plan
        ),
        {name: functools.partial(work, name) for name in NAMES},
        updates,
        every=MARK,
        checkpoints=folder,
        plan=server.LivePlan(workers=NAMES, machines=machines),
      )
    finally:
      engine.stop()

  if folder is not None:
    run(MARK)
    log.clear()
  run(UPDATES)
  return log


CASES = {
  "exact": (FAST, {"plans": None}),
  "links": (SLOW, {"plans": None}),
  "plans over links": (SLOW, {"plans": PLANS}),
  "a pipeline from update 4 over links": (SLOW, {"pipelined_from": 4}),
}


def check(log):
  """Each worker has computed at the versions that its tasks named."""
  assert set(log) == set(NAMES)
  for pairs in log.values():
    assert all(named == held for named, held in pairs), log


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_computed_at_the_versions_of_the_clock(case):
  machines, options = CASES[case]
  protocol = server.h_ps(BATCH, tasks=False, **({"plans": None} | options))
  clock, threads = (f(protocol, machines) for f in (on_clock, on_threads))
  for log in (clock, threads):
    check(log)
  for name in NAMES:
    # What is computed behind the last update is a matter of real time.
    rounds = min(len(clock[name]), len(threads[name]))
    assert rounds >= UPDATES
    assert clock[name][:rounds] == threads[name][:rounds]


def test_versions_hold_after_a_kill():
  protocol = server.h_ps(BATCH, tasks=False, plans=None)
  away = (cluster.Outage(0.1, 0.25),)
  clock = on_clock(protocol, SLOW, outages=away)
  threads = on_threads(protocol, SLOW, fails=(7,))
  for log in (clock, threads):
    check(log)
    # The other worker goes through all versions, one after the other.
    versions = [version for version, _ in log[NAMES[0]]]
    assert sorted(set(versions)) == list(range(max(versions) + 1))


def test_versions_hold_after_a_resume(tmp_path):
  protocol = server.h_ps(BATCH, tasks=False, plans=None)
  check(on_clock(protocol, SLOW, resumes=True))
  log = on_threads(protocol, SLOW, folder=str(tmp_path))
  check(log)
  # Both tasks of the beginning are of the checkpoint's version.
  for pairs in log.values():
    assert [version for version, _ in pairs[:3]] == [MARK, MARK, MARK + 1]


def test_messages_of_a_connection_keep_their_order():
  environment = simpy.Environment()
  link = cluster.Link(8.0, sharing="fair")  # A byte in a second.
  links = _links.Links(environment, cluster.workers([1.0], link=link))
  found = []

  def arrive(name):
    found.append((name, environment.now))

  # Fair links carry the small one first, and the last has no bytes.
  for name, num_bytes in (("large", 10), ("small", 2), ("none", None)):
    links.send("push", "worker0", num_bytes, arrive, name)
  links.connect("worker0")
  links.send("push", "worker0", None, arrive, "new")
  environment.run()
  assert [name for name, _ in found] == ["new", "large", "small", "none"]
  assert found[0][1] == 0.0
  # The large one alone takes 10 s on its way.
  assert all(time > 10 for _, time in found[1:])
