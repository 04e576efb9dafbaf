"""Casts to 16 bits round as stated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import codecs


def test_bfloat16_rounds_ties_to_even():
  x = jnp.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20])
  payload, _ = codecs.Cast().encode(x)
  assert payload.dtype == jnp.bfloat16
  assert payload.tolist() == [1, 1, 1 + 2**-6, 1 + 2**-7]


def test_payload_may_be_bitcast_to_integers():
  codec = codecs.Cast("float16")
  x = jnp.array([0.1, -3.0, 7e4, jnp.inf])
  payload, state = codec.encode(x)
  bits = jax.lax.bitcast_convert_type(payload, jnp.uint16)
  back = jax.lax.bitcast_convert_type(bits, payload.dtype)
  np.testing.assert_array_equal(
    codec.decode(back, state, x), codec.decode(payload, state, x)
  )


@pytest.mark.parametrize(
  ("dtype", "largest"), [("float16", 65504.0), ("bfloat16", 255 * 2.0**120)]
)
def test_overflow_becomes_the_largest_number(dtype, largest):
  top = float(np.finfo(np.float32).max)
  x = jnp.array([top, -top, jnp.inf, -jnp.inf, jnp.nan])
  payload, _ = codecs.Cast(dtype).encode(x)
  found = payload.astype(jnp.float32)
  np.testing.assert_array_equal(
    found, [largest, -largest, np.inf, -np.inf, np.nan]
  )


def test_stochastic_rounding_goes_up_by_the_distance():
  codec = codecs.Cast(rounding="stochastic")
  x = jnp.array([1 + 2**-9, -(1 + 2**-9), 1.0, jnp.inf, -jnp.nan, 3.4e38])
  keys = jax.random.split(jax.random.key(0), 2000)
  run = jax.jit(jax.vmap(lambda key: codec.encode(x, (), key)[0]))
  found = np.asarray(run(keys).astype(jnp.float32))
  assert set(np.unique(found[:, 0])) == {1.0, 1 + 2.0**-7}
  up = (found[:, 0] > 1).mean(), (found[:, 1] < -1).mean()
  np.testing.assert_allclose(up, 0.25, atol=5 * np.sqrt(0.1875 / 2000))
  assert np.all(found[:, 2] == 1) and np.all(found[:, 3] == np.inf)
  assert np.all(np.isnan(found[:, 4])) and np.all(found[:, 5] < 3.4e38)


def test_nan_in_low_bits_stays_nan():
  bits = np.array([0x7F800001, 0xFF800001], np.uint32)
  x = jnp.asarray(bits.view(np.float32))
  for rounding in ("nearest", "stochastic"):
    codec = codecs.Cast(rounding=rounding)
    payload, _ = codec.encode(x, (), jax.random.key(0))
    assert np.all(np.isnan(payload.astype(jnp.float32)))


@pytest.mark.parametrize("codec", [codecs.Dense(), codecs.Cast()])
def test_linear_payloads_may_be_summed(codec):
  assert codec.linear
  xs = jnp.asarray(np.arange(12.0, dtype=np.float32).reshape(3, 4))
  total = sum(codec.encode(x)[0] for x in xs)
  np.testing.assert_array_equal(codec.decode(total, (), xs[0]), xs.sum(0))
