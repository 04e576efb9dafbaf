"""A loss that reaches an optimizer behind a mean is the workers' mean."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from jdist import collectives, methods, reducers, training, transforms
from tests import _refusals, _thinned
from tests.transforms import _reducers

BEHIND = {
  "ssgd": methods.ssgd,
  "qsgd": methods.qsgd,
  "topk_sgd": lambda optimizer, axis: methods.topk_sgd(
    optimizer, 0.5, axis=axis
  ),
  "signsgd": methods.signsgd,
}


@pytest.fixture(autouse=True)
def ordinary_promotion():
  """Optax's plateau mixes its counters with floats."""
  with jax.numpy_dtype_promotion("standard"):
    yield


def plateau():
  """Halves the rate in every step in which the loss has not fallen."""
  return optax.chain(
    optax.sgd(1.0), optax.contrib.reduce_on_plateau(0.5, patience=1)
  )


@pytest.mark.parametrize("name", _thinned.some(BEHIND, ["ssgd", "topk_sgd"]))
def test_workers_with_different_losses_stay_equal(name):
  optimizer = BEHIND[name](plateau(), axis="worker")

  def run(losses):
    def step(carry, loss):
      w, state = carry
      updates, state = optimizer.update(jnp.ones(300), state, w, value=loss)
      return (optax.apply_updates(w, updates), state), None

    w = jnp.zeros(300)
    (w, _), _ = jax.lax.scan(step, (w, optimizer.init(w)), losses)
    return w

  # The first falls and the second rises, from one value; their mean falls.
  falling = jnp.float32([4.0, 2.0, 1.0, 0.5, 0.2])
  w = jax.jit(jax.vmap(run, axis_name="worker"))(
    jnp.stack([falling, 6 - falling / 2])
  )
  np.testing.assert_array_equal(w[0], w[1])
  alone = BEHIND[name](plateau(), axis=None)
  state, mean = alone.init(jnp.zeros(300)), 3 + falling / 4
  total = jnp.zeros(300)
  for loss in mean:
    updates, state = alone.update(jnp.ones(300), state, total, value=loss)
    total = optax.apply_updates(total, updates)
  assert jnp.abs(w[0] - total).max() < 1e-5 or name == "qsgd"


@pytest.mark.parametrize("asks", [False, True])
def test_only_a_loss_that_is_used_is_sent(asks):
  inner = plateau() if asks else optax.adam(0.1)
  optimizer = methods.ssgd(inner, axis="worker")

  def step(w, loss):
    return optimizer.update(w, optimizer.init(w), w, loss=loss, value=loss)

  traffic = collectives.traffic(
    step,
    jax.ShapeDtypeStruct((5,), jnp.float32),
    jax.ShapeDtypeStruct((), jnp.float32),
    axis="worker",
    num_workers=2,
  )
  payloads = sorted(c.payload_bytes for c in traffic.collectives)
  assert payloads == [4] * asks + [20]


def pull_by(name):
  """An optimizer that uses what is given as `name`."""

  def update(updates, state, params=None, **given):
    del params
    own = given[name](updates) if callable(given[name]) else given[name]
    return jax.tree.map(jnp.add, updates, own), state

  return optax.GradientTransformationExtraArgs(lambda w: (), update)


@pytest.mark.parametrize(
  "behind", [optax.contrib.reduce_on_plateau(0.5, patience=1), pull_by("value")]
)
def test_step_gives_the_mean_loss_behind_a_mean(behind):
  workers = collectives.workers(2, substrate="vmap")
  optimizer = optax.chain(methods.ssgd(optax.sgd(0.1), axis="worker"), behind)

  def loss_fn(w, model_state, batch, key):
    return jnp.sum(w * batch), (model_state, {})

  step = workers.jit(training.make_step(loss_fn, optimizer, axis="worker"))
  state = training.init_state(workers, optimizer, jnp.ones(2))
  for batch in ([[1.0, 1.0], [3.0, 0.0]], [[4.0, 0.0], [-5.0, 1.0]]):
    state, metrics = step(state, jnp.array(batch))
  np.testing.assert_array_equal(state.params[0], state.params[1])
  # The loss that is reported is each worker's own.
  assert metrics["loss"][0] != metrics["loss"][1]


def searched(make, inner, axis="worker", **changed):
  """One step on targets of the worker's own, with all that Optax knows of."""
  optimizer = make(inner, axis=axis)

  def step(x):
    def loss(w):
      return jnp.sum(jnp.square(w - x))

    w = jnp.zeros(3)
    value, grad = jax.value_and_grad(loss)(w)
    given = {"value": value, "grad": grad, "value_fn": loss} | changed
    updates, _ = optimizer.update(grad, optimizer.init(w), w, **given)
    return updates

  if axis is None:
    return step(1.0)
  return jax.vmap(step, axis_name="worker")(jnp.array([1.0, 5.0]))


UPDATE_FIRST = functools.partial(transforms.update_first, max_bytes=16)


@pytest.mark.parametrize(
  ("make", "argument", "inner"),
  [
    (methods.ssgd, "value_fn", optax.lbfgs()),
    (methods.ssgd, "value_fn", pull_by("value_fn")),
    (UPDATE_FIRST, "value_fn", pull_by("value_fn")),
    (methods.ssgd, "grad", pull_by("grad")),
    (UPDATE_FIRST, "grad", pull_by("grad")),
  ],
)
def test_use_of_own_gradient_or_function_raises(make, argument, inner):
  with _refusals.refused(argument, "stays each worker's own"):
    searched(make, inner)


def test_unused_arguments_are_accepted():
  found = searched(methods.ssgd, optax.lbfgs(0.1, linesearch=None))
  np.testing.assert_array_equal(found[0], found[1])
  assert found.any()
  # Alone, and where nothing is asked of it.
  assert searched(methods.ssgd, optax.lbfgs(), axis=None).any()
  assert searched(methods.ssgd, optax.sgd(1.0), value_fn=None).any()


class _Typed(_reducers.Plain):
  """Has a state like the parameters, or none, and notes what it is given."""

  def __init__(self, kept):
    self.kept, self.seen = kept, []

  def init(self, like, axis):
    return jax.tree.map(jnp.zeros_like, like) if self.kept else ()

  def reduce(self, tree, state, key, axis):
    self.seen.append(str(tree.dtype))
    return super().reduce(tree, state, key, axis)


@pytest.mark.parametrize(
  ("kept", "params", "feedback", "sent"),
  [
    (True, True, None, "float32"), (False, True, None, "bfloat16"),
    (True, False, None, "bfloat16"),
    (False, True, reducers.ErrorFeedback(), "float32"),
  ],
)  # fmt: skip
def test_gradients_are_cast_where_a_reducer_has_a_state_of_its_own(
  kept, params, feedback, sent
):
  reducer, w = _Typed(kept), jnp.ones(2)
  compression = reducers.Compression(reducer, feedback)
  optimizer = transforms.average_gradients(None, compression)
  state, seen = optimizer.init(w), len(reducer.seen)
  g = jnp.ones(2, jnp.bfloat16)
  mean, _ = optimizer.update(g, state, w if params else None)
  assert reducer.seen[seen:] == [sent] and mean.dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["loss", "value"])
def test_optimizer_without_a_loss_is_given_none(name):
  """By one worker alone, too, as by several."""
  plain = optax.GradientTransformation(
    lambda params: (), lambda g, state, params: (-0.5 * g, state)
  )
  optimizer, w = transforms.with_mean_loss(plain, None), jnp.ones(2)
  updates, _ = optimizer.update(w, optimizer.init(w), w, **{name: jnp.ones(())})
  assert updates.tolist() == [-0.5, -0.5]
