"""Questions to a state, as a loop asks them."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import methods, profiling, transforms
from jdist.transforms import intervals
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


# Rounds of 1, 1, 3, 3, ... and of 1, 1, 1, 2, 2, 3, ... steps.
POST = intervals.post_local(2, 3)
GROWING = intervals.scheduled(lambda step: 1 + step // 3)
# The window, the offset and the interval of the first updates, by hand.
PLACES = {
  "at once": (
    {"interval": POST}, "101 101 303 313 323 303 313",
  ),
  "a round late": (
    {"interval": GROWING, "overlap": transforms.Delayed()},
    "101 101 101 202 212 202 212 303",
  ),
  "steps late": (
    {"interval": GROWING, "overlap": transforms.Delayed(steps=2)},
    "001 101 101 202 212 202 212 203 213 223 204",
  ),
  "late after a phase": (
    {"interval": 3, "overlap": transforms.Delayed(steps=1, after_step=4)},
    "-03 -13 -23 -03 -13 -23 003 113 123 103",
  ),
  "late from the first long round": (
    {
      "interval": POST, "overlap": transforms.Delayed(steps=1, after_step=None),
    },
    "-01 -01 003 113 123 103 113 123 103",
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_place_of_an_update_is_known_one_update_before(name):
  options, wanted = PLACES[name]
  optimizer = transforms.local_steps(optax.sgd(0.1), axis=None, **options)
  params = jnp.ones(2)
  state = optimizer.init(params)
  update = jax.jit(optimizer.update)
  places, known = [], None
  for _ in wanted.split():
    now, then = np.asarray(transforms.rounds_ahead(state))
    assert known is None or (now == known).all()
    window = "-" if now[0] < 0 else str(now[0])
    places.append(f"{window}{now[1]}{now[2]}")
    _, state = update(params, state, params)
    known = then
  assert " ".join(places) == wanted


@pytest.mark.parametrize(
  ("overlap", "wanted"),
  [
    (None, "202/404 212/414 404/424 414/434 424/404 434/414 404/424"),
    (
      transforms.Delayed(steps=1),
      "002/004 112/114 104/124 114/134 124/104 134/114 104/124",
    ),
  ],
)
def test_each_fragment_has_a_place_of_its_own(overlap, wanted):
  optimizer = transforms.fragment_steps(
    optax.sgd(0.1), 4, 2, axis=None, overlap=overlap
  )
  params = {"a": jnp.ones(2), "b": jnp.ones(2)}
  state = optimizer.init(params)
  update = jax.jit(optimizer.update)
  places, known = [], None
  for _ in wanted.split():
    both = np.asarray(transforms.rounds_ahead(state))
    assert known is None or (both[:, 0] == known).all()
    places.append("/".join("".join(map(str, x)) for x in both[:, 0]))
    _, state = update(params, state, params)
    known = both[:, 1]
  assert " ".join(places) == wanted
