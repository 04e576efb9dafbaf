"""Commands take the devices that are there: make the tests' eight first."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="session")
def _eight_devices():
  assert len(jax.devices()) == 8


@pytest.fixture(autouse=True)
def _standard_promotion():
  """As a user has it: Optax's schedules and optimizers mix dtypes."""
  with jax.numpy_dtype_promotion("standard"):
    yield
