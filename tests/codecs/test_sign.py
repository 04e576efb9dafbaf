"""Signs and ternary values match hand computations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import codecs

X = jnp.array([3.0, -1.0, 0.0, 2.0, -0.0, -6.0, 1.0, 3.0, -4.0])


def there_and_back(codec, x, key=None):
  def run(x, key):
    payload, state = codec.encode(x, (), key)
    return payload, codec.decode(payload, state, x)

  payload, found = jax.jit(run)(x, key)
  return payload, np.asarray(found)


@pytest.mark.smoke
@pytest.mark.parametrize(
  ("scale", "wanted"),
  [("mean_abs", 20 / 9), ("max_abs", 6), ("l2", np.sqrt(76 / 9)), ("one", 1)],
)
def test_signs_match_hand_computation(scale, wanted):
  payload, found = there_and_back(codecs.Sign(scale=scale), X)
  # The first byte of the short row holds eight neighbours, the next the last.
  assert payload.codes[0].tolist() == [[0b11011101, 0]]
  signs = [1, -1, 1, 1, 1, -1, 1, 1, -1]
  np.testing.assert_allclose(found, wanted * np.array(signs), 1e-6)


@pytest.mark.parametrize(
  ("scale", "wanted"),
  [
    ("mean_abs", (256 * 3 + 21) / 257),
    ("max_abs", 21),
    ("l2", np.sqrt((256 * 9 + 441) / 257)),
  ],
)
def test_one_scale_counts_every_entry_once(scale, wanted):
  """Also beyond the rows in which it is computed, of 256 entries."""
  x = jnp.full(257, 3.0).at[-1].set(-21.0)
  _, found = there_and_back(codecs.Sign(scale=scale), x)
  np.testing.assert_allclose(found, wanted * np.sign(x), 1e-6)


def test_every_block_of_signs_has_its_scale():
  payload, found = there_and_back(codecs.Sign(8), X)
  assert [s.tolist() for s in payload.scales] == [[2.0], [4.0]]
  assert found.tolist() == [2, -2, 2, 2, 2, -2, 2, 2, -4]


def test_mean_magnitude_is_the_nearest_multiple_of_the_signs():
  x = jnp.asarray(np.random.default_rng(0).normal(size=300), jnp.float32)
  errors = []
  for scale in ("mean_abs", "l2", "max_abs"):
    _, found = there_and_back(codecs.Sign(scale=scale), x)
    errors.append(np.square(found - np.asarray(x)).sum())
  assert errors == sorted(errors)
  # The documented error is ‖x‖² - ‖x‖₁² / n.
  wanted = jnp.square(x).sum() - jnp.abs(x).sum() ** 2 / x.size
  np.testing.assert_allclose(errors[0], wanted, 1e-4)


def test_ternary_values_match_hand_computation():
  x = jnp.array([2.0, -1.5, 0.5, 0.0, -2.0, 1.1])
  payload, found = there_and_back(codecs.Ternary(rounding="nearest"), x)
  # Each of five stretches has length 1, so the first byte is 2 + 3 * 0 +
  # 9 * 1 + 27 * 1 + 81 * 0, and the sixth entry has a byte of its own.
  assert payload.codes[0].tolist() == [[2 + 9 + 27, 2]]
  assert found.tolist() == [2, -2, 0, 0, -2, 2]


def test_entries_survive_with_their_share_of_the_largest():
  x = jnp.array([1.0, 0.25, -0.75, 0.0])
  codec = codecs.Ternary()
  keys = jax.random.split(jax.random.key(0), 4000)
  run = jax.jit(
    jax.vmap(lambda key: codec.decode(*codec.encode(x, (), key), x))
  )
  found = np.asarray(run(keys))
  assert set(np.unique(found)) == {-1.0, 0.0, 1.0}
  np.testing.assert_array_equal(found[:, 0], 1)
  np.testing.assert_array_equal(found[:, 3], 0)
  np.testing.assert_allclose(found.mean(0), x, atol=5 * 0.5 / np.sqrt(4000))


def test_empty_array_has_no_scale():
  for scale in ("mean_abs", "one"):
    assert codecs.Sign(scale=scale).num_bits(jnp.zeros(0)) == 0
