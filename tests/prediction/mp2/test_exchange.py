"""The published protocol, the same without a server, and their bytes."""

import functools

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
from tests import _refusals

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
  exchange = prediction.Exchange(PREDICTOR, ADAM)

  @jax.jit
  def step(state, images, labels):
    gradients = jax.vmap(jax.grad(loss), (None, 0, 0))(
      state.params, images, labels
    )
    return exchange.step(state, gradients, THETA)

  state = exchange.init(MODEL.params, NUM_WORKERS)
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
def test_one_step_by_hand():
  draw = np.random.default_rng(0)
  gradients = jax.tree.map(
    lambda x: draw.normal(size=(2, *x.shape)).astype(np.float32), MODEL.params
  )
  exchange = prediction.Exchange(PREDICTOR, ADAM)
  step = jax.jit(exchange.step)
  state = step(exchange.init(MODEL.params, 2), gradients, THETA)
  cut = PREDICTOR.cut
  before, _ = cut.split(MODEL.params)
  pushed, _ = jax.vmap(cut.split)(gradients)
  after, rear = cut.split(state.params)
  # The first step of Adam goes by the sign; the mean of both workers' steps.
  wanted = jax.tree.map(
    lambda w, g: w - 1e-2 * np.sign(g).mean(0), before, pushed
  )
  predicted = PREDICTOR.apply(THETA, after)
  chex.assert_trees_all_close(
    (after, rear), (wanted, predicted), rtol=1e-5, atol=1e-6
  )
  # The workers keep no optimizer state of the rear.
  sizes = sum(x.size for x in jax.tree.leaves(state.optimizer[0].mu))
  assert sizes == 2 * cut.num_front


@pytest.mark.parametrize("substrate", ["vmap", "shard_map"])
def test_both_forms_agree_and_replicas_are_equal_to_the_bit(substrate):
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
    # All that travels is the mean of the front.
    sent = profiling.read_collectives(programs[-1])
    assert sum(c.payload_bytes for c in sent) == 4 * PREDICTOR.cut.num_front


def test_an_exchange_refuses_gradients_of_other_workers():
  # Stateless: no other shape shows the number of workers.
  exchange = prediction.Exchange(PREDICTOR, optax.sgd(0.1))
  state = exchange.init(MODEL.params, 2)
  gradients = jax.tree.map(lambda x: jnp.ones((3, *x.shape)), MODEL.params)
  with _refusals.refused("gradients", "of 2 workers"):
    exchange.step(state, gradients, THETA)
  with _refusals.refused("gradients", "a tree like"):
    exchange.step(state, None, THETA)
  scalars = jax.tree.map(lambda x: 1.0, MODEL.params)
  with pytest.raises(ValueError, match=r"of 2 workers.*shape \[\] and not"):
    exchange.step(state, scalars, THETA)
  with _refusals.refused("state", "of `Exchange.init`"):
    exchange.step(None, gradients, THETA)


# Bytes.

# Bytes of the authors' push, and in per cent what it saves as they count, like
# for like, and in both directions. By hand: 8 n + 161 over 4 N, n / N, and
# (n + N) / 2 N. Only VGG-15's are in the sheet.
BY_HAND = {
  "vgg15": (2_081_441, 88.98, 94.49, 47.2),
  "resnet18": (8 * 185_664 + 161, 88.17, 94.09, 47.0),
  "lenet": (8 * 2_572 + 161, 91.60, 95.83, 47.9),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_the_shares_are_those_counted_by_hand(name):
  found = prediction.exchange_bytes(prediction.published_cut(name))
  pushed, published, like_for_like, both = BY_HAND[name]
  assert found.published_bytes == pushed
  assert round(100 * found.uplink_saved_as_published, 2) == published
  assert round(100 * found.uplink_saved, 2) == like_for_like
  assert round(100 * found.both_saved, 1) == both


def test_the_counts_are_those_of_the_messages_in_a_traced_step():
  """A mean of the fronts against one of all parameters, on 8 workers."""
  cut = prediction.published_cut("vgg15")
  count = functools.partial(collectives.traffic, axis="worker", num_workers=8)
  mean = functools.partial(collectives.mean, axis="worker")
  front = count(lambda tree: mean(cut.flatten_front(tree)), cut.abstract())
  whole = count(mean, cut.abstract())
  found = prediction.exchange_bytes(cut)
  # What all-reduce sends of a message, 2 (8 - 1) / 8.
  assert front.bytes_per_step == found.pushed_bytes * 1.75
  assert whole.bytes_per_step == found.whole_bytes * 1.75
  saved = 1 - front.bytes_per_step / whole.bytes_per_step
  assert f"{saved:.2%}" == "94.49%"


def test_half_precision_is_counted_as_it_is_sent():
  cut = prediction.published_cut("lenet")
  half = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, "bfloat16"), cut.abstract()
  )
  found = prediction.exchange_bytes(prediction.cut(half, 2))
  assert found.pushed_bytes == 4 * cut.num_front
  assert found.whole_bytes == 2 * (cut.num_front + cut.num_rear)
