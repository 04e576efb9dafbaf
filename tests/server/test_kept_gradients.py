"""Gradients that an update keeps for later ones."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import cluster, server
from jdist.server.gradients import _gradient_messages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Twice(server.Protocol):
  """Applies each gradient in two updates, half of it in each."""

  def on_push(self, state, push, actions):
    stale = state.version - push.version
    for late in range(2):
      kept = frozenset(() if late else (push.task,))
      one = server.Apply((push.task,), (0.5,), (stale + late,), kept)
      actions.append(one)
      state.version += 1
    state.applied += 2


class Samples:
  shared = True

  def batch(self, worker, start, count, *, size=None):
    x = np.random.default_rng(start).normal(size=(size or count, 3))
    mask = np.float32(np.arange(size or count) < count)
    return {"x": np.float32(x), "mask": mask}


def loss_fn(w, model_state, batch, key):
  del key
  errors = batch["mask"] * jnp.square(batch["x"] @ w - batch["x"].sum(-1))
  return errors.sum() / batch["mask"].sum(), (model_state, {})


def simulation(protocol):
  pytest.importorskip("simpy")
  machines = cluster.workers([2.0, 1.0])
  learner = server.GradientLearner(
    loss_fn, optax.sgd(0.1), jnp.zeros(3), Samples(), workers=machines.names
  )
  costs = cluster.Profile(seconds_per_sample=0.01)
  return server.Simulation(machines, protocol, costs, learner=learner)


@pytest.mark.parametrize("compensation", [0.0, 0.5])
def test_kept_gradient_is_in_two_updates_and_its_samples_count_once(
  compensation,
):
  learner = server.GradientServer(
    optax.sgd(1.0), jnp.zeros(2), server.message_plans(), workers=["a", "b"],
    compensation=compensation,
  )  # fmt: skip
  learner.decoded = True
  gradients = jnp.array([1.0, 2.0]), jnp.array([4.0, 0.0])
  for task, (worker, gradient) in enumerate(zip("ab", gradients, strict=True)):
    learner.reply(server.Reply(worker, task, 0, 10 + task))
    pushed = learner._empty_push(0)._replace(grads=gradient)
    learner.push(task, {"loss": 1.0 + task}, pushed)
  first, second = gradients = np.array(gradients)
  learner.apply(server.Apply((0,), (1.0,), (0,), frozenset({0})))
  expected = -first
  np.testing.assert_allclose(learner.model.params, expected)
  assert (learner.samples, list(learner.losses)) == (0, [(0, 1.0)])
  learner.apply(server.Apply((0, 1), (0.25, 0.75), (1, 1)))
  # The parameters of both gradients were zeros.
  first, second = (g + compensation * g * g * expected for g in gradients)
  expected = expected - (0.25 * first + 0.75 * second)
  np.testing.assert_allclose(learner.model.params, expected, rtol=1e-6)
  assert learner.samples == 21 and not learner.tasks
  notes, _ = learner.save(whole=True)
  assert notes["pushes"] == notes["read"] == []


def test_single_push_gives_its_memory_to_the_parameters():
  learner = server.GradientServer(
    optax.sgd(1.0), jnp.zeros(2), server.message_plans(), workers=["a"]
  )
  learner.decoded = True
  learner.reply(server.Reply("a", 0, 0, 10))
  gradient = jnp.array([1.0, 2.0])
  where = gradient.unsafe_buffer_pointer()
  pushed = learner._empty_push(0)._replace(grads=gradient)
  learner.push(0, {"loss": 1.0}, pushed)
  learner.apply(server.Apply((0,), (1.0,), (0,)))
  params = learner.model.params
  assert params.tolist() == [-1.0, -2.0]
  assert params.unsafe_buffer_pointer() == where


def test_halves_in_two_updates_move_as_much_as_one_update():
  once = simulation(server.ASP(batches=server.FixedBatches(8)))
  twice = simulation(Twice(batches=server.FixedBatches(8)))
  once.run(updates=6)
  twice.run(updates=12)
  np.testing.assert_allclose(
    twice.learner.model.params, once.learner.model.params, rtol=1e-6
  )
  assert twice.applied_samples == once.applied_samples == 48
  assert twice.learner.server.samples == 48
  # Each use is counted, an update later than the one before.
  assert sum(twice.staleness.values()) == 12
  samples = {name: node.samples for name, node in once.nodes.items()}
  assert {x: node.samples for x, node in twice.nodes.items()} == samples


def test_messages_without_arrays_count_kept_samples_once():
  empty = server.EmptyServer()
  for task in range(2):
    empty.reply(server.Reply("a", task, 0, 10 + task))
  empty.apply(server.Apply((0, 1), (0.5, 0.5), (0, 0), frozenset({0})))
  # A restored one counts on, and knows what the kept task has.
  notes, payload = empty.save()
  empty = server.EmptyServer()
  empty.load(notes, payload)
  assert empty.samples == 11
  empty.apply(server.Apply((0,), (1.0,), (1,)))
  assert empty.samples == 21


def test_actions_show_what_differs_from_the_default():
  assert repr(server.Apply((0,), (1.0,), (2,))) == (
    "Apply(tasks=(0,), weights=(1.0,), staleness=(2,))"
  )
  kept = server.Apply((0,), (1.0,), (2,), frozenset({0}))
  assert repr(kept).endswith("staleness=(2,), kept=frozenset({0}))")


def test_saves_hold_what_was_sent_for_pushes_that_wait():
  """A live server's tasks without a push are lost, and a clock's are not."""
  learner = server.GradientServer(
    optax.sgd(1.0), jnp.zeros(2), server.message_plans(), workers=["a", "b"],
    compensation=0.5,
  )  # fmt: skip
  learner.decoded = True
  for task, worker in enumerate("ab"):
    learner.reply(server.Reply(worker, task, 0, 10))
  pushed = learner._empty_push(0)._replace(grads=np.float32([1.0, 2.0]))
  learner.push(1, {"loss": 1.0}, pushed)
  assert learner.save()[0]["read"] == [1]
  assert learner.save(whole=True)[0]["read"] == [0, 1]
  learner.leave("a")
  assert learner.save(whole=True)[0]["held"] == [1]


def test_server_has_copies_and_the_last_task_that_is_settled():
  params, statistics = np.zeros(2, np.float32), np.ones(1, np.float32)
  learner = server.GradientServer(
    optax.sgd(1.0), params, server.message_plans(), workers=["a"],
    model_state=statistics,
  )  # fmt: skip
  params[:] = statistics[:] = 9.0
  assert learner.model.params.tolist() == [0.0, 0.0]
  assert learner.model.model_state.tolist() == [1.0]
  for task in range(2):
    learner.reply(server.Reply("a", task, 0, 8))
  for task in (1, 0):  # One that is dropped late is older.
    learner.discard(task)
  more, _ = learner.reply(server.Reply("a", 2, 0, 8))
  assert more == {"start": 16, "settled": 1}
  assert learner.losses.maxlen == 1000


def test_each_sender_rounds_by_random_numbers_of_its_own():
  """By the count of its messages, which begins at another place for each."""
  plans = server.message_plans(plans=server.BitPlans(((32,), (8,)), (64,)))
  params = jnp.ones(64)
  learner = server.GradientServer(
    optax.sgd(1.0), params, plans, workers=["a", "b"], seed=1
  )
  assert [x.step for x in learner._pull_states] == [2 << 20, 3 << 20]
  for seed, number, stream in ((1, 1, 3), (1024, 1, 1)):  # Modulo 2048.
    worker = server.GradientWorker(
      loss_fn, params, Samples(), plans, number=number, num_workers=2, seed=seed
    )
    assert worker._own[0].step == stream << 20


def test_batches_are_padded_to_the_next_size():
  padded = _gradient_messages.padded_size
  assert [padded(None, x) for x in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, 8]
  assert [padded([4, 6], x) for x in (1, 4, 5, 6)] == [4, 4, 6, 6]
