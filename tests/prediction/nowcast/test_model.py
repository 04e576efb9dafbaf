"""Weight nowcasters: the networks and their predictions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import prediction
from jdist.prediction.nowcast import _model

NETWORKS = prediction.init_nowcasters(jax.random.key(0))
# Biases that are not zero, so that a test sees where they go.
NETWORK = jax.tree.map(
  lambda x: x + 0.1 * np.sin(np.arange(x.size)).reshape(x.shape).astype("f4"),
  NETWORKS["conv"],
)


def by_hand(params, x):
  """The sheet's formulas in NumPy, of one entry."""

  def dense(layer, x):
    return x @ np.float64(layer["kernel"]) + np.float64(layer["bias"])

  def stream(p, x):
    h = dense(p["first"], x)
    z = np.maximum(dense(p["squeeze"], h), 0)
    y = dense(p["offset"], z) + dense(p["gain"], z) * np.exp(
      dense(p["rate"], z) * h
    )
    y = dense(p["last"], y)
    return np.where(y > 0, y, 0.01 * y)

  r = x.max() - x.min() + 1e-8
  s = (x - x[0]) / (r + 1e-5) / 2
  both = [stream(params["values"], s), stream(params["steps"], np.diff(s))]
  out = np.tanh(dense(params["head"], np.concatenate(both))[0])
  return (s[4] + out) * 2 * (r + 1e-5) + x[0]


ENTRIES = jax.jit(_model.nowcast_entries)


def histories(rows, scale=1.0, seed=0):
  draw = np.random.default_rng(seed)
  return (scale * draw.normal(size=(rows, 5)).cumsum(1)).astype(np.float32)


@pytest.mark.smoke
def test_the_network_by_hand():
  x = histories(7)
  found = ENTRIES(NETWORK, x)
  wanted = [by_hand(NETWORK, np.float64(row)) for row in x]
  np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
  # Not the last value: the network says something.
  assert np.abs(found - x[:, 4]).max() > 0.1


def test_the_number_of_parameters():
  def stream(length):
    tract = 64 * 8 + 8 + 3 * (8 * 64 + 64)
    return length * 64 + 64 + tract + 64 * 32 + 32

  for network in NETWORKS.values():
    sizes = [x.size for x in jax.tree.leaves(network)]
    assert sum(sizes) == stream(5) + stream(4) + 2 * 32 + 1 == 9425


def test_the_normalization_does_not_see_where_and_how_large():
  # Up to the 1e-5 beside the spread, and the rounding of the shift.
  x = histories(50)
  scaled, _ = _model.normalize(jnp.asarray(x))
  moved, _ = _model.normalize(jnp.asarray(64 * x + 3))
  np.testing.assert_allclose(moved, scaled, atol=1e-4)
  assert float(jnp.abs(scaled).max()) <= 0.5
  found, alike = ENTRIES(NETWORK, 64 * x + 3), ENTRIES(NETWORK, x)
  np.testing.assert_allclose(found, 64 * alike + 3, rtol=1e-3, atol=0.02)


@pytest.mark.parametrize("value", [0.0, -3.0, 1e-30, 1e30])
def test_what_does_not_move_is_predicted_to_stay(value):
  found = ENTRIES(NETWORK, jnp.full((2, 5), value))
  np.testing.assert_allclose(found, value, rtol=1e-6, atol=2.1e-5)


def test_a_steep_network_does_not_overflow():
  wild = jax.tree.map(lambda x: 1e4 * x, NETWORK)
  x = histories(200)
  found = ENTRIES(wild, x)
  assert jnp.isfinite(found).all()
  # But nothing hides a NaN that was there before.
  x[0, 2] = np.nan
  found = ENTRIES(NETWORK, x)
  assert jnp.isnan(found[0]) and jnp.isfinite(found[1:]).all()


def test_every_kind_has_its_network(monkeypatch):
  tree = {
    "conv": jnp.asarray(histories(18).T.reshape(5, 3, 3, 1, 2)),
    "dense": jnp.asarray(histories(6).T.reshape(5, 2, 3)),
    "bias": jnp.asarray(histories(4).T),
    "scalar": jnp.asarray(histories(1)[0]),
  }
  found = jax.jit(prediction.nowcast)(tree, NETWORKS)
  for name, leaf in found.items():
    kind = "bias" if name == "scalar" else name
    wanted = ENTRIES(NETWORKS[kind], jnp.moveaxis(tree[name], 0, -1))
    np.testing.assert_allclose(leaf, wanted, 1e-5, 1e-6)
  # In parts, which do not divide evenly.
  monkeypatch.setattr(_model, "_CHUNK", 5)
  parts = jax.jit(lambda *x: prediction.nowcast(*x))(tree, NETWORKS)
  for name, leaf in parts.items():
    np.testing.assert_allclose(leaf, found[name], 1e-5, 1e-6)
  # Without a network of its kind a leaf stays.
  still = prediction.nowcast({"conv": tree["conv"]}, {"dense": NETWORK})
  np.testing.assert_array_equal(still["conv"], tree["conv"][4])
