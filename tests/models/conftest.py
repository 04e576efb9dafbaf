"""Compilation without optimizations, as most programs here run once."""

import contextlib

import jax
import pytest


@contextlib.contextmanager
def _optimizations(disabled):
  before = jax.config.read("jax_disable_most_optimizations")
  jax.config.update("jax_disable_most_optimizations", disabled)
  try:
    yield
  finally:
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True)
def _compile_quickly():
  with _optimizations(disabled=True):
    yield


@pytest.fixture
def optimized():
  """A context for programs that run often enough to be worth it."""
  return lambda: _optimizations(disabled=False)
