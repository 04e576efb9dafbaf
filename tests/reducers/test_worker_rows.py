"""Which leaves fill rows of their own, share a vector, or go exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.reducers import _worker_rows
from tests.reducers import _small_codecs as small


def cut(*shapes, num_rows=4, codec=None, dtype="float32"):
  codec = codec or small.Rounded(block=8)
  likes = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes]
  return _worker_rows.cut_leaves(
    likes, num_rows, codec.granule(), codec.num_bits
  )


def test_three_ways_by_hand():
  vectors = cut((1000,), (9,), (2,), (5, 5), (33,), (1,))
  assert [(v.way, v.leaves, v.starts, v.row) for v in vectors] == [
    # 1000 in 4 rows of 32 blocks: 2.4 % of padding.
    ("own", (0,), (0,), 256),
    # 25 take 4 blocks either way.
    ("own", (3,), (0,), 8),
    # Begun at blocks; 33 entries take 5 blocks there and 8 in rows.
    ("shared", (1, 4), (0, 16), 16),
    # 2 entries are 64 bits, and a block of them would be 96.
    ("exact", (2, 5), (0, 2), 1),
  ]


def test_a_group_that_would_grow_goes_exactly():
  (vector,) = cut((9,), num_rows=8)
  assert vector.way == "exact"


def test_one_scale_for_all_is_not_shared_with_neighbours():
  vectors = cut((1000,), (40,), (6,), codec=small.OneScale())
  assert [(v.way, v.leaves) for v in vectors] == [
    ("own", (0,)),
    ("own", (1,)),
    ("exact", (2,)),
  ]


def test_dtypes_do_not_mix():
  codec = small.Rounded(block=8)
  likes = [
    jax.ShapeDtypeStruct((1,), dtype)
    for dtype in ("float32", jnp.bfloat16, "float32")
  ]
  vectors = _worker_rows.cut_leaves(likes, 2, 8, codec.num_bits)
  assert [(v.dtype, v.leaves) for v in vectors] == [
    ("bfloat16", (1,)),
    ("float32", (0, 2)),
  ]


@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_what_is_cut_is_put_together_again(num_rows):
  shapes = [(7, 43), (), (3, 3), (16,), (5,), (40,)]
  leaves = [
    jnp.arange(np.prod(shape, dtype=int), dtype=jnp.float32).reshape(shape) + i
    for i, shape in enumerate(shapes)
  ]
  codec = small.Rounded(block=8)
  vectors = _worker_rows.cut_leaves(leaves, num_rows, 8, codec.num_bits)
  assert sorted(i for v in vectors for i in v.leaves) == list(range(6))
  out = [jnp.nan] * 6
  for vector in vectors:
    rows = vector.cut(leaves)
    assert rows.shape == (num_rows, vector.row)
    assert vector.way == "exact" or vector.row % 8 == 0
    vector.put(rows, leaves, out)
  for x, y in zip(leaves, out, strict=True):
    np.testing.assert_array_equal(x, y)


def test_a_leaf_that_fits_is_not_copied():
  (vector,) = cut((4, 64))
  program = jax.jit(lambda x: vector.cut([x])).lower(jnp.zeros((4, 64)))
  assert "concatenate" not in program.as_text()
  assert "stablehlo.pad" not in program.as_text()
