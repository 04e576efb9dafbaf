"""The published protocol, and the same without a server."""

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
  """What the workers pull after every step."""
  server = prediction.Server(PREDICTOR, ADAM)

  @jax.jit
  def step(state, images, labels):
    gradients = jax.vmap(jax.grad(loss), (None, 0, 0))(
      state.params, images, labels
    )
    return server.step(state, gradients, THETA)

  state = server.init(MODEL.params, NUM_WORKERS)
  for batch in batches(num_steps):
    state = step(state, *batch)
    yield state.params


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


@pytest.mark.smoke
def test_one_step_of_the_server_by_hand():
  draw = np.random.default_rng(0)
  gradients = jax.tree.map(
    lambda x: draw.normal(size=(2, *x.shape)).astype(np.float32), MODEL.params
  )
  server = prediction.Server(PREDICTOR, ADAM)
  step = jax.jit(server.step)
  state = step(server.init(MODEL.params, 2), gradients, THETA)
  cut = PREDICTOR.cut
  before, _ = cut.split(MODEL.params)
  pushed, _ = jax.vmap(cut.split)(gradients)
  after, rear = cut.split(state.params)
  # The first step of Adam goes by the sign; the mean of both workers' steps.
  wanted = jax.tree.map(
    lambda w, g: w - 1e-2 * np.sign(g).mean(0), before, pushed
  )
  for found, x in zip(
    jax.tree.leaves(after), jax.tree.leaves(wanted), strict=True
  ):
    np.testing.assert_allclose(found, x, rtol=1e-5, atol=1e-6)
  jax.tree.map(
    lambda found, x: np.testing.assert_allclose(found, x, 1e-5, 1e-6),
    rear,
    PREDICTOR.apply(THETA, after),
  )
  # Of the rear the workers remember nothing.
  sizes = sum(x.size for x in jax.tree.leaves(state.optimizer[0].mu))
  assert sizes == 2 * cut.num_front


@pytest.mark.parametrize("substrate", ["vmap", "shard_map"])
def test_both_forms_agree_and_replicas_are_equal_to_the_bit(substrate):
  programs = []
  for wanted, (found, program) in zip(
    served(50), without_a_server(50, substrate), strict=True
  ):
    programs.append(program)
    for x, w in zip(
      jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True
    ):
      assert all(row.tobytes() == x[0].tobytes() for row in x)
      np.testing.assert_allclose(x[0], w, rtol=1e-6, atol=1e-6)
  if substrate == "shard_map":
    # All that travels is the mean of the front.
    sent = profiling.read_collectives(programs[-1])
    assert sum(c.payload_bytes for c in sent) == 4 * PREDICTOR.cut.num_front


def test_a_server_refuses_what_is_wrong():
  with pytest.raises(ValueError, match="`optimizer` must be an Optax"):
    prediction.Server(PREDICTOR, 0.1)
  for wrong in ("a", PREDICTOR.cut):
    with pytest.raises(
      ValueError, match=r"`predictor` must be.*`prediction\.predictor\("
    ):
      prediction.Server(wrong, ADAM)
  for number in (0, 1.5):
    with pytest.raises(ValueError, match="`num_workers` must be an int >= 1"):
      prediction.Server(PREDICTOR, ADAM).init(MODEL.params, number)
  with pytest.raises(ValueError, match="`tree` must be the network"):
    prediction.Server(PREDICTOR, ADAM).init({"w": {"kernel": jnp.ones(2)}}, 1)


def test_a_server_refuses_gradients_of_other_workers():
  # Stateless, so that nothing else would tell.
  server = prediction.Server(PREDICTOR, optax.sgd(0.1))
  state = server.init(MODEL.params, 2)
  gradients = jax.tree.map(lambda x: jnp.ones((3, *x.shape)), MODEL.params)
  with pytest.raises(ValueError, match="`gradients` must be of 2 workers"):
    server.step(state, gradients, THETA)
  with pytest.raises(ValueError, match="`gradients` must be a tree like"):
    server.step(state, None, THETA)
  scalars = jax.tree.map(lambda x: 1.0, MODEL.params)
  with pytest.raises(ValueError, match=r"of 2 workers.*got \[\] at"):
    server.step(state, scalars, THETA)
  with pytest.raises(ValueError, match=r"`state` must be of `Server\.init`"):
    server.step(None, gradients, THETA)
