"""Modules of Equinox with dropout and state as pure functions."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jdist
from jdist import models, states, training
from tests import _refusals

_X = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)


class Dropped(eqx.Module):
  linear: eqx.nn.Linear
  dropout: eqx.nn.Dropout

  def __init__(self, key):
    self.linear = eqx.nn.Linear(4, 4, key=key)
    self.dropout = eqx.nn.Dropout(0.5)

  def __call__(self, x, *, key=None):
    return self.dropout(self.linear(x), key=key)


class Stateful(Dropped):
  """Requires a key, also in evaluation."""

  norm: eqx.nn.BatchNorm

  def __init__(self, key, mode="batch"):
    super().__init__(key)
    # The axis of the batch has any name.
    self.norm = eqx.nn.BatchNorm(4, "samples", momentum=0.9, mode=mode)

  def __call__(self, x, state, key):
    x, state = self.norm(self.linear(x), state)
    return self.dropout(x, key=key), state


class Static(Dropped):
  """Its flag is no leaf, so that `eqx.nn.inference_mode` fails on it."""

  inference: bool = eqx.field(static=True)

  def __init__(self, key):
    super().__init__(key)
    self.inference = True

  def __call__(self, x):
    return self.linear(x)


class Masked(eqx.Module):
  def __call__(self, x, mask=None):
    return x if mask is None else x * mask


def stateful(mode="batch"):
  return eqx.nn.make_with_state(Stateful)(jax.random.key(1), mode)


def test_dropout_follows_a_key_in_the_state_in_training_alone():
  module = Dropped(jax.random.key(1))
  model = models.functional(module, seed=3)
  assert states.is_key(model.state["rngs"]["key"])  # Folded by workers.
  first, state = model.apply(model.params, model.state, _X, train=True)
  key, after = jax.random.split(jax.random.key(3))
  wanted = jax.vmap(lambda x, key: module(x, key=key))(
    _X, jax.random.split(key, len(_X))
  )
  np.testing.assert_allclose(first, wanted, rtol=1e-6)
  assert (state["rngs"]["key"] == after).all()
  second, _ = model.apply(model.params, state, _X, train=True)
  assert ((first == 0) != (second == 0)).any()
  still, same = model.apply(model.params, state, _X, train=False)
  np.testing.assert_allclose(still, jax.vmap(module.linear)(_X), rtol=1e-6)
  assert same["rngs"]["key"] == state["rngs"]["key"]


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_state_is_that_of_equinox(mode):
  module, state = stateful(mode)
  model = models.functional(module, state)
  key, _ = jax.random.split(jax.random.key(0))
  keys = jax.random.split(key, len(_X))

  @eqx.filter_jit
  def call(module, state):
    return jax.vmap(
      module,
      axis_name="samples",
      in_axes=(0, None, 0),
      out_axes=(0, None),
    )(_X, state, keys)

  apply = jax.jit(model.apply, static_argnames="train")
  wanted, after = call(module, state)
  found, new = apply(model.params, model.state, _X, train=True)
  np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
  numbers = [new[str(i)] for i in range(len(new) - 1)]
  for one, other in zip(numbers, jax.tree.leaves(after), strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-6)
  wanted, _ = call(eqx.nn.inference_mode(module), after)
  found, same = apply(model.params, new, _X, train=False)
  np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
  assert jax.tree.all(jax.tree.map(lambda x, y: (x == y).all(), same, new))


def test_workers_average_statistics_and_drop_units_of_their_own():
  model = models.functional(*stateful())
  workers = jdist.workers(2, substrate="vmap")
  optimizer = jdist.local_sgd(optax.sgd(0.1), 2, axis=workers.axis)

  def loss_fn(params, state, batch, key):
    logits, state = model.apply(params, state, batch["x"], train=True)
    return jnp.square(logits).mean(), (state, {})

  step = training.make_step(loss_fn, optimizer, axis=workers.axis)
  state = training.init_state(workers, optimizer, model.params, model.state)
  first = jax.random.key_data(state.model_state["rngs"]["key"])
  assert (first[0] != first[1]).any()
  batch = {"x": np.stack([_X, 2 * _X])}
  state, _ = training.Trainer(workers, step).fit(
    state, lambda start: iter([batch] * (4 - start)), 4
  )
  counter, mean, var = (state.model_state[str(i)] for i in range(3))
  np.testing.assert_array_equal(counter, [4, 4])
  np.testing.assert_allclose(mean[0], mean[1], rtol=1e-6)
  np.testing.assert_allclose(var[0], var[1], rtol=1e-6)


class Numbers(eqx.Module):
  """Holds arrays of NumPy, which Equinox trains, and a mask."""

  scale: np.ndarray
  shift: np.float32
  mask: object
  count: np.ndarray

  def __call__(self, x):
    shown = jnp.where(jnp.isinf(self.mask), 0, x)
    return jnp.sum(shown * self.scale + self.shift * jnp.float32(self.count))


def test_arrays_of_numpy_are_trained_as_equinox_does():
  mask = np.float32([0, 0, 0, -np.inf])
  module = Numbers(_X[0], np.float32(2), jnp.asarray(mask), np.arange(4))
  for held in (module, eqx.tree_at(lambda m: m.mask, module, mask)):
    model = models.functional(held)
    grads = jax.grad(
      lambda p, model=model: model.apply(p, {}, _X, train=True)[0].sum()
    )(model.params)
    wanted = eqx.filter_grad(lambda m: jax.vmap(m)(_X).sum())(held)
    assert grads.keys() == {".scale", ".shift"}
    for name, found in grads.items():
      np.testing.assert_allclose(found, getattr(wanted, name[1:]), rtol=1e-6)


def test_mask_goes_to_each_sample_of_a_module_that_takes_it():
  model = models.functional(Masked())
  mask = np.array([1, 1, 0, 0, 0, 0], np.float32)
  found, _ = model.apply({}, {}, _X, train=True, mask=mask)
  np.testing.assert_array_equal(found, _X * mask[:, None])
  found, _ = model.apply({}, {}, _X, train=True)
  np.testing.assert_array_equal(found, _X)
  model = models.functional(*stateful())
  with _refusals.refused("mask", "not be given"):
    model.apply(model.params, model.state, _X, train=True, mask=mask)


@pytest.mark.parametrize(
  "module",
  [
    eqx.nn.MLP(4, 2, 4, 1, key=jax.random.key(0)),
    eqx.nn.Sequential([eqx.nn.Linear(4, 2, key=jax.random.key(0))]),
    Static(jax.random.key(0)),
    Masked(),
    jax.tree_util.Partial(jnp.matmul, jnp.ones((3, 4))),
    jnp.tanh,
  ],
)
def test_modules_without_state_are_taken_alone(module):
  model = models.functional(module)
  wanted = jax.vmap(module)(_X)
  for train in (True, False, np.True_):
    # A state without the key serves where no layer uses it.
    found, state = model.apply(model.params, {}, _X, train=train)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert state == {}


@_refusals.table(
  ("module", lambda: models.functional(stateful()[0]), "given `state`"),
  (
    "module",
    lambda: models.functional(lambda x, state: x, jnp.ones(1)).apply(
      {}, {"0": jnp.ones(1)}, _X, train=False
    ),
    "return logits, state",
  ),
  (
    "module",
    lambda: models.functional(lambda x: x, {}),
    "given `state`",
  ),
  (
    "state",
    lambda: models.functional(nnx.Linear(3, 2, rngs=nnx.Rngs(0)), {}),
    "None for a module of Flax",
  ),
  (
    "state",
    lambda: models.functional(linen.Dense(2).bind({}), {}),
    "None for a module of Flax",
  ),
  ("seed", lambda: models.functional(Masked(), seed=-1), "from 0"),
)
def test_wrong_arguments_raise(argument, call, rule):
  _refusals.check(argument, call, rule)
