"""Parts of a tree, each reduced for itself."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import codecs, reducers
from tests.reducers import _reducers

INT4 = reducers.compressed(codecs.Quantize(4, 4))
ROUNDS = 3


@pytest.mark.parametrize(
  "reducer", [INT4, reducers.compressed(codecs.RandomK(0.2))], ids=str
)
def test_chunk_equals_its_own_reduction(reducer):
  """Two parts of 32 entries, by hand: each has its own state and key."""
  parts = reducers.Chunked(reducer, max_bytes=128)
  x = jnp.asarray(
    np.random.default_rng(0).standard_normal((2, ROUNDS, 50)), jnp.float32
  )
  means, shares, _, _ = _reducers.run(parts, {"w": x}, 2)
  (bucket,) = parts.buckets({"w": x[0, 0]}).buckets
  assert (bucket.num_rows, bucket.row_size) == (2, 25)
  for i in range(2):

    def one(rows, i=i):
      state, out = reducer.init(rows[0], "worker"), []
      for r in range(ROUNDS):
        key = jax.random.fold_in(jax.random.key(7), r)
        reduced = parts.reduce_chunk(bucket, i, rows[r], state, key, "worker")
        state = reduced.state
        out.append(reduced[:2])
      return jax.tree.map(lambda *x: jnp.stack(x), *out)

    here = slice(25 * i, 25 * i + 25)
    mean, share = jax.jit(jax.vmap(one, axis_name="worker"))(x[:, :, here])
    np.testing.assert_allclose(means["w"][:, :, here], mean, 1e-6, 1e-6)
    np.testing.assert_allclose(shares["w"][:, :, here], share, 1e-6, 1e-6)


def test_rows_of_a_tree_of_several_dtypes_are_under_their_names():
  tree = {
    "a": jnp.arange(5.0), "b": jnp.arange(6, 9, dtype=jnp.bfloat16),
    "c": jnp.full((2, 2), 9.0),
  }  # fmt: skip
  parts = reducers.Chunked(reducers.Exact(), max_bytes=1 << 10, multiple=2)
  rows = parts.pack(tree)
  assert {name: x.dtype for name, x in rows.items()} == {
    "float32": jnp.float32, "bfloat16": jnp.bfloat16
  }  # fmt: skip
  assert rows["bfloat16"].reshape(-1)[:3].tolist() == [6.0, 7.0, 8.0]
  assert rows["float32"].shape[0] == 2 and rows["float32"].sum() == 10 + 36
  chex.assert_trees_all_equal(parts.unpack(rows, tree), tree)


@pytest.mark.parametrize("name", ["int4", "top k", "none"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_lost(name, dtype):
  """Of what went in the mean has, the workers have, and owners give out."""
  reducer = {
    "int4": INT4,
    "top k": reducers.compressed(codecs.TopK(0.2)),
    "none": reducers.Exact(),
  }[name]
  parts = reducers.Chunked(reducer, max_bytes=200, multiple=3)
  trees = _reducers.make_tree(3, ROUNDS, dtype)

  def one(trees):
    mean, share, _, first = _reducers.run_rounds(parts, trees)
    last = jax.tree.map(lambda x: x[-1], _)
    like = jax.tree.map(lambda x: x[0], trees)
    held, empty = parts.flush(last, like, "worker")
    return mean, share, held, empty, first

  mean, share, held, empty, first = jax.jit(
    jax.vmap(one, axis_name="worker")
  )(trees)  # fmt: skip
  for m, s, h, x in zip(
    *map(jax.tree.leaves, (mean, share, held, trees)), strict=True
  ):
    m, s, h, x = (np.asarray(a, np.float64) for a in (m, s, h, x))
    assert m.shape == x.shape and h.shape == x[:, 0].shape
    for worker in m[1:]:
      np.testing.assert_array_equal(worker, m[0])
    total = 3 * (m[0].sum(0) + h[0]) + (x - s).sum((0, 1))
    scale = max(np.abs(x).max(initial=0), 1)
    # A bfloat16 mean that is not encoded again is rounded; the rest is lost.
    loose = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(total, x.sum((0, 1)), 0, 9 * loose * scale)
  chex.assert_trees_all_equal(empty, first)


def test_bits_are_those_of_all_parts():
  parts = reducers.Chunked(INT4, max_bytes=128, multiple=4)
  like = {"a": jax.ShapeDtypeStruct((100,), "float32"), "b": jnp.zeros((3, 5))}
  (bucket,) = parts.buckets(like).buckets
  assert (bucket.num_rows, bucket.row_size) == (4, 29)
  assert [piece.leaf for piece in bucket.pieces] == [0, 1]
  one = INT4.num_bits(bucket.row, 2)
  assert parts.num_bits(like, 2) == tuple(4 * x for x in one)


def test_equal_chunks_are_rounded_by_numbers_of_their_own():
  """Otherwise their errors would add up, and not cancel."""
  rounding = codecs.Quantize(2, rounding="stochastic")
  parts = reducers.Chunked(reducers.compressed(rounding), multiple=2)
  tree = {"w": jnp.tile(jnp.linspace(-1, 1, 63), 2)}
  found = parts.reduce(
    tree, parts.init(tree, None), jax.random.key(0), None
  ).mean
  first, second = jnp.split(found["w"], 2)
  assert 10 < (first != second).sum() < 63


def test_tree_of_other_dtypes_than_the_state_is_refused():
  parts = reducers.Chunked(reducers.Exact(), max_bytes=64)
  state = parts.init({"w": jnp.ones(3)}, None)
  key = jax.random.key(0)
  with pytest.raises(ValueError, match="leaves of bfloat16"):
    parts.reduce({"w": jnp.ones(3, jnp.bfloat16)}, state, key, None)
