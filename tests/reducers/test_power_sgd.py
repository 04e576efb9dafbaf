"""PowerSGD: step by step as NumPy does it, and never more than two sums."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import codecs, collectives, profiling, reducers
from jdist.reducers import _power_sgd
from jdist.transforms import _shared
from tests.reducers import _reducers

N = 4
SHAPES = {
  "conv": (3, 3, 2, 10),
  "dense": (20, 12),
  "bias": (10,),
  "tiny": (2, 3),
}


def make(rounds, seed=0):
  rng = np.random.default_rng(seed)
  return {
    name: jnp.asarray(rng.standard_normal((N, rounds, *shape)), jnp.float32)
    for name, shape in SHAPES.items()
  }


def reference(matrices, q):
  """Vogels et al. 2019, algorithm 1, by projection and in float64."""
  p, _ = np.linalg.qr(sum(m @ q for m in matrices) / len(matrices))
  own = [m.T @ p for m in matrices]
  q = sum(own) / len(own)
  return p @ q.T, [p @ x.T for x in own], q


def test_rounds_agree_with_a_reference():
  rounds = 3
  trees = make(rounds)
  reducer = reducers.PowerSGD(rank=2)
  means, shares, _, first = _reducers.run(reducer, trees, N)
  for name, q in zip(("conv", "dense"), first.q, strict=True):
    q = np.asarray(q[0], np.float64)
    for r in range(rounds):
      x = np.asarray(trees[name][:, r], np.float64)
      mean, own, q = reference(x.reshape(N, -1, x.shape[-1]), q)
      shape = x.shape[1:]
      np.testing.assert_allclose(
        means[name][2, r], mean.reshape(shape), atol=2e-5
      )
      for i in range(N):
        np.testing.assert_allclose(
          shares[name][i, r], own[i].reshape(shape), atol=2e-5
        )
  for name in ("bias", "tiny"):  # Exactly: they would grow.
    np.testing.assert_allclose(
      means[name][0], trees[name].mean(0), rtol=1e-5, atol=1e-6
    )


def test_low_rank_matrix_is_reduced_exactly():
  rng = np.random.default_rng(0)
  x = rng.standard_normal((20, 2)) @ rng.standard_normal((2, 12))
  trees = {"w": jnp.asarray(np.broadcast_to(x, (N, 1, 20, 12)), jnp.float32)}
  means, *_ = _reducers.run(reducers.PowerSGD(rank=2), trees, N)
  np.testing.assert_allclose(means["w"][0, 0], x, atol=1e-5)


def test_zeros_and_nan_do_not_stay():
  trees = {
    "dense": jnp.ones((2, 4, 20, 12)).at[1, 0, 3, 3].set(jnp.nan)
    .at[:, 1].set(0.0)
  }  # fmt: skip
  means, _, states, _ = _reducers.run(reducers.PowerSGD(rank=1), trees, 2)
  assert np.isnan(means["dense"][:, 0]).all()
  assert (means["dense"][:, 1] == 0).all()
  assert all(np.isfinite(q).all() for q in states.q)
  np.testing.assert_allclose(means["dense"][:, 3], 1, atol=1e-5)


# The first product is finite and the second one is not, or already the first.
@pytest.mark.parametrize("entry", [1e-3, 1.0])
def test_direction_that_overflows_is_not_kept(entry):
  """A later round finds its mean again."""
  q = jnp.full((12, 1), entry)
  reduced = reducers.PowerSGD(1).reduce(
    [jnp.full((20, 12), 3e38)],
    _power_sgd.PowerSGDState((q,)),
    jax.random.key(0),
    None,
  )
  assert not jnp.isfinite(reduced.mean[0]).any()
  np.testing.assert_array_equal(reduced.state.q[0], q)


def test_matrices_begin_in_directions_of_their_own():
  like = [jax.ShapeDtypeStruct((20, 12), "float32")] * 2
  first, second = reducers.PowerSGD(2).init(like, None).q
  assert (first != second).all()


def test_factors_are_sent_with_keys_of_their_own():
  keys = []

  class Noted(reducers.Exact):
    def reduce(self, tree, state, key, axis):
      keys.append(jax.random.key_data(key).tolist())
      return super().reduce(tree, state, key, axis)

  reducer, x = reducers.PowerSGD(1, factors=Noted()), [jnp.ones((20, 12))]
  reducer.reduce(x, reducer.init(x, None), jax.random.key(0), None)
  assert len(keys) == 2 and keys[0] != keys[1]


def test_nan_does_not_affect_other_leaves():
  """Nor from other workers: what they wanted to send stays theirs."""
  int8 = reducers.compressed(codecs.Quantize(8), owner_feedback="own_share")
  trees = {
    "b": jnp.ones((2, 1, 9)).at[1, 0, 2].set(jnp.nan),
    "dense": jnp.ones((2, 1, 20, 12)),
  }
  for factors in (None, int8):
    reducer = reducers.PowerSGD(2, factors=factors)
    means, shares, states, _ = _reducers.run(reducer, trees, 2)
    assert np.isnan(means["b"]).any()
    # In one block with the vector all directions are lost, with a warning.
    assert np.isnan(means["dense"]).all() == (factors is not None)
    if factors is not None:
      np.testing.assert_array_equal(shares["dense"], 0.0)
    assert all(np.isfinite(q).all() for q in states.q)


def test_factors_may_go_by_leaf_or_in_parts():
  """Their states are empty, but not every one is a `()`."""
  int8 = reducers.compressed(codecs.Quantize(8), owner_feedback="own_share")
  trees = make(1)
  plain, *_ = _reducers.run(reducers.PowerSGD(2), trees, N)
  for factors in (
    reducers.PerLeaf((reducers.Rule(int8, min_ndim=2),)),
    reducers.Chunked(int8),
  ):
    means, *_ = _reducers.run(reducers.PowerSGD(2, 0, factors), trees, N)
    chex.assert_trees_all_close(means, plain, rtol=1e-7, atol=0.2)


def compiled(reducer):
  """The collectives of a program that reduces, and what it reduces."""
  team = collectives.workers(N, substrate="shard_map")
  trees = jax.tree.map(lambda x: x[:, 0], make(1))

  def step(tree):
    state = reducer.init(tree, team.axis)
    reduced = reducer.reduce(tree, state, jax.random.key(0), team.axis)
    return collectives.varying(tuple(reduced), team.axis)

  program = team.jit(step).lower(team.place(trees)).compile()
  found = profiling.read_collectives(program)
  like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), trees
  )
  return found, like


def test_two_all_reduces_and_their_bytes_in_the_compiled_program():
  reducer = reducers.PowerSGD(rank=2)
  found, like = compiled(reducer)
  assert [c.kind for c in found] == ["all-reduce"] * 2
  bits = reducer.num_bits(like, N)
  assert sum(c.payload_bytes for c in found) * 8 == bits.payload
  assert sum(c.wire_bytes for c in found) * 8 == bits.sent
  # By hand: (18 + 10) and (20 + 12) vectors' entries twice, and 10 + 6.
  assert bits.payload == 32 * (2 * 28 + 2 * 32 + 16)


def test_factors_in_four_bits_and_their_bytes_in_the_compiled_program():
  int4 = reducers.compressed(codecs.Quantize(4, 16), owner_feedback="own_share")
  reducer = reducers.PowerSGD(rank=2, factors=int4)
  found, like = compiled(reducer)
  assert [c.kind for c in found] == ["all-to-all", "all-gather"] * 2
  bits = reducer.num_bits(like, N)
  assert sum(c.wire_bytes for c in found) * 8 == bits.sent
  exact = reducers.PowerSGD(rank=2).num_bits(like, N)
  assert bits.sent < exact.sent / 2.5  # Blocks of 16, padded.


def test_rough_factors_still_find_the_mean_with_feedback():
  """What 4 bits leave out comes later: the mean of the sums is the sum."""
  int4 = reducers.compressed(codecs.Quantize(4, 16), owner_feedback="own_share")
  reducer = reducers.PowerSGD(rank=2, factors=int4)
  x = np.random.default_rng(0).standard_normal((N, 20, 12)).astype(np.float32)

  def worker(x):
    def step(carried, _):
      e, state = carried
      key = jax.random.key(0)
      mean, own, state = reducer.reduce([x + e], state, key, "worker")
      return (x + e - own[0], state), mean[0]

    first = (jnp.zeros_like(x), reducer.init([x], "worker"))
    return jax.lax.scan(step, first, None, length=200)[1]

  means = jax.jit(jax.vmap(worker, axis_name="worker"))(x)
  assert means[0].tobytes() == means[3].tobytes()
  error = np.abs(np.asarray(means[0]).mean(0) - x.mean(0)).max()
  assert error < 0.1 * np.abs(x.mean(0)).max()


def test_q_is_shared():
  like = {"w": jax.ShapeDtypeStruct((20, 12), "float32")}
  reducer = reducers.PowerSGD(rank=2)
  state = reducer.init(like, None)
  assert [q.shape for q in state.q] == [(12, 2)]
  assert jax.tree.leaves(_shared.label_fields(state)) == [True]
  assert reducer.init({"b": jnp.zeros(3)}, None) == ()


# Orthonormal columns.

orthogonalize = jax.jit(_power_sgd.orthogonalize)


def matrix(n, r, condition=1.0, seed=0):
  """Of a condition number, with columns that are not orthogonal."""
  rng = np.random.default_rng(seed)
  left, _ = np.linalg.qr(rng.standard_normal((n, r)))
  right, _ = np.linalg.qr(rng.standard_normal((r, r)))
  values = condition ** -np.linspace(0, 1, r)
  return (left * values) @ right


@pytest.mark.parametrize("condition", (1.0, 1e2, 1e3))
def test_columns_are_orthonormal_and_span_the_same_space(condition):
  shapes = ((40, 4), (300, 4), (4, 4))
  given = [matrix(*shape, condition, seed=n) for n, shape in enumerate(shapes)]
  found = orthogonalize([jnp.asarray(p, jnp.float32) for p in given])
  for p, q in zip(given, map(np.asarray, found), strict=True):
    np.testing.assert_allclose(q.T @ q, np.eye(4), atol=2e-5)
    np.testing.assert_allclose(q @ (q.T @ p), p, atol=1e-6)


def test_nearly_dependent_column_becomes_shorter_not_longer():
  p = matrix(80, 4, 1e6)
  (found,) = orthogonalize([jnp.asarray(p, jnp.float32)])
  values = np.linalg.svd(found, compute_uv=False)
  assert values[0] <= 1 + 1e-5 and values[2] > 0.99


def test_well_conditioned_columns_match_qr():
  p = matrix(60, 5, 10.0)
  q, r = np.linalg.qr(p)
  (found,) = orthogonalize([jnp.asarray(p, jnp.float32)])
  np.testing.assert_allclose(found, q * np.sign(np.diag(r)), atol=1e-5)


def test_orthogonalization_is_scale_invariant():
  p = matrix(50, 3)
  scales = (1.0, 1e30, 1e-30)
  (plain,) = orthogonalize([jnp.asarray(p, jnp.float32)])
  (found,) = orthogonalize([jnp.asarray(p * scales, jnp.float32)])
  np.testing.assert_allclose(found, plain, atol=1e-5)


def test_zeros_become_unit_vectors_and_repetitions_nothing_too_long():
  zeros, repeated, one = orthogonalize(
    [
      jnp.zeros((9, 3)),
      jnp.ones((9, 3)),
      jnp.asarray(np.arange(9.0)[:, None] * (1.0, 0.0, 0.0), jnp.float32),
    ]
  )
  np.testing.assert_allclose(zeros, np.eye(9, 3), atol=1e-5)
  for found in (repeated, one):
    # No projection takes more than all.
    assert np.linalg.norm(found, 2) <= 1 + 1e-5
    taken = found @ (found.T @ np.asarray(found[:, 0]))
    np.testing.assert_allclose(taken, found[:, 0], atol=1e-4)
  np.testing.assert_allclose(one.T @ one, np.eye(3), atol=2e-5)


@pytest.mark.parametrize("bad", (np.nan, np.inf))
def test_nonfinite_entry_affects_its_matrix_only(bad):
  p = matrix(12, 2)
  p[3, 1] = bad
  found, other = orthogonalize(
    [jnp.asarray(p, jnp.float32), jnp.asarray(matrix(8, 2), jnp.float32)]
  )
  assert not np.isfinite(found).any(0).all()
  assert np.isfinite(other).all()


def test_many_matrices_are_orthogonalized_in_one_batch():
  given = [jnp.ones((n, 2)) for n in range(5, 15)]
  text = str(jax.make_jaxpr(_power_sgd.orthogonalize)(given))
  # Two passes, whatever the number of matrices.
  assert text.count("name=cholesky") == 2


def test_factors_as_large_as_their_matrix_are_not_sent():
  like = jax.ShapeDtypeStruct((4, 4), jnp.float32)
  assert not reducers.PowerSGD(2).compresses(like)
  assert reducers.PowerSGD(1).compresses(like)
