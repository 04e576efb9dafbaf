"""Ringleader ASGD: its steps by hand, its laws, and a reference in NumPy."""

import heapq

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import cluster, conformance, server
from tests.experiments import _loading

ringleader = _loading.alone("ringleader", "dbs_sgd/ringleader.py")
Apply, Pull, Push = server.Apply, server.Pull, server.Push
TARGETS = np.float32([1.0, 4.0, -2.0])
RATE = 0.1


def protocol():
  return ringleader.Ringleader(batches=server.FixedBatches(4))


class Targets:
  """Each worker owns one number, which all its samples are."""

  shared = False

  def batch(self, worker, start, count, *, size=None):
    del start
    mask = np.float32(np.arange(size or count) < count)
    return {"x": np.full(size or count, TARGETS[worker]), "mask": mask}


def loss_fn(w, model_state, batch, key):
  """A worker's gradient is its distance from its number."""
  del key
  errors = batch["mask"] * 0.5 * jnp.square(w - batch["x"])
  return errors.sum() / batch["mask"].sum(), (model_state, {})


def simulation(protocol, speeds, **costs):
  pytest.importorskip("simpy")
  machines = cluster.workers(speeds)
  learner = server.GradientLearner(
    loss_fn, optax.sgd(RATE), jnp.float32(0.0), Targets(),
    workers=machines.names,
  )  # fmt: skip
  profile = cluster.Profile(seconds_per_sample=0.25, **costs)
  return server.Simulation(machines, protocol, profile, learner=learner)


def test_a_round_of_two_workers_by_hand():
  state = (own := protocol()).init(["a", "b"])

  def receive(message):
    return own.receive(state, 0.0, message)

  def push(worker, task):
    return receive(Push(worker, task, 4, 1.0))

  (a,), (b,) = receive(Pull("a")), receive(Pull("b"))
  assert (a.version, a.pull_plan, b.pull_plan) == (0, 0, 0)
  # It first collects; the worker has the parameters, and is sent none.
  assert push("a", 0) == []
  (again,) = receive(Pull("a"))
  assert (again.task, again.version, again.pull_plan) == (2, 0, None)
  assert push("a", 2) == []
  receive(Pull("a"))
  # Now each has given one: a's two weigh as much as b's one.
  kept = frozenset({0, 2, 1})
  assert push("b", 1) == [Apply((0, 2, 1), (0.25, 0.25, 0.5), (0, 0, 0), kept)]
  (b,) = receive(Pull("b"))
  assert (b.task, b.version, b.pull_plan) == (4, 1, 0)
  # A gradient of b after its update is for the next round.
  assert push("b", 4) == []
  (b,) = receive(Pull("b"))
  assert (b.task, b.version, b.pull_plan) == (5, 1, None)
  # The last update of the round, after which its gradients are dropped.
  third = 1 / 2 / 3
  assert push("a", 3) == [
    Apply((0, 2, 3, 1), (third, third, third, 0.5), (1, 1, 1, 1))
  ]
  (a,) = receive(Pull("a"))
  assert (a.task, a.version, a.pull_plan) == (6, 2, 0)
  # The next round has b's gradient of version 1, and now one of a's.
  assert push("a", 6) == [Apply((4, 6), (0.5, 0.5), (1, 0), frozenset({4, 6}))]


def test_a_member_that_leaves_ends_the_round_it_delays():
  state = (own := protocol()).init(["a", "b"])
  for worker in "ab":
    own.receive(state, 0.0, Pull(worker))
  own.receive(state, 0.0, Push("a", 0, 4, 1.0))
  own.receive(state, 0.0, Push("b", 1, 4, 1.0))  # Its update; a owes one.
  (task,) = own.receive(state, 0.0, Pull("b"))
  assert (task.task, task.pull_plan) == (2, 0)
  own.receive(state, 0.0, Push("b", 2, 4, 1.0))  # For the next round.
  dropped = own.receive(state, 0.0, server.Leave("a"))
  assert dropped == [server.Discard(0, "left"), server.Discard(1, "left")]
  # b continues alone: its next gradient ends a round.
  (task,) = own.receive(state, 0.0, Pull("b"))
  assert (task.task, task.pull_plan) == (3, None)
  found = own.receive(state, 0.0, Push("b", 3, 4, 1.0))
  assert found == [Apply((2, 3), (0.5, 0.5), (0, 0))]
  # A worker that returns is sent parameters, whatever it had.
  own.receive(state, 0.0, server.Join("a"))
  (task,) = own.receive(state, 0.0, Pull("a"))
  assert (task.version, task.pull_plan) == (2, 0)


def test_machines_that_fail_and_return_keep_the_laws():
  pytest.importorskip("simpy")
  conformance.check(protocol())


def test_one_worker_is_sgd_to_the_bit():
  found = []
  for own in (protocol(), server.ASP(batches=server.FixedBatches(4))):
    run = simulation(own, [1.0])
    run.run(updates=5)
    found.append(np.asarray(run.learner.model.params))
  np.testing.assert_array_equal(*found)
  assert found[0] == pytest.approx(1 - (1 - RATE) ** 5)


def test_first_update_of_equal_workers_is_that_of_bsp():
  found = []
  for own in (protocol(), server.BSP(batches=server.FixedBatches(4))):
    run = simulation(own, [1.0, 1.0, 1.0])
    run.run(updates=1)
    found.append((np.asarray(run.learner.model.params), run.now_s))
  assert found[0] == found[1]
  assert found[0][0] == pytest.approx(RATE * TARGETS.mean())


def reference(seconds, num_updates):
  """The paper's algorithm, with numbers for parameters."""
  num = len(seconds)
  w, updates, held, now = 0.0, 0, [0.0] * num, 0.0
  events = [(each, i) for i, each in enumerate(seconds)]
  heapq.heapify(events)
  table, later, arrived, owing = {}, {}, set(), set()
  while updates < num_updates:
    now, i = heapq.heappop(events)
    gradient = held[i] - TARGETS[i]
    if owing and i not in owing:
      later.setdefault(i, []).append(gradient)
    else:
      table.setdefault(i, []).append(gradient)
      arrived.add(i)
      if not owing and len(arrived) == num:
        owing = set(range(num))
      if owing:
        w -= RATE * np.mean([np.mean(own) for own in table.values()])
        updates += 1
        held[i] = w
        owing.remove(i)
        if not owing:
          table, later, arrived = later, {}, set(later)
    heapq.heappush(events, (now + seconds[i], i))
  return w, now


def test_it_trains_as_the_papers_algorithm_does():
  run = simulation(protocol(), [1.0, 1 / 2.7, 1 / 6.1])
  for updates in (1, 2, 3, 8, 31):
    run.run(updates=updates)
    w, now_s = reference([1.0, 2.7, 6.1], updates)
    assert float(run.learner.model.params) == pytest.approx(w, rel=1e-5)
    assert run.now_s == pytest.approx(now_s)
  # The mean of all targets, though the first gives six times as many samples
  # as the last; no gradient is lost.
  run.run(updates=300)
  assert float(run.learner.model.params) == pytest.approx(1.0, abs=1e-3)
  assert not run.state.discarded
  waiting = [x for own in run.state.table.values() for x in own]
  waiting += [x for own in run.state.later.values() for x in own]
  assert run.applied_samples + 4 * len(waiting) == 4 * run.state.pushes


def test_no_gradient_is_older_than_twice_the_others():
  pytest.importorskip("simpy")
  speeds = [9.0, 5.0, 4.0, 1.0, 1.0]
  run = server.Simulation(
    cluster.workers(speeds, jitter=0.5),
    protocol(),
    cluster.Profile(seconds_per_sample=0.01),
  )
  run.run(updates=1000)
  assert max(run.staleness) == 2 * len(speeds) - 2


def test_parameters_are_sent_once_a_round():
  run = simulation(protocol(), [4.0, 1.0, 1.0], pull_bytes=1.0, push_bytes=1.0)
  run.run(updates=30)
  assert run.pulled_bytes <= 3 + 30 < run.pushed_bytes
