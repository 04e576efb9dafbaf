"""MP² against the published protocol with a server, and their bytes."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import (
  collectives,
  methods,
  models,
  prediction,
  profiling,
  transforms,
)

NUM_WORKERS = 4
MODEL = models.build(
  "mlp", input_shape=(4, 4, 1), num_classes=3, hidden_sizes=(4, 5)
)
PREDICTOR = prediction.predictor(prediction.cut(MODEL, 1))
THETA = PREDICTOR.init(jax.random.key(0))
ADAM = optax.adam(1e-2)


@pytest.fixture(autouse=True)
def promotion():
  with jax.numpy_dtype_promotion("standard"):  # Optax's Adam needs it.
    yield


def batches(num_steps):
  draw = np.random.default_rng(0)
  for _ in range(num_steps):
    yield (
      draw.normal(size=(NUM_WORKERS, 6, 4, 4, 1)).astype(np.float32),
      draw.integers(0, 3, (NUM_WORKERS, 6)),
    )


def loss(params, images, labels):
  logits, _ = MODEL.apply(params, {}, images, train=True)
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def served(num_steps):
  """Yields the parameters that workers pull in the published protocol.

  Every worker steps on the front, with an optimizer state of its own, and
  pushes it; the server averages the fronts and predicts the rear.
  """
  cut = PREDICTOR.cut

  @jax.jit
  def step(params, states, images, labels):
    front, _ = cut.split(params)
    gradients = jax.vmap(jax.grad(loss), (None, 0, 0))(params, images, labels)

    def push(gradients, state):
      updates, state = ADAM.update(cut.split(gradients)[0], state, front)
      return optax.apply_updates(front, updates), state

    pushed, states = jax.vmap(push)(gradients, states)
    front = jax.tree.map(lambda x: x.mean(0), pushed)
    return cut.join(front, PREDICTOR.apply(THETA, front)), states

  params = MODEL.params
  states = jax.tree.map(
    lambda x: jnp.stack([x] * NUM_WORKERS), ADAM.init(cut.split(params)[0])
  )
  for batch in batches(num_steps):
    params, states = step(params, states, *batch)
    yield params


def without_a_server(num_steps, substrate, **options):
  team = collectives.workers(NUM_WORKERS, substrate=substrate)
  optimizer = methods.mp2(
    ADAM, PREDICTOR.cut, PREDICTOR.apply, THETA, axis=team.axis, **options
  )

  def step(params, state, images, labels):
    gradients = jax.grad(loss)(params, images, labels)
    updates, state = optimizer.update(gradients, state, params)
    return transforms.apply_updates(params, updates, state), state

  params = team.replicate(MODEL.params)
  state = team.jit(optimizer.init)(params)
  first = team.place(next(batches(1)))
  program = team.jit(step).lower(params, state, *first).compile()
  for batch in batches(num_steps):
    params, state = program(params, state, *team.place(batch))
    yield jax.tree.map(np.asarray, params), program


@pytest.mark.parametrize("substrate", ["vmap", "shard_map"])
def test_mp2_equals_the_published_protocol_on_equal_replicas(substrate):
  programs = []
  for wanted, (found, program) in zip(
    served(50), without_a_server(50, substrate), strict=True
  ):
    programs.append(program)
    for x in jax.tree.leaves(found):
      assert all(row.tobytes() == x[0].tobytes() for row in x)
    first = jax.tree.map(lambda x: x[0], found)
    chex.assert_trees_all_close(first, wanted, rtol=1e-6, atol=1e-6)
  if substrate == "shard_map":
    # Only the mean of the front is sent.
    sent = profiling.read_collectives(programs[-1])
    assert sum(c.payload_bytes for c in sent) == 4 * PREDICTOR.cut.num_front
