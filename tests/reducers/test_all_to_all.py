"""Which leaves get a bucket of their own, share one, or are sent exactly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import codecs, reducers
from jdist.reducers import _all_to_all
from tests.reducers import _small_codecs as small


def layout_of(likes, num_rows=4, codec=None):
  """For each bucket its leaves, offsets, row size, and if it is exact."""
  codec = codec or small.Rounded(block=8)
  layout = _all_to_all.make_layout(
    likes, num_rows, codec.granule(), codec.num_bits
  )
  return [
    (tuple(p.leaf for p in b.pieces), b.offsets, b.row_size, exact)
    for b, exact in zip(layout.buckets.buckets, layout.exact, strict=True)
  ]


def structs(*shapes, dtype="float32"):
  return [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in shapes]


def test_three_ways_by_hand(monkeypatch):
  monkeypatch.setattr(_all_to_all, "_SMALL", 100)
  likes = structs((1000,), (9,), (2,), (5, 5), (33,), (1,))
  assert layout_of(likes) == [
    # 1000 in 4 rows of 32 blocks: 2.4 % of padding.
    ((0,), (0,), 256, False),
    # Begun at blocks: 9 entries take 2 blocks, 25 take 4 and 33 take 5.
    ((1, 3, 4), (0, 16, 48), 24, False),
    # 2 entries are 64 bits, and a block of them would be 96.
    ((2, 5), (0, 2), 1, True),
  ]


# With 3 rows a block each takes 3 x 96 bits, as many as 9 floats.
@pytest.mark.parametrize(("size", "exact"), [(9, True), (10, False)])
def test_group_that_saves_nothing_is_sent_exactly(size, exact):
  ((_, _, _, found),) = layout_of(structs((size,)), num_rows=3)
  assert found == exact


def test_one_scale_for_all_is_not_shared_with_neighbours():
  found = layout_of(structs((1000,), (40,), (6,)), codec=small.OneScale())
  assert [(leaves, exact) for leaves, _, _, exact in found] == [
    ((0,), False),
    ((1,), False),
    ((2,), True),
  ]


def test_dtypes_do_not_mix():
  likes = [
    jax.ShapeDtypeStruct((1,), dtype)
    for dtype in ("float32", jnp.bfloat16, "float32")
  ]
  assert [leaves for leaves, *_ in layout_of(likes, 2)] == [(1,), (0, 2)]


@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_rows_hold_every_leaf_once(num_rows):
  shapes = [(7, 43), (), (3, 3), (16,), (5,), (40,)]
  leaves = [
    jnp.arange(np.prod(shape, dtype=int), dtype=jnp.float32).reshape(shape) + i
    for i, shape in enumerate(shapes)
  ]
  found = layout_of(leaves, num_rows)
  assert sorted(i for leaves, *_ in found for i in leaves) == list(range(6))
  assert all(exact or row % 8 == 0 for _, _, row, exact in found)
  codec = small.Rounded(block=8)
  buckets = _all_to_all.make_layout(
    leaves, num_rows, 8, codec.num_bits
  ).buckets  # fmt: skip
  back = buckets.unpack(buckets.pack(leaves), leaves)
  for x, y in zip(leaves, back, strict=True):
    np.testing.assert_array_equal(x, y)


def test_flush_gathers_the_residuals_of_lossy_rows():
  reducer = reducers.compressed(codecs.Quantize(4))
  random = np.random.default_rng(0)
  x = {
    "exact": random.normal(size=(2, 1)),
    "lossy": random.normal(size=(2, 600)),
  }
  x = jax.tree.map(jnp.float32, x)

  def flushed(x):
    state = reducer.init(x, "worker")
    reduced = reducer.reduce(x, state, jax.random.key(0), "worker")
    return reduced, reducer.flush(reduced.state, x, "worker")

  reduced, (held, empty) = jax.jit(jax.vmap(flushed, axis_name="worker"))(x)
  for name in x:
    left_out = reduced.own_share[name].mean(0) - reduced.mean[name]
    np.testing.assert_allclose(held[name], left_out, atol=1e-6)
  assert jnp.abs(held["lossy"]).max() > 0.01
  assert not any(x.any() for x in jax.tree.leaves(empty))


def test_mean_of_the_own_shares_is_what_all_receive():
  """The feedback around the reducer keeps what an owner has left out."""
  reducer = reducers.compressed(
    codecs.Quantize(4, 16), owner_feedback="own_share"
  )

  def one(x):
    found = reducer.reduce(x, reducer.init(x, "w"), jax.random.key(0), "w")
    return found.mean, found.own_share

  x = jax.random.normal(jax.random.key(1), (4, 64))
  mean, shares = jax.jit(jax.vmap(one, axis_name="w"))(x)
  np.testing.assert_allclose(shares.mean(0), mean[0], atol=1e-5)


def test_owners_round_with_numbers_of_their_own():
  reducer = reducers.compressed(codecs.Quantize(4, 8, rounding="stochastic"))

  def one(x):
    return reducer.reduce(x, reducer.init(x, "w"), jax.random.key(0), "w").mean

  # The workers' own rows are exact, and both owners round the same mean, of
  # which seven entries in eight lie half-way between two integers.
  x = jnp.stack([jnp.tile(jnp.array([7.0] + [n] * 7), 8) for n in (1.0, 0.0)])
  mean = jax.jit(jax.vmap(one, axis_name="w"))(x)[0].reshape(2, 32)
  assert set(mean[:, 1:8].ravel().tolist()) == {0.0, 1.0}
  assert (mean[0] != mean[1]).any()


@pytest.mark.parametrize(
  ("draws", "num_keys"),
  # Three rows of each worker, or three that all share, and three owners.
  [("worker", 9 + 3), ("shared", 3 + 3)],
)
def test_rows_and_owners_draw_numbers_of_their_own(draws, num_keys):
  def keys(number):
    del number
    key = jax.random.key(0)
    rows = _all_to_all._row_keys(draws, key, 5, "worker")
    owner = _all_to_all._owner_key(draws, key, 5, "worker")
    return jax.random.key_data(jnp.append(rows, owner))

  found = jax.vmap(keys, axis_name="worker")(jnp.arange(3))
  assert len({tuple(x) for x in np.asarray(found).reshape(12, -1)}) == num_keys


def test_row_that_is_not_finite_leaves_no_residual():
  # Signs of magnitude 1 tell nothing of a NaN, and one of 0 is 1.
  reducer = reducers.compressed(small.Signs())

  def residual(x):
    state = reducer.init(x, "worker")
    found = reducer.reduce(x, state, jax.random.key(0), "worker")
    return found.state.residual[0]

  x = jnp.stack([jnp.ones(16), -jnp.ones(16).at[3].set(jnp.nan)])
  found = jax.jit(jax.vmap(residual, axis_name="worker"))(x)
  assert found.tolist() == [[0.0] * 8, [-1.0] * 8]


def test_owners_of_every_bucket_draw_numbers_of_their_own():
  reducer = reducers.compressed(codecs.Quantize(4, 8, rounding="stochastic"))

  def one(x):
    return reducer.reduce(x, reducer.init(x, "w"), jax.random.key(0), "w").mean

  # Equal entries in two buckets, half of them half-way between two integers.
  x = jnp.stack([jnp.tile(jnp.array([7.0] + [n] * 7), 8) for n in (1.0, 0.0)])
  both = {"a": x, "b": x.astype(jnp.bfloat16)}
  mean = jax.jit(jax.vmap(one, axis_name="w"))(both)
  assert {0.0, 1.0} < {*mean["b"][0].tolist()}
  assert mean["a"][0].tolist() != mean["b"][0].tolist()
