"""Plans: every element once, in order, never across a sharding."""

import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jdist import collectives
from tests.profiling import _reading

Piece = collectives.Piece
Message = collectives.Message


def struct(*shape, dtype="float32"):
  return jax.ShapeDtypeStruct(shape, dtype)


def pieces_of(plan):
  return [piece for message in plan.messages for piece in message.pieces]


# By hand.

NETWORK = {
  "conv": {"bias": struct(4), "kernel": struct(3, 4)},
  "head": {"kernel": struct(4, 2, dtype="bfloat16")},
}


@pytest.mark.smoke
def test_a_small_network_by_hand():
  plan = collectives.plan(NETWORK, max_bytes=40, credit=2)
  assert plan.messages == (
    Message((Piece(0, "conv/bias", (0,), (4,), 16),
             Piece(1, "conv/kernel", (0, 0), (1, 4), 16))),
    Message((Piece(1, "conv/kernel", (1, 0), (3, 4), 32),)),
    Message((Piece(2, "head/kernel", (0, 0), (4, 2), 16),)),
  )  # fmt: skip
  assert [message.num_bytes for message in plan.messages] == [32, 32, 16]
  assert plan.num_bytes == 80
  assert [plan.waits_for(i) for i in range(3)] == [None, None, 0]
  assert plan.oversized == ()


def test_a_plan_can_be_read():
  plan = collectives.plan(NETWORK, max_bytes=40, credit=2)
  assert str(plan).splitlines() == [
    "3 messages, 80 bytes, at most 2 in flight",
    "    # after         bytes  pieces",
    "    0     -            32  conv/bias + conv/kernel[0:1, 0:4]",
    "    1     -            32  conv/kernel[1:3, 0:4]",
    "    2     0            16  head/kernel",
  ]


def test_a_message_of_many_pieces_is_read_on_several_lines():
  tree = {f"layer{i}": {"bias": struct(2)} for i in range(9)}
  lines = str(collectives.plan(tree)).splitlines()
  assert lines == [
    "1 message, 72 bytes, at most 4 in flight",
    "    # after         bytes  pieces",
    "    0     -            72  layer0/bias + layer1/bias + layer2/bias +",
    "                           layer3/bias + layer4/bias + layer5/bias +",
    "                           layer6/bias + layer7/bias + layer8/bias",
  ]


def test_a_plan_is_plain_data():
  plan = collectives.plan(NETWORK, max_bytes=40)
  assert plan == collectives.plan(NETWORK, max_bytes=40)
  assert hash(plan) == hash(collectives.plan(NETWORK, max_bytes=40))
  assert plan != collectives.plan(NETWORK, max_bytes=48)
  assert eval(repr(plan), vars(collectives)) == plan


def test_rows_are_cut_first_then_within_a_row():
  plan = collectives.plan(struct(3, 4), max_bytes=32)  # A row is 16 bytes.
  assert [str(piece) for piece in pieces_of(plan)] == [
    "(array)[0:1, 0:4]",
    "(array)[1:3, 0:4]",
  ]
  plan = collectives.plan(struct(2, 4), max_bytes=8)
  assert [str(piece) for piece in pieces_of(plan)] == [
    "(array)[0:1, 0:2]",
    "(array)[0:1, 2:4]",
    "(array)[1:2, 0:2]",
    "(array)[1:2, 2:4]",
  ]


def test_sub_tensors_travel_one_by_one():
  plan = collectives.plan(NETWORK, max_bytes=40, join=False)
  assert [len(message.pieces) for message in plan.messages] == [1] * 4


def paths_in(order):
  tree = {f"layer{i}": struct(2) for i in (1, 2, 10)} | {"head": struct(2)}
  plan = collectives.plan(tree, order=order, join=False)
  return [piece.path for piece in pieces_of(plan)]


def test_orders_by_hand():
  # Dict keys sort alphabetically; the number must be read to sort by layer.
  front_first = ["head", "layer1", "layer10", "layer2"]
  assert paths_in("front_first") == front_first
  assert paths_in("back_first") == front_first[::-1]
  assert paths_in(
    lambda path: math.inf if path == "head" else int(path.removeprefix("layer"))
  ) == ["layer1", "layer2", "layer10", "head"]


def test_a_small_leaf_joins_its_neighbours_and_no_farther_one():
  """A message that reached ahead would wait for its last leaf."""
  tree = [struct(2), struct(20), struct(2), struct(2, dtype="int32"), struct(2)]
  plan = collectives.plan(tree, max_bytes=80)
  assert [[p.leaf for p in m.pieces] for m in plan.messages] == [
    [0],
    [1],
    [2],
    [3],
    [4],
  ]
  plan = collectives.plan(tree, max_bytes=88)
  assert [[p.leaf for p in m.pieces] for m in plan.messages] == [
    [0, 1],
    [2],
    [3],
    [4],
  ]


def test_scalars_travel_and_empty_leaves_need_not():
  tree = {"a": struct(), "b": struct(0, 3), "c": struct(), "d": struct(3, 0)}
  plan = collectives.plan(tree)
  assert plan.messages == (
    Message((Piece(0, "a", (), (), 4), Piece(2, "c", (), (), 4))),
  )
  assert collectives.plan({}).messages == ()
  assert collectives.plan({"b": struct(0)}).messages == ()


def test_a_sharded_leaf_is_neither_joined_nor_cut_where_it_is_sharded():
  tree = {name: struct(4, 6) for name in "abcd"} | {"e": struct(2)}
  shardings = {
    "a": PartitionSpec("fsdp"),
    "b": PartitionSpec(None, "fsdp"),
    "c": PartitionSpec("fsdp", "fsdp2"),
    "d": None,
    "e": PartitionSpec(),
  }
  plan = collectives.plan(tree, max_bytes=30, shardings=shardings)
  assert [
    [str(piece) for piece in message.pieces] for message in plan.messages
  ] == [
    ["a[0:4, 0:1]"],
    ["a[0:4, 1:2]"],
    ["a[0:4, 2:3]"],
    ["a[0:4, 3:4]"],
    ["a[0:4, 4:5]"],
    ["a[0:4, 5:6]"],
    ["b[0:1, 0:6]"],
    ["b[1:2, 0:6]"],
    ["b[2:3, 0:6]"],
    ["b[3:4, 0:6]"],
    ["c[0:4, 0:6]"],
    ["d[0:1, 0:6]"],
    ["d[1:2, 0:6]"],
    ["d[2:3, 0:6]"],
    ["d[3:4, 0:6]"],
    ["e[0:2]"],
  ]
  # The one that no allowed cut makes small enough is there to be seen.
  assert plan.oversized == (10,)
  lines = str(plan).splitlines()
  assert lines[2 + 10].split() == ["10", "6", "96!", "c"]
  assert lines[-1].startswith("! larger than 30 bytes")


def test_a_mesh_axis_of_one_device_does_not_shard():
  tree = {"a": struct(2), "b": struct(2)}
  for size, messages in ((1, 1), (2, 2)):
    mesh = jax.sharding.AbstractMesh((size,), ("fsdp",))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    plan = collectives.plan(tree, shardings=sharding)
    assert len(plan.messages) == messages


def test_the_defaults_are_four_mebibytes_and_four_in_flight():
  plan = collectives.plan({"a": struct(1024, 1024), "b": struct(1025, 1024)})
  assert [m.num_bytes for m in plan.messages] == [2**22, 2**21, 2**21 + 2**12]
  assert plan.credit == 4


# The laws.

DTYPES = ("float32", "bfloat16", "int32", "uint8")
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
LEAVES = st.lists(
  st.tuples(SHAPES, st.sampled_from(DTYPES), st.sampled_from("abc")), max_size=6
)
ORDERS = st.sampled_from(["front_first", "back_first", len, str])


@st.composite
def planned(draw):
  """A tree of nested dicts, a plan for it, and how its leaves are sharded."""
  tree, shardings = {}, {}
  for i, (shape, dtype, group) in enumerate(draw(LEAVES)):
    size = math.prod(shape)
    leaf = (np.arange(size) % 200 + i).astype(jnp.dtype(dtype)).reshape(shape)
    split = draw(st.lists(st.sampled_from([None, None, "fsdp"]), max_size=3))
    tree.setdefault(group, {})[f"leaf{i}"] = leaf
    shardings.setdefault(group, {})[f"leaf{i}"] = draw(
      st.sampled_from([None, PartitionSpec(*split[: len(shape)])])
    )
  plan = collectives.plan(
    tree,
    max_bytes=draw(st.integers(4, 200)),
    order=draw(ORDERS),
    join=draw(st.booleans()),
    credit=draw(st.integers(1, 4)),
    shardings=shardings,
  )
  specs = jax.tree.leaves(shardings, is_leaf=lambda x: x is None)
  return tree, plan, [tuple(spec or ()) for spec in specs]


LAW = hypothesis.settings(max_examples=100)


@LAW
@hypothesis.given(planned())
def test_every_element_travels_exactly_once(case):
  tree, plan, _ = case
  leaves = jax.tree.leaves(tree)
  seen = [np.zeros(leaf.shape, int) for leaf in leaves]
  for piece in pieces_of(plan):
    box = tuple(slice(*side) for side in zip(piece.start, piece.stop))  # noqa: B905
    seen[piece.leaf][box] += 1
    assert piece.num_bytes == leaves[piece.leaf][box].nbytes > 0
  assert all((count == 1).all() for count in seen)
  assert plan.num_bytes == sum(leaf.nbytes for leaf in leaves)


@LAW
@hypothesis.given(planned())
def test_messages_are_small_and_of_one_kind(case):
  tree, plan, specs = case
  leaves = jax.tree.leaves(tree)
  for i, message in enumerate(plan.messages):
    if len(message.pieces) > 1:
      assert message.num_bytes <= plan.max_bytes
      assert len({leaves[p.leaf].dtype for p in message.pieces}) == 1
      assert not any(any(specs[p.leaf]) for p in message.pieces)
    for piece in message.pieces:
      for dim, name in enumerate(specs[piece.leaf]):
        if name:  # Never cut.
          assert piece.shape[dim] == leaves[piece.leaf].shape[dim]
    (first, *_) = message.pieces
    if i in plan.oversized:  # Only what sharding forbids to cut.
      uncut = [
        length == 1 or (dim < len(specs[first.leaf]) and specs[first.leaf][dim])
        for dim, length in enumerate(first.shape)
      ]
      assert all(uncut)
    else:
      assert message.num_bytes <= plan.max_bytes


@LAW
@hypothesis.given(planned())
def test_at_most_credit_messages_are_in_flight(case):
  _, plan, _ = case
  finished = set()
  for i in range(len(plan.messages)):
    before = plan.waits_for(i)
    if before is not None:  # They finish in any order; this one must have.
      finished.add(before)
      assert before < i
    assert len(set(range(i + 1)) - finished) <= plan.credit


@hypothesis.settings(max_examples=60)
@hypothesis.given(planned())
def test_unpacking_gives_the_tree_back_to_the_bit(case):
  tree, plan, _ = case
  buffers = collectives.pack(plan, tree)
  assert [b.nbytes for b in buffers] == [m.num_bytes for m in plan.messages]
  like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
  for example in (tree, like):
    back = collectives.unpack(plan, buffers, example)
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
def test_a_round_trip_on_every_substrate(substrate):
  team = collectives.workers(
    1 if substrate == "none" else 2, substrate=substrate
  )
  tree = some_tree(np.random.default_rng(0), team.num_workers)
  plan = collectives.plan(jax.tree.map(lambda x: x[0], tree), max_bytes=60)
  assert len(plan.messages) > 3

  def step(tree):
    buffers = collectives.pack(plan, tree)
    same = collectives.unpack(plan, buffers, tree)
    # It meets the worker's own values in a conditional, empty leaf included.
    same = jax.lax.cond(tree["scale"] > 9, lambda: tree, lambda: same)
    mean = collectives.mean(buffers, team.axis)
    return same, collectives.unpack(plan, mean, tree)

  same, mean = team.gather(team.jit(step)(team.place(tree)))
  jax.tree.map(np.testing.assert_array_equal, same, tree)
  for name, x in tree.items():
    wanted = np.broadcast_to(x.astype(np.float32).mean(0), x.shape)
    np.testing.assert_allclose(
      mean[name].astype(np.float32), wanted, rtol=1e-2, atol=1e-2
    )


def test_leaves_take_the_dtype_of_the_buffers():
  tree = {"a": jnp.array([1, 2]), "b": jnp.array(3)}
  plan = collectives.plan(tree)
  halves = [buffer / 2 for buffer in collectives.pack(plan, tree)]
  back = collectives.unpack(plan, halves, tree)
  assert back["a"].tolist() == [0.5, 1.0]
  assert back["b"].dtype == jnp.float32


def test_a_plan_on_a_2x2_mesh_moves_nothing_within_a_worker():
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
  plan = collectives.plan(tree, max_bytes=60, shardings=specs)
  assert [len(m.pieces) for m in plan.messages] == [1] * 8

  def step(tree):
    buffers = collectives.pack(plan, tree)
    buffers = collectives.mean(buffers, team.axis)
    return collectives.unpack(plan, buffers, tree)

  placed = team.replicate(tree, specs)
  compiled = team.jit(step).lower(placed).compile()
  for kind, groups in _reading.groups(compiled.as_text()):
    assert (kind, groups) == ("all-reduce", [[0, 2], [1, 3]])
  back = team.gather(compiled(placed))
  jax.tree.map(
    lambda x, y: np.testing.assert_array_equal(x, [y, y]), back, tree
  )


# What is refused.


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"max_bytes": 0}, r"`max_bytes` must be an integer >= 1, got 0"),
    ({"max_bytes": 1.5}, r"`max_bytes` must be an integer >= 1, got 1\.5"),
    ({"max_bytes": True}, r"`max_bytes` must be an integer >= 1, got True"),
    (
      {"max_bytes": 3},
      r"`max_bytes` must hold .* got 3 for float32",
    ),
    ({"credit": 0}, r"`credit` must be an integer >= 1, got 0"),
    ({"order": "random"}, r"`order` must be 'front_first', .* got 'random'"),
    (
      {"order": {"a": 0, "b": "one"}.get},
      r"`order` must give keys that can be compared .* got \[0, 'one'\]",
    ),
    ({"shardings": {"a": None}}, "`shardings` must be None, one sharding, or"),
    (
      {"shardings": {"a": None, "b": "fsdp"}},
      "`shardings` must hold PartitionSpec, .* got str at 'b'",
    ),
    (
      {"shardings": PartitionSpec("worker", None)},
      "`shardings` must have at most .* at 'a'. Leave out the axis of workers",
    ),
  ],
)
def test_bad_arguments_are_refused(arguments, message):
  tree = {"a": struct(2), "b": struct(2)}
  with pytest.raises(ValueError, match=message):
    collectives.plan(tree, **arguments)


def test_what_is_no_array_is_refused():
  with pytest.raises(ValueError, match="got float at 'a/0'"):
    collectives.plan({"a": [1.0]})
  with pytest.raises(ValueError, match="got dtype key<fry> at 'key'"):
    collectives.plan({"key": jax.random.key(0)})


def test_a_message_that_is_not_there_is_refused():
  plan = collectives.plan([struct(2)])
  for i in (-1, 1):
    with pytest.raises(ValueError, match=f"one of the 1 messages, got {i}"):
      plan.waits_for(i)


def test_another_tree_than_the_planned_one_is_refused():
  tree = {"a": jnp.ones(2), "b": jnp.ones((2, 3))}
  plan = collectives.plan(tree)
  buffers = collectives.pack(plan, tree)
  with pytest.raises(ValueError, match=r"leaf 1 was planned as \(2, 3\), got"):
    collectives.pack(plan, {"a": jnp.ones(2), "b": jnp.ones((3, 2))})
  with pytest.raises(ValueError, match=r"leaf 1 was planned as .* no leaf"):
    collectives.pack(plan, {"a": jnp.ones(2)})
  with pytest.raises(ValueError, match="`tree` must have the dtypes"):
    collectives.pack(plan, {"a": jnp.ones(2), "b": jnp.ones((2, 3), "int32")})
  with pytest.raises(ValueError, match="`like` must have the shapes"):
    collectives.unpack(plan, buffers, {"a": jnp.ones(2), "b": jnp.ones(6)})
  with pytest.raises(ValueError, match=r"`buffers` must be one for each .* 1 "):
    collectives.unpack(plan, buffers * 2, tree)
  with pytest.raises(ValueError, match=r"message 0 has shape \(8,\), got \(4,"):
    collectives.unpack(plan, [buffers[0][:4]], tree)
