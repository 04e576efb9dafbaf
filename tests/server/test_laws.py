"""The laws of leaves on a server: masks, keys and iterates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import cluster, data, server, training
from jdist.server.run import _run_marks

pytest.importorskip("simpy")

DIGITS = data.load("digits")
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


def test_masks_of_infinities_are_no_divergence():
  machines = cluster.workers([1.0, 1.0])
  learner = server.GradientLearner(
    loss_fn,
    optax.sgd(0.1),
    PARAMS,
    data.SampleStream(DIGITS, 2, seed=0),
    workers=machines.names,
    model_state=first_state(),
  )
  run = server.Simulation(
    machines,
    server.BSP(batches=server.FixedBatches(8)),
    cluster.Profile(seconds_per_sample=0.01),
    learner=learner,
  )
  run.run(updates=4)
  assert _run_marks.is_finite(learner)
  np.testing.assert_array_equal(
    learner.model.model_state["mask"], first_state()["mask"]
  )
  assert abs(np.asarray(learner.model.params["w"])).max() > 0


def test_workers_draw_by_keys_of_their_own():
  machines = cluster.workers([1.0, 1.0])
  learner = server.GradientLearner(
    loss_fn,
    optax.sgd(0.1),
    PARAMS,
    data.SampleStream(DIGITS, 2, seed=0),
    workers=machines.names,
    model_state=first_state(),
  )
  drawn = []
  for one in learner.workers.values():
    compute = one.compute

    def noted(header, compute=compute):
      header, payload = compute(header)
      drawn.append(float(payload[1]["drawn"]))
      return header, payload

    one.compute = noted
  server.Simulation(
    machines,
    server.BSP(batches=server.FixedBatches(8)),
    cluster.Profile(seconds_per_sample=0.01),
    learner=learner,
  ).run(updates=1)
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
    server.FragmentLearner(
      loss_fn,
      inner,
      PARAMS,
      data.SampleStream(DIGITS, 2, seed=0),
      workers=["a", "b"],
      model_state=model_state,
      outer=optax.sgd(0.7),
    )
