"""Codecs carried: by hand, by keys, by bytes, and what is not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import collectives, profiling, reducers
from jdist.reducers import _all_to_all, _compressed
from jdist.transforms import _shared
from tests import _thinned
from tests.reducers import _reducers
from tests.reducers import _small_codecs as small

carry = reducers.compressed
COARSE = small.Rounded(levels=1, block=2)


def reduce_once(reducer, trees, num_workers, substrate="vmap"):
  trees = jax.tree.map(lambda x: x[:, None], trees)
  out = _reducers.run(reducer, trees, num_workers, substrate)[:3]
  return jax.tree.map(lambda x: x[:, 0], out)


# By hand.


def test_all_to_all_by_hand():
  """Two workers, a block of 2 each, codes -1, 0, 1 of the block's maximum."""
  x = jnp.asarray([[[4.0, 1.0, 8.0, 8.0]], [[2.0, 4.0, 0.0, 0.0]]])
  # Each is 4 entries; enough of them that the codec is worth it.
  x = jnp.tile(x, (1, 1, 16))
  means, shares, states, _ = _reducers.run(carry(COARSE), x, 2)
  sent = np.tile([[4.0, 0.0, 8.0, 8.0], [0.0, 4.0, 0.0, 0.0]], (1, 16))
  # 2 / 4 is half a step, and goes to the even one, zero.
  np.testing.assert_array_equal(shares[:, 0], sent)
  wanted = sent.mean(0)
  np.testing.assert_array_equal(wanted[:4], [2, 2, 4, 4])
  np.testing.assert_array_equal(means[0, 0], wanted)
  assert (states.residual[0] == 0).all()


def test_owner_keeps_what_it_left_out():
  x = jnp.tile(jnp.asarray([4.0, 1.0]), (1, 3, 16))
  means, shares, states, _ = _reducers.run(
    carry(small.Rounded(levels=2, block=2)), x, 1
  )
  # Levels of 2: 1 / 2 is half a step and goes to 0, at the worker already.
  assert shares[0, :, :2].tolist() == [[4, 0]] * 3
  assert means[0, :, :2].tolist() == [[4, 0]] * 3
  assert states.residual[0].shape == (1, 3, 32)


def test_sums_and_gathers_by_hand():
  x = jnp.asarray([[5.0, -1.0, 3.0], [1.0, 2.0, -7.0]])
  mean, share, state = reduce_once(carry(small.Whole()), x, 2)
  assert mean.tolist() == [[3.0, 0.5, -2.0]] * 2
  assert share.tolist() == x.tolist()
  assert state == ()
  mean, share, state = reduce_once(carry(small.Largest(1)), x, 2)
  assert mean.tolist() == [[2.5, 0.0, -3.5]] * 2
  assert share.tolist() == [[5.0, 0.0, 0.0], [0.0, 0.0, -7.0]]
  assert state == ()


def test_sums_go_in_the_order_of_the_workers():
  """1e8 + 1 is 1e8 in float32, so that the order is seen."""
  for reducer in (
    carry(small.Whole(), wire="all_to_all"),
    carry(small.Whole(), wire="gather"),
  ):
    x = jnp.asarray([[1e8], [1.0], [-1e8], [2.0]])
    mean, *_ = reduce_once(reducer, x, 4)
    assert mean.tolist() == [[0.5]] * 4  # ((1e8 + 1) - 1e8) + 2 = 2.
    mean, *_ = reduce_once(reducer, x[::-1], 4)
    assert mean.tolist() == [[0.0]] * 4  # ((2 - 1e8) + 1) + 1e8 = 0.


def test_sum_of_many_workers_is_a_scan():
  trees = {"w": jnp.ones((20, 1, 333)).at[3].set(21.0)}
  for reducer in (
    carry(small.Rounded()),
    carry(small.Rounded(), wire="gather"),
  ):
    means, *_ = _reducers.run(reducer, trees, 20)
    np.testing.assert_allclose(means["w"], 2.0, rtol=1e-6)


# Keys.


def test_workers_rows_and_leaves_draw_independently():
  """All that is rounded here is 0.5 of a step, up or down by a coin."""
  codec = small.Rounded(levels=1, block=64, stochastic=True)
  x = jnp.full(512, 0.5).at[::64].set(1.0)
  trees = {name: jnp.broadcast_to(x, (4, 1, 512)) for name in "ab"}
  _, shares, *_ = _reducers.run(carry(codec), trees, 4)
  coins = {
    (name, worker, row): shares[name][worker, 0, row * 128 : row * 128 + 128]
    for name in "ab"
    for worker in range(4)
    for row in range(4)
  }
  assert len({coin.tobytes() for coin in coins.values()}) == len(coins)
  total = np.mean([shares["a"].mean(), shares["b"].mean()])
  assert abs(total - x.mean()) < 0.05


def test_owners_draw_independent_numbers():
  """What workers send is exact here, and the mean is 0.5 of a step."""
  codec = small.Rounded(levels=1, block=64, stochastic=True)
  none = jnp.zeros(256).at[::64].set(1.0)
  x = jnp.stack([jnp.ones(256), none])[:, None]
  means, shares, *_ = _reducers.run(carry(codec), {"a": x, "b": x}, 2)
  np.testing.assert_array_equal(shares["a"], x)
  rows = [row for name in "ab" for row in means[name][0, 0].reshape(2, 128)]
  assert len({row.tobytes() for row in rows}) == 4


def test_shared_keys_draw_the_same_for_all_workers_and_others_for_leaves():
  x = jnp.arange(1.0, 65.0)
  trees = {name: jnp.broadcast_to(x, (3, 2, 64)) for name in "ab"}
  means, shares, *_ = _reducers.run(carry(small.Drawn(4)), trees, 3)
  for name in "ab":
    np.testing.assert_array_equal(shares[name][0], shares[name][2])
    np.testing.assert_allclose(means[name], shares[name], rtol=1e-6)
  assert (shares["a"] != shares["b"]).any()
  assert (shares["a"][:, 0] != shares["a"][:, 1]).any()  # Rounds differ.


# What is not finite.


_NOT_FINITE = {
  "exact": np.nan,
  "sum_random_k": np.inf,
  "gather": -np.inf,
  "gather_top_k": np.nan,
  "all_to_all_int4": np.inf,
  "all_to_all_stochastic": np.nan,
  "all_to_all_blind": -np.inf,
  "low_rank_int4": np.nan,
}


@pytest.mark.parametrize(
  ("name", "bad"),
  _thinned.some(
    [
      *((name, np.nan) for name in _reducers.LAWFUL),
      *((name, bad) for name, bad in _NOT_FINITE.items() if np.isinf(bad)),
    ],
    list(_NOT_FINITE.items()),
  ),
)
def test_nonfinite_values_reach_all_and_do_not_stay(name, bad):
  trees = {"w": jnp.ones((2, 3, 96)), "other": jnp.ones((2, 3, 64))}
  trees["w"] = trees["w"].at[1, 1, 70].set(bad)
  means, _, states, _ = _reducers.run(_reducers.LAWFUL[name], trees, 2)
  for worker in range(2):
    assert not np.isfinite(means["w"][worker, 1]).all()
    assert np.isfinite(means["w"][worker, 0]).all()
    assert np.isfinite(means["w"][worker, 2]).all()
    assert np.isfinite(means["other"][worker]).all()
  for x in jax.tree.leaves(states):
    assert np.isfinite(x).all()


def test_sum_that_overflows_is_seen():
  x = jnp.full((2, 64), 3e38)
  mean, _, state = reduce_once(carry(small.Rounded()), x, 2)
  assert not np.isfinite(mean).any()
  assert all((e == 0).all() for e in state.residual)


# Bytes.

LIKE = {
  "bias": jax.ShapeDtypeStruct((10,), "float32"),
  "kernel": jax.ShapeDtypeStruct((64, 33), "float32"),
  "scalar": jax.ShapeDtypeStruct((), "float32"),
  "small": jax.ShapeDtypeStruct((70,), "float32"),
}
KINDS = {
  "sum": ["all-reduce"],
  "all_to_all": ["all-to-all", "all-gather"],
  "gather": ["all-gather"],
}


def step_of(reducer, axis):
  def step(tree):
    state = reducer.init(tree, axis)
    reduced = reducer.reduce(tree, state, jax.random.key(0), axis)
    return collectives.varying(tuple(reduced), axis)

  return step


@pytest.mark.parametrize(
  ("num_workers", "name"),
  _thinned.thinned([1, 2, 5, 8], list(_reducers.LAWFUL)),
)
def test_num_bits_equals_sent_bytes(name, num_workers):
  reducer = _reducers.LAWFUL[name]
  traffic = collectives.traffic(
    step_of(reducer, "worker"), LIKE, axis="worker", num_workers=num_workers
  )
  bits = reducer.num_bits(LIKE, num_workers)
  assert traffic.bytes_per_step * 8 == pytest.approx(bits.sent)


@pytest.mark.parametrize("wire", ["sum", "all_to_all", "gather"])
def test_compiled_program_has_few_collectives_and_those_bytes(wire):
  codec = {"sum": small.Whole(), "gather": small.Largest(2)}
  reducer = carry(codec.get(wire, small.Rounded()), wire=wire)
  team = collectives.workers(4, substrate="shard_map")
  trees = jax.tree.map(lambda x: jnp.zeros((4, *x.shape)), LIKE)
  program = team.jit(step_of(reducer, team.axis)).lower(team.place(trees))
  found = profiling.read_collectives(program.compile())
  assert [c.kind for c in found] == KINDS[wire]
  sent = sum(c.wire_bytes for c in found)
  assert sent * 8 == pytest.approx(reducer.num_bits(LIKE, 4).sent)


def test_bits_by_hand():
  like = jax.ShapeDtypeStruct((64,), "float32")
  # 4 rows of 16 bytes and two scales, and a byte that says it is finite.
  bits = carry(small.Rounded()).num_bits(like, 4)
  assert bits.payload == 4 * (16 * 8 + 2 * 32 + 8)
  assert bits.sent == 2 * 3 / 4 * bits.payload
  bits = carry(small.Largest(2)).num_bits(like, 4)
  assert bits == (2 * 48 + 8, 3 * 104)
  bits = carry(small.Whole()).num_bits(like, 4)
  assert bits == (2048, 3072)


def test_large_leaf_is_sent_alone():
  like = {"w": jax.ShapeDtypeStruct((1 << 20,), "float32"), **LIKE}
  traffic = collectives.traffic(
    step_of(carry(small.Rounded()), "worker"),
    like,
    axis="worker",
    num_workers=2,
  )
  kinds = [c.kind for c in traffic.collectives]
  # Down, a row is half as large, and goes with the others.
  assert kinds == ["all-to-all", "all-to-all", "all-gather"]


# What is refused, and what is not kept.


def test_wire_follows_the_linearity_of_the_codec():
  assert carry(small.Whole()).wire == "sum"
  assert carry(small.Drawn()).wire == "sum"
  assert carry(small.Largest()).wire == "gather"
  assert isinstance(carry(small.Rounded()), _all_to_all.AllToAll)


def test_residuals_are_each_workers_own_and_absent_where_none_is_needed():
  reducer = carry(small.Rounded())
  state = reducer.init(LIKE, None)
  assert jax.tree.leaves(_shared.label_fields(state)) == [False]
  assert all(e.dtype == jnp.float32 for e in state.residual)
  assert carry(small.Rounded(), owner_feedback=False).init(LIKE, None) == ()
  assert carry(small.Largest()).init(LIKE, None) == ()
  assert carry(small.Whole(), wire="all_to_all").init({}, None) == ()


def test_tree_without_elements_sends_nothing():
  for tree in ({}, {"w": jnp.zeros((0, 3))}):
    for reducer in _reducers.LAWFUL.values():
      state = reducer.init(tree, None)
      reduced = reducer.reduce(tree, state, jax.random.key(0), None)
      assert jax.tree.structure(reduced.mean) == jax.tree.structure(tree)
      assert reducer.num_bits(tree, 4).payload == 0


def test_codes_of_a_sparse_leaf_that_is_not_finite_keep_their_integers():
  """Its values are NaN, and the positions of the others stay as they are."""
  payload = {"at": jnp.array([3, 1]), "value": jnp.array([2.0, 5.0])}
  good, bad = (
    _compressed._poisoned(payload, jnp.array(finite))
    for finite in (True, False)
  )
  assert jax.tree.map(np.ndarray.tolist, jax.tree.map(np.asarray, good)) == {
    "at": [3, 1], "value": [2.0, 5.0],
  }  # fmt: skip
  assert bad["at"].tolist() == [3, 1] and np.isnan(bad["value"]).all()
