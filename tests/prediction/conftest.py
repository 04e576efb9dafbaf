"""Here the time goes into compiling programs that then run once."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _compile_quickly():
  before = jax.config.read("jax_disable_most_optimizations")
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", before)
