"""A loss that reaches an optimizer behind a mean is the workers' mean."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from jdist import collectives, methods
from tests import _thinned

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
def test_workers_with_unlike_losses_stay_alike(name):
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
