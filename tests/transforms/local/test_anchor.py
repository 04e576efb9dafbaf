"""Arithmetic that rounds alike in every program."""

import jax
import jax.numpy as jnp
import numpy as np

from jdist import transforms
from jdist.transforms.local import _anchor
from tests import _refusals

# Those of users' programs; the tests' own are optimized less.
_OPTIMIZED = {"xla_backend_optimization_level": 3}


def test_a_product_is_rounded_before_it_is_subtracted_from():
  random = np.random.default_rng(0)
  a, p = random.standard_normal((2, 1000)).astype(np.float32)
  a[:3], p[1:5] = 0, (np.inf, np.nan, 0, -0.0)
  k = np.float32(0.7)

  def left(a, p, k):
    return a - _anchor.rounded(k * p)

  compiled = jax.jit(left).lower(a, p, k).compile(compiler_options=_OPTIMIZED)
  np.testing.assert_array_equal(compiled(a, p, k), a - k * p)


def test_updates_of_another_form_are_refused():
  params = {"a": jnp.ones(2)}
  for updates in ({"b": jnp.ones(2)}, {"a": jnp.ones(3)}):
    with _refusals.refused("updates", "a"):
      transforms.apply_updates(params, updates)
