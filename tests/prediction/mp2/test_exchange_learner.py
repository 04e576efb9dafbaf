"""MP² as a pair of learners trains as the exchange does."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

from jdist import cluster, data, models, prediction, server, training
from tests import _refusals

pytest.importorskip("simpy")

DIGITS = data.load("digits")
MODEL = models.build(
  "mlp", input_shape=(8, 8, 1), num_classes=10, hidden_sizes=(4, 5)
)
PREDICTOR = prediction.predictor(prediction.cut(MODEL, 1))
THETA = PREDICTOR.init(jax.random.key(0))
LOSS = training.classification_loss(MODEL.apply, normalize=DIGITS.normalize)
COSTS = cluster.Profile(seconds_per_sample=0.01)


@pytest.fixture(autouse=True)
def promotion():
  with jax.numpy_dtype_promotion("standard"):  # Optax's Adam needs it.
    yield


def learn(protocol, speeds=(3.0, 1.0, 2.0), updates=5):
  machines = cluster.workers(speeds)
  learner = prediction.ExchangeLearner(
    prediction.Exchange(PREDICTOR, optax.adam(1e-2)), LOSS, MODEL.params, THETA,
    data.SampleStream(DIGITS, len(speeds), seed=0), workers=machines.names,
  )  # fmt: skip
  run = server.Simulation(machines, protocol, COSTS, learner=learner)
  run.run(updates=updates)
  return learner


def test_full_barrier_trains_as_the_exchange():
  learner = learn(server.BSP(batches=server.FixedBatches(4)))
  exchange = prediction.Exchange(PREDICTOR, optax.adam(1e-2))
  state = exchange.init(MODEL.params, 3)
  samples = data.SampleStream(DIGITS, 3, seed=0)
  key = jax.random.key(0)

  @jax.jit
  def step(state, batch):
    grads = jax.vmap(jax.grad(lambda w, b: LOSS(w, {}, b, key)[0]), (None, 0))
    return exchange.step(state, grads(state.params, batch), THETA)

  order = [0, 1, 2]  # Of the first update; then as they come back.
  for number in range(5):
    parts = [
      samples.batch(worker, 12 * number + 4 * place, 4)
      for place, worker in enumerate(order)
    ]
    rows = [parts[order.index(worker)] for worker in range(3)]
    state = step(state, jax.tree.map(lambda *x: jnp.stack(x), *rows))
    # The one that closes a barrier pulls last; the others wait by rank.
    order = [0, 2, 1]
  # The exchange maps over workers in one program, which sums in another order,
  # and Adam divides small gradients by their own size.
  chex.assert_trees_all_close(
    state.params, learner.model.params, rtol=1e-4, atol=1e-5
  )


def noisy_loss(params, model_state, batch, key):
  labels = batch["label"].sum().astype(jnp.float32)
  drawn = jax.tree.map(lambda w: w * jax.random.normal(key, w.shape), params)
  loss = labels * sum(map(jnp.sum, jax.tree.leaves(drawn)))
  return loss, (model_state, {})


def test_batch_has_random_numbers_of_its_own_task():
  def learned(order):
    learner = prediction.ExchangeLearner(
      prediction.Exchange(PREDICTOR, optax.sgd(0.1)), noisy_loss, MODEL.params,
      THETA, data.SampleStream(DIGITS, 2, seed=0), workers=("a", "b"),
    )  # fmt: skip
    headers = {}
    for task, worker in enumerate(("a", "b")):
      reply = server.Reply(worker, task, 0, 4)
      headers[task] = reply._asdict() | {"more": learner.server.reply(reply)[0]}
    for task in order:
      worker = learner.workers["ab"[task]]
      learner.server.push(task, *worker.compute(headers[task]))
    learner.server.apply(server.Apply((0, 1), (0.5, 0.5), (0, 0)))
    return learner.model.params

  chex.assert_trees_all_equal(learned((0, 1)), learned((1, 0)))


def test_a_worker_that_is_missing_is_refused():
  with _refusals.refused("protocol", "push a gradient of"):
    learn(server.ASP(batches=server.FixedBatches(4)))
  with _refusals.refused("protocol", "have batches of one"):
    learn(server.BSP(batches=server.SpeedBatches(12)))
