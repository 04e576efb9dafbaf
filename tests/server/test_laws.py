"""The laws of leaves on a server: masks, keys and iterates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import cluster, data, server, training
from jdist.server.run import _run_marks
from tests.server import _fragment_pair

pytest.importorskip("simpy")

DIGITS = data.load("digits")
SGD = optax.sgd(0.1)
PARAMS = {"w": jnp.zeros((64, 10))}


def loss_fn(params, model_state, batch, key):
  """Logs the first number that each worker draws by the model's own key."""
  del key
  x = batch["image"].reshape(len(batch["image"]), -1).astype(jnp.float32) / 16
  own = model_state["dropout"]
  drawn = jax.random.uniform(own)
  losses = optax.softmax_cross_entropy_with_integer_labels(
    x @ params["w"], batch["label"]
  )
  new = {
    "mask": model_state["mask"],
    "dropout": jax.random.fold_in(own, 1),
    "drawn": drawn,
  }
  return training.masked_mean(losses, batch["mask"]), (new, {})


def first_state():
  return {
    "mask": np.array([0.0, -np.inf], np.float32),
    "dropout": jax.random.key(0),
    "drawn": np.float32(0.0),
  }


def learn(optimizer=SGD, updates=4, watch=lambda learner: None):
  machines = cluster.workers([1.0, 1.0])
  learner = server.GradientLearner(
    loss_fn,
    optimizer,
    PARAMS,
    data.SampleStream(DIGITS, 2, seed=0),
    workers=machines.names,
    model_state=first_state(),
  )
  watch(learner)
  server.Simulation(
    machines,
    server.BSP(batches=server.FixedBatches(8)),
    cluster.Profile(seconds_per_sample=0.01),
    learner=learner,
  ).run(updates=updates)
  return learner


def test_masks_of_infinities_are_no_divergence():
  learner = learn()
  assert _run_marks.is_finite(learner)
  np.testing.assert_array_equal(
    learner.model.model_state["mask"], first_state()["mask"]
  )
  assert abs(np.asarray(learner.model.params["w"])).max() > 0


def test_server_steps_by_optimizers_that_take_few_arguments():
  """SAM's update takes extra arguments, but neither a loss nor a value."""
  sam = optax.contrib.sam(SGD, optax.sgd(0.01))
  with jax.numpy_dtype_promotion("standard"):
    assert abs(np.asarray(learn(sam).model.params["w"])).max() > 0


@pytest.mark.parametrize("wanted", ["loss", "value"])
def test_server_gives_its_optimizer_the_loss(wanted):
  """Optimizers of Optax ask for it by either name."""
  seen = []

  def update(grads, state, params=None, **more):
    jax.debug.callback(lambda x: seen.append(float(x)), more[wanted])
    return jax.tree.map(lambda x: -0.1 * x, grads), state

  optimizer = optax.GradientTransformationExtraArgs(
    lambda params: optax.EmptyState(), update
  )
  learner = learn(optimizer, updates=2)
  jax.effects_barrier()
  assert seen == pytest.approx([x for _, x in learner.server.losses], rel=1e-6)


def test_workers_draw_by_keys_of_their_own():
  drawn = []

  def watch(learner):
    for one in learner.workers.values():

      def noted(header, compute=one.compute):
        header, payload = compute(header)
        drawn.append(float(payload[1]["drawn"]))
        return header, payload

      one.compute = noted

  learn(updates=1, watch=watch)
  assert len(set(drawn)) == 2


@pytest.mark.parametrize(
  ("inner", "model_state", "said"),
  [
    (optax.contrib.schedule_free_sgd(0.1), {}, "iterates.*decoupled DiLoCo"),
    (optax.sgd(0.1), {"mask": np.array([-np.inf])}, "`model_state`.*finite"),
  ],
  ids=["iterates", "infinities"],
)
def test_decoupled_diloco_names_what_it_refuses(inner, model_state, said):
  with pytest.raises(ValueError, match=said):
    _fragment_pair.fragment_pair(
      loss_fn,
      inner,
      PARAMS,
      data.SampleStream(DIGITS, 2, seed=0),
      workers=["a", "b"],
      model_state=model_state,
      outer=optax.sgd(0.7),
    )
