"""Arrays are packed into bytes without padding, and unpacked to the bit."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.collectives import _exchange


def make(*shape, dtype, seed=0):
  bits = np.random.default_rng(seed).integers(
    0, 256, (*shape, jnp.dtype(dtype).itemsize), np.uint8
  )
  if dtype == "bool":
    return jnp.asarray(bits[..., 0] > 127)
  return jnp.asarray(bits.view(jnp.dtype(dtype))[..., 0])


def payload(rows=()):
  return {
    "codes": make(*rows, 5, dtype="uint8"),
    "narrow": make(*rows, 3, dtype="bfloat16"),
    "scales": make(*rows, 2, 2, dtype="float32"),
    "flag": make(*rows, dtype="bool"),
    "none": make(*rows, 0, dtype="float32"),
    "index": make(*rows, 3, dtype="uint16"),
  }


def same_bits(a, b):
  chex.assert_trees_all_equal_shapes_and_dtypes(a, b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def shapes(tree, leading=0):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape[leading:], x.dtype), tree
  )


def test_small_arrays_are_one_buffer_without_padding():
  tree = payload()
  (buffer,) = jax.jit(_exchange.pack_bytes)(tree)
  assert buffer.dtype == jnp.uint8
  assert buffer.size == 5 + 6 + 16 + 1 + 0 + 6
  same_bits(_exchange.unpack_bytes([buffer], tree), tree)


def test_leading_rows_are_kept():
  tree = payload((3,))
  (buffer,) = _exchange.pack_bytes(tree, num_leading=1)
  assert buffer.shape == (3, 34)
  same_bits(_exchange.unpack_bytes([buffer], shapes(tree, 1), rows=3), tree)
  same_bits(
    _exchange.unpack_bytes([buffer[1]], shapes(tree, 1)),
    jax.tree.map(lambda x: x[1], tree),
  )


@pytest.mark.parametrize("dtype", ["uint8", "float32", "bfloat16"])
def test_large_arrays_are_sent_alone_without_a_copy(dtype):
  items = _exchange.ALONE_BYTES // jnp.dtype(dtype).itemsize
  tree = [make(3, dtype="float32"), make(2, items // 2, dtype=dtype)]
  small, large = _exchange.pack_bytes(tree)
  assert small.size == 12
  assert large.shape == (2, items // 2)
  # A collective would widen floats of 16 bits.
  assert large.dtype == {"bfloat16": "uint16"}.get(dtype, dtype)
  same_bits(_exchange.unpack_bytes([small, large], shapes(tree)), tree)
  program = jax.jit(_exchange.pack_bytes).lower(tree).as_text()
  assert f"{items}x4xui8" not in program


def test_array_is_large_by_the_bytes_of_all_its_rows():
  half = _exchange.ALONE_BYTES // 2
  tree = [make(2, half, dtype="uint8"), make(2, dtype="uint8")]
  buffers = _exchange.pack_bytes(tree, num_leading=1)
  assert [b.shape for b in buffers] == [(2, 1), (2, half)]
  same_bits(_exchange.unpack_bytes(buffers, shapes(tree, 1), rows=2), tree)
