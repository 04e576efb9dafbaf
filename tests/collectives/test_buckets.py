"""Buckets hold every element once, in order, and of one sharding."""

import math

import chex
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from jdist import collectives
from tests.profiling import _reading

Bucket, Buckets = collectives.Bucket, collectives.Buckets
Piece = collectives.Piece


def struct(*shape, dtype="float32"):
  return jax.ShapeDtypeStruct(shape, dtype)


def pieces_of(buckets):
  return [piece for bucket in buckets.buckets for piece in bucket.pieces]


def leaves_of(buckets):
  return [[piece.leaf for piece in b.pieces] for b in buckets.buckets]


NETWORK = {
  "conv": {"bias": struct(4), "kernel": struct(3, 4)},
  "head": {"kernel": struct(4, 2, dtype="bfloat16")},
}


@pytest.mark.smoke
def test_small_network_matches_hand_computation():
  buckets = Buckets.of(NETWORK, max_bytes=40)
  assert buckets.buckets == (
    Bucket("float32", (Piece(0, 0, 4), Piece(1, 0, 6)), (0, 4), 1, 10),
    Bucket("float32", (Piece(1, 6, 12),), (0,), 1, 6),
    Bucket("bfloat16", (Piece(2, 0, 8),), (0,), 1, 8),
  )


def test_buckets_are_plain_data():
  buckets = Buckets.of(NETWORK, max_bytes=40)
  assert buckets == Buckets.of(NETWORK, max_bytes=40)
  assert hash(buckets) == hash(Buckets.of(NETWORK, max_bytes=40))
  assert buckets != Buckets.of(NETWORK, max_bytes=48)
  names = vars(collectives) | {"P": PartitionSpec}
  assert eval(repr(buckets), names) == buckets


def test_large_leaf_is_cut_into_nearly_equal_pieces():
  assert pieces_of(Buckets.of(struct(2, 5), max_bytes=16)) == [
    (0, 0, 3), (0, 3, 6), (0, 6, 10)
  ]  # fmt: skip


def paths_in(order):
  tree = {f"layer{i}": struct(2) for i in (1, 2, 10)} | {"head": struct(2)}
  buckets = Buckets.of(tree, order=order)
  return [buckets.paths[piece.leaf] for piece in pieces_of(buckets)]


def test_orders_match_hand_computation():
  # Dict keys sort alphabetically, so a key function must read the number.
  front_first = ["head", "layer1", "layer10", "layer2"]
  assert paths_in("front_first") == front_first
  assert paths_in("back_first") == front_first[::-1]
  numbered = ["layer2", "layer1", "layer10", "head"]
  for order in ((3, 1, 2, 0), [*np.array([3, 1, 2, 0])]):
    assert paths_in(order) == numbered
  assert paths_in(
    lambda path: math.inf if path == "head" else int(path.removeprefix("layer"))
  ) == ["layer1", "layer2", "layer10", "head"]


def test_small_leaf_shares_a_bucket_with_its_neighbours_only():
  """A bucket that reached ahead would wait for its last leaf."""
  tree = [struct(2), struct(20), struct(2), struct(2, dtype="int32"), struct(2)]
  assert leaves_of(Buckets.of(tree, max_bytes=80)) == [[0], [1], [2], [3], [4]]
  assert leaves_of(Buckets.of(tree, max_bytes=88)) == [[0, 1], [2], [3], [4]]


def test_without_a_limit_there_is_one_bucket_a_kind():
  tree = [struct(2), struct(20), struct(2, dtype="int32"), struct(2)]
  buckets = Buckets.of(tree)
  assert leaves_of(buckets) == [[0, 1, 3], [2]]
  assert [b.dtype for b in buckets.buckets] == ["float32", "int32"]


def test_rows_match_hand_computation():
  tree = [jnp.arange(3), jnp.arange(2)]
  (rows,) = Buckets.of(tree, num_rows=4).pack(tree)
  assert rows.tolist() == [[0, 1], [2, 0], [1, 0], [0, 0]]
  # 20 bytes need an even number of rows of at most 8 bytes.
  (rows,) = Buckets.of(tree, num_rows=2, max_row_bytes=8).pack(tree)
  assert rows.tolist() == [[0, 1], [2, 0], [1, 0], [0, 0]]


def test_pieces_and_rows_begin_at_granules():
  bucket = Bucket.of(
    [Piece(0, 0, 3), Piece(1, 0, 2)], "int32", num_rows=3, granule=2
  )
  assert (bucket.offsets, bucket.row_size) == ((0, 4), 2)
  # A row may have no element of its own.
  assert (
    Bucket.of([Piece(0, 0, 2)], "int8", num_rows=2, granule=2).row_size == 2
  )
  tree = [jnp.arange(1, 4), jnp.arange(1, 3)]
  buckets = Buckets.given(tree, [bucket])
  (rows,) = buckets.pack(tree)
  assert rows.tolist() == [[1, 2], [3, 0], [1, 2]]
  back = buckets.unpack([rows], tree)
  assert [x.tolist() for x in back] == [[1, 2, 3], [1, 2]]


def test_scalars_are_sent_and_empty_leaves_are_not():
  tree = {"a": struct(), "b": struct(0, 3), "c": struct(), "d": struct(3, 0)}
  assert leaves_of(Buckets.of(tree)) == [[0, 2]]
  assert Buckets.of({}).buckets == ()
  assert Buckets.of({"b": struct(0)}).buckets == ()


def test_leaf_that_fills_its_bucket_is_not_copied():
  buckets = Buckets.of([struct(4, 64)], num_rows=4)
  program = jax.jit(buckets.pack).lower([jnp.zeros((4, 64))]).as_text()
  assert "concatenate" not in program
  assert "stablehlo.pad" not in program


DTYPES = ("float32", "bfloat16", "int32", "uint8")
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
LEAVES = st.lists(
  st.tuples(SHAPES, st.sampled_from(DTYPES), st.sampled_from("abc")), max_size=6
)
ORDERS = st.sampled_from(["front_first", "back_first", len, str])
LIMITS = st.one_of(st.none(), st.integers(4, 200))


@st.composite
def distributed(draw):
  """A tree of nested dicts, its buckets, and the limits."""
  tree = {}
  for i, (shape, dtype, group) in enumerate(draw(LEAVES)):
    size = math.prod(shape)
    leaf = (np.arange(size) % 200 + i).astype(jnp.dtype(dtype)).reshape(shape)
    tree.setdefault(group, {})[f"leaf{i}"] = leaf
  limits = {
    "max_bytes": draw(LIMITS),
    "num_rows": draw(st.integers(1, 3)),
    "max_row_bytes": draw(LIMITS),
  }
  return tree, Buckets.of(tree, order=draw(ORDERS), **limits), limits


LAW = hypothesis.settings(max_examples=100)


@LAW
@hypothesis.given(distributed())
def test_every_element_is_sent_exactly_once(case):
  tree, buckets, _ = case
  leaves = jax.tree.leaves(tree)
  seen = [np.zeros(leaf.size, int) for leaf in leaves]
  for piece in pieces_of(buckets):
    assert piece.size > 0
    seen[piece.leaf][piece.start : piece.stop] += 1
  assert all((count == 1).all() for count in seen)


@LAW
@hypothesis.given(distributed())
def test_buckets_are_small_and_of_one_kind(case):
  tree, buckets, limits = case
  leaves = jax.tree.leaves(tree)
  for bucket in buckets.buckets:
    itemsize = jnp.dtype(bucket.dtype).itemsize
    assert {leaves[p.leaf].dtype.name for p in bucket.pieces} == {bucket.dtype}
    held = sum(p.size for p in bucket.pieces)
    assert held * itemsize <= (limits["max_bytes"] or math.inf)
    assert bucket.num_rows % limits["num_rows"] == 0
    assert bucket.row_size * itemsize <= (limits["max_row_bytes"] or math.inf)
    # No row is superfluous, and each has less than one element of padding.
    assert 0 <= bucket.num_rows * bucket.row_size - held < bucket.num_rows


@hypothesis.settings(max_examples=30)
@hypothesis.given(distributed())
def test_unpacking_restores_the_tree_to_the_bit(case):
  tree, buckets, _ = case
  buffers = buckets.pack(tree)
  for buffer, bucket in zip(buffers, buckets.buckets, strict=True):
    assert buffer.shape == (bucket.num_rows, bucket.row_size)
    assert buffer.dtype.name == bucket.dtype
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
  for example in (tree, like):
    back = buckets.unpack(buffers, example)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(back), strict=True):
      assert a.shape == b.shape and a.dtype == b.dtype
      assert a.tobytes() == np.asarray(b).tobytes()


def some_tree(rng, *lead):
  return {
    "kernel": rng.normal(size=(*lead, 5, 7)).astype(np.float32),
    "bias": rng.normal(size=(*lead, 7)).astype(np.float32),
    "scale": rng.normal(size=lead).astype(np.float32),
    "head": rng.normal(size=(*lead, 3, 2)).astype(jnp.bfloat16),
    "none": np.zeros((*lead, 0, 2), np.float32),
  }


@pytest.mark.smoke
@pytest.mark.parametrize("substrate", ["none", "vmap", "shard_map"])
def test_collectives_round_trip_on_every_substrate(substrate):
  team = collectives.workers(
    1 if substrate == "none" else 2, substrate=substrate
  )
  tree = some_tree(np.random.default_rng(0), team.num_workers)
  buckets = Buckets.of(jax.tree.map(lambda x: x[0], tree), max_bytes=60)
  assert len(buckets.buckets) > 3

  def step(tree):
    buffers = buckets.pack(tree)
    same = buckets.unpack(buffers, tree)
    # A conditional requires the types of a worker's own values, also of an
    # empty leaf.
    same = jax.lax.cond(tree["scale"] > 9, lambda: tree, lambda: same)
    mean = collectives.mean(buffers, team.axis)
    return same, buckets.unpack(mean, tree)

  same, mean = team.gather(team.jit(step)(team.place(tree)))
  chex.assert_trees_all_equal(same, tree)
  for name, x in tree.items():
    wanted = np.broadcast_to(x.astype(np.float32).mean(0), x.shape)
    np.testing.assert_allclose(
      mean[name].astype(np.float32), wanted, rtol=1e-2, atol=1e-2
    )


def test_leaves_have_the_dtypes_that_jax_gives_them():
  tree = {"a": np.arange(2.0), "b": np.arange(3)}
  buckets = Buckets.of(tree)
  assert buckets.dtypes == ("float32", "int32")
  assert [x.tolist() for x in buckets.pack(tree)] == [[[0, 1]], [[0, 1, 2]]]


def test_leaves_take_the_dtype_of_the_buffers():
  tree = {"a": jnp.array([1, 2]), "b": jnp.array(3)}
  buckets = Buckets.of(tree)
  halves = [buffer / 2 for buffer in buckets.pack(tree)]
  back = buckets.unpack(halves, tree)
  assert back["a"].tolist() == [0.5, 1.0]
  assert back["b"].dtype == jnp.float32


MESH = jax.sharding.AbstractMesh((2, 3), ("fsdp", "tensor"))


def test_leaves_that_are_split_over_other_axes_share_no_bucket():
  specs = {
    "a": PartitionSpec("fsdp"),
    "b": PartitionSpec(None, "fsdp"),
    "c": PartitionSpec(("tensor", "fsdp")),
    "d": PartitionSpec(),
    "e": PartitionSpec(None, None),
  }
  tree = {name: struct(6, 4) for name in specs}
  with jax.sharding.use_abstract_mesh(MESH):
    buckets = Buckets.of(tree, specs=specs)
  assert [b.axes for b in buckets.buckets] == [
    ("fsdp",), ("fsdp", "tensor"), ()
  ]  # fmt: skip
  assert leaves_of(buckets) == [[0, 1], [2], [3, 4]]
  # The sizes are those of one device's parts.
  assert [b.row_size for b in buckets.buckets] == [24, 4, 48]


def test_buckets_on_a_2x2_mesh_move_nothing_within_a_worker():
  mesh = collectives.make_mesh((2, 2), ("worker", "fsdp"), jax.devices()[:4])
  team = collectives.workers(2, mesh=mesh)
  specs = {
    "rows": PartitionSpec("fsdp"),
    "columns": PartitionSpec(None, "fsdp"),
    "bias": PartitionSpec(),
    "scale": PartitionSpec(),
  }
  tree = {name: np.arange(24.0) for name in specs}
  tree["rows"] = tree["columns"] = np.arange(24.0).reshape(4, 6)

  def step(tree):
    buckets = Buckets.of(tree, max_bytes=30, specs=specs)
    # Whole leaves of 96 bytes and parts of 48 are cut into at most 30 bytes.
    assert [len(b.pieces) for b in buckets.buckets] == [1] * 12
    buffers = collectives.mean(buckets.pack(tree), team.axis)
    return buckets.unpack(buffers, tree)

  placed = team.replicate(tree, specs)
  compiled = team.jit(step).lower(placed).compile()
  for kind, groups in _reading.groups(compiled.as_text()):
    assert (kind, groups) == ("all-reduce", [[0, 2], [1, 3]])
  back = team.gather(compiled(placed))
  jax.tree.map(
    lambda x, y: np.testing.assert_array_equal(x, [y, y]), back, tree
  )
