"""Questions to a state, as a loop asks them."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

from jdist import methods, profiling, transforms
from tests.transforms import _table

SGD = optax.sgd(0.1, momentum=0.9)


def test_method_without_rounds_is_always_synchronized():
  w = jnp.ones(2)
  state = methods.ssgd(SGD, axis=None).init(w)
  assert transforms.synchronized(state) is True
  assert transforms.interval(state) == 1
  assert transforms.rounds(state, 7).item() == 7
  assert transforms.anchor(state, w) is w


def test_local_steps_are_found_deep_in_a_chain():
  w = {"w": jnp.ones(2, jnp.bfloat16)}
  local = optax.inject_hyperparams(methods.diloco, ("interval",))
  optimizer = optax.MultiSteps(
    optax.chain(optax.clip(1.0), local(SGD, 5, axis=None)), 2
  )
  state = optimizer.init(w)
  assert transforms.synchronized(state).item() is True
  assert transforms.interval(state).item() == 5
  assert transforms.rounds(state, 7).item() == 0
  assert transforms.anchor(state, w)["w"].dtype == jnp.bfloat16
  # A round has twice as many updates as its clock counts.
  assert transforms.rounds_ahead(state) is None
  between = state._replace(mini_step=jnp.ones((), jnp.int32))
  assert transforms.synchronized(between).item() is False


def test_apply_updates_without_a_state_is_optax():
  params = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(3)}
  updates = {"a": jnp.full(3, 0.01), "b": jnp.full(3, 0.01)}
  with jax.numpy_dtype_promotion("standard"):  # Optax adds mixed dtypes.
    wanted = optax.apply_updates(params, updates)
  found = transforms.apply_updates(params, updates)
  chex.assert_trees_all_equal(found, wanted, strict=True)


def test_apply_updates_takes_numbers_of_python():
  assert transforms.apply_updates({"w": 1.0}, {"w": -0.5})["w"].item() == 0.5


@pytest.mark.parametrize("updates", [[], (), [None, None]])
def test_updates_of_integers_are_still_a_tree_like_the_parameters(updates):
  with pytest.raises(ValueError, match="`updates` must be a tree like"):
    transforms.apply_updates([-2], updates)


@pytest.mark.parametrize("nothing", [None, optax.MaskedNode(), jnp.zeros(2)])
def test_anything_stands_for_the_update_of_an_integer(nothing):
  params = {"n": jnp.int32(3), "w": jnp.ones(2)}
  updates = {"n": nothing, "w": jnp.ones(2)}
  found = transforms.apply_updates(params, updates)
  assert found["n"] == 3 and found["w"].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("substrate", ["vmap", "mixed"])
@pytest.mark.parametrize("name", ["local", "late outer", "msdpu"])
def test_round_ends_under_a_conditional(name, substrate):
  text = _table.runner(name, substrate).compile().as_text()
  assert " conditional(" in text
  found = profiling.read_collectives(text)
  assert all(c.conditional for c in found)
  assert bool(found) == (substrate == "mixed")
