"""Lengths of rounds as whole numbers of steps."""

import jax.numpy as jnp
import pytest

from jdist.transforms.intervals import _policy


@pytest.mark.parametrize(
  ("steps", "wanted"),
  [(2.9, 2), (0.3, 1), (-5.0, 1), (jnp.inf, 7), (jnp.nan, 1)],
)
def test_length_is_a_whole_number_within_its_range(steps, wanted):
  assert int(_policy.whole_steps(jnp.float32(steps), 7)) == wanted
