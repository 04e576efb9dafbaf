"""Rates that fall with the delay."""

import chex
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdist import transforms

UPDATES = {"a": jnp.array([1.0, 2.0]), "b": jnp.array(3.0)}


def factors(fix, steps):
  state = fix.init(UPDATES)
  for _ in range(steps):
    updates, state = fix.update(UPDATES, state)
    yield updates["b"] / 3.0


def test_the_power_fades_as_pipemare_has_it():
  fix = transforms.scale_by_delay(9.0, anneal_steps=4)
  wanted = [9.0 ** -(1 - min(t / 4, 1)) for t in range(6)]
  np.testing.assert_allclose(list(factors(fix, 6)), wanted, rtol=1e-6)


def test_without_annealing_it_stays_and_an_offset_counts():
  fix = transforms.scale_by_delay(3, offset=1)
  np.testing.assert_allclose(list(factors(fix, 3)), [0.25] * 3, rtol=1e-6)
  root = transforms.scale_by_delay(4, 0.5)
  np.testing.assert_allclose(list(factors(root, 1)), [0.5], rtol=1e-6)


def test_each_leaf_has_the_rate_of_its_delay():
  fix = transforms.scale_by_delay({"a": 2, "b": 0.5})
  updates, _ = fix.update(UPDATES, fix.init(UPDATES))
  # A delay below one does not raise a rate.
  chex.assert_trees_all_equal(
    updates, {"a": UPDATES["a"] / 2, "b": UPDATES["b"]}
  )


@pytest.mark.parametrize("fix", [(0,), (1,), (5, 0.0)], ids=str)
def test_no_delay_and_no_power_leave_the_bits(fix):
  fix = transforms.scale_by_delay(*fix)
  updates, _ = fix.update(UPDATES, fix.init(UPDATES))
  chex.assert_trees_all_equal(updates, UPDATES)


def test_it_makes_a_rate_stable_that_the_delay_is_not():
  # 0.6 is above 2 sin(pi / 14) = 0.445, the bound of delay 3; a third is below.
  for chain, converges in (
    (optax.sgd(0.6), False),
    (optax.chain(optax.sgd(0.6), transforms.scale_by_delay(3)), True),
  ):
    optimizer = transforms.delay_gradients(chain, 3)
    w = jnp.array(1.0)
    state = optimizer.init(w)
    for _ in range(60):
      updates, state = optimizer.update(w, state, w)
      w = optax.apply_updates(w, updates)
    assert (abs(w) < 0.01) == converges


@pytest.mark.parametrize(
  ("change", "words"),
  [
    ({"delays": -1}, r"`delays` must be in \[0, inf\], got -1"),
    ({"delays": None}, "`delays` must be a number"),
    ({"delays": {}}, "`delays` must be a number"),
    ({"power": -0.5}, r"`power` must be in \[0, inf\], got -0.5"),
    ({"anneal_steps": 0}, r"`anneal_steps` must be in \(0, inf\], got 0"),
    ({"offset": -1}, r"`offset` must be in \[0, inf\], got -1"),
  ],
)
def test_what_is_out_of_range_is_refused(change, words):
  with pytest.raises(ValueError, match=words):
    transforms.scale_by_delay(**({"delays": 1} | change))


def test_delays_of_other_parameters_are_refused():
  fix = transforms.scale_by_delay({"other": 1})
  with pytest.raises(ValueError, match="`delays` must be a number, or a tree"):
    fix.update(UPDATES, fix.init(UPDATES))
