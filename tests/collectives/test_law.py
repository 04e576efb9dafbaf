"""Nothing is lost on the way, and all workers know the same mean."""

import jax
import numpy as np
import pytest

from jdist import collectives
from jdist.collectives import _carrying
from tests.collectives import _reducers, _small_codecs

ROUNDS = 3
# Relative to the largest entry of a leaf: float32 and the leaf's own rounding.
_LOOSE = {"float32": 1e-5, "bfloat16": 2e-2}


def residual_leaves(reducer, residuals, like, num_workers):
  """The owners' residuals, [workers, rows' entries], as leaves of the tree."""
  leaves = jax.tree.leaves(like)
  full = [i for i, x in enumerate(leaves) if x.size]
  out = [np.zeros(x.shape) for x in leaves]
  if not isinstance(reducer, _carrying.Carry) or reducer.wire != "exchange":
    return out
  residuals = list(residuals)
  found = {}
  for vector in reducer._vectors([leaves[i] for i in full], num_workers):
    if reducer._remembers(vector):
      vector.put(residuals.pop(0), [leaves[i] for i in full], found)
  assert not residuals
  for i, x in found.items():
    out[full[i]] = x
  return out


def check_law(reducer, trees, results, num_workers, tolerance):
  """sum x = N mean + sum (x - own) + N sum of the change of e, each round."""
  means, shares, states, first = results
  like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), trees
  )
  e = first.residual if isinstance(first, collectives.CarryState) else ()
  old = residual_leaves(reducer, e, like, num_workers)
  for r in range(ROUNDS):
    e = states.residual if isinstance(states, collectives.CarryState) else ()
    new = residual_leaves(reducer, [x[:, r] for x in e], like, num_workers)
    for x, mean, share, before, after in zip(
      *map(jax.tree.leaves, (trees, means, shares)), old, new, strict=True
    ):
      x = np.asarray(x[:, r], np.float64)
      mean = np.asarray(mean[0, r], np.float64)
      share = np.asarray(share[:, r], np.float64)
      change = np.asarray(after, np.float64) - np.asarray(before, np.float64)
      total = num_workers * mean + (x - share).sum(0) + num_workers * change
      scale = max(np.abs(x).max(initial=0), np.abs(before).max(initial=0))
      atol = tolerance * num_workers * scale
      np.testing.assert_allclose(total, x.sum(0), rtol=0, atol=atol)
    old = new


def check_same_everywhere(means):
  for x in jax.tree.leaves(means):
    for worker in x[1:]:
      assert worker.tobytes() == x[0].tobytes()


@pytest.mark.parametrize("name", _reducers.LAWFUL)
@pytest.mark.parametrize(
  ("num_workers", "dtype", "substrate"),
  [
    (8, "float32", "vmap"),
    (3, "bfloat16", "vmap"),
    (4, "float32", "two_a_device"),
  ],
)
def test_nothing_is_lost(name, num_workers, dtype, substrate):
  check(name, num_workers, dtype, substrate)


@pytest.mark.parametrize("name", ["sum", "gather", "exchange"])
@pytest.mark.parametrize(
  ("num_workers", "dtype", "substrate"),
  [
    (1, "float32", "none"),
    (2, "float32", "vmap"),
    (4, "bfloat16", "shard_map"),
  ],
)
def test_nor_on_other_substrates(name, num_workers, dtype, substrate):
  check(name, num_workers, dtype, substrate)


def check(name, num_workers, dtype, substrate):
  reducer = _reducers.LAWFUL[name]
  trees = _reducers.make_tree(num_workers, ROUNDS, dtype)
  results = _reducers.run(reducer, trees, num_workers, substrate)
  for x, mean, share in zip(
    *map(jax.tree.leaves, (trees, *results[:2])), strict=True
  ):
    assert mean.dtype == x.dtype
    assert share.dtype == np.float32
    assert np.isfinite(np.asarray(mean, np.float32)).all()
  check_same_everywhere(results[0])
  check_law(reducer, trees, results, num_workers, _LOOSE[dtype])


def test_rounding_of_the_mean_is_the_owners_too():
  """In bfloat16 the owners keep what the cast of the mean has left out."""
  for codec in (_small_codecs.Rounded(), _small_codecs.Whole()):
    reducer = collectives.carry(codec, wire="exchange")
    trees = _reducers.make_tree(3, ROUNDS, "bfloat16")
    results = _reducers.run(reducer, trees, 3)
    check_law(reducer, trees, results, 3, 1e-5)


def test_without_the_owners_residual_something_is_lost():
  codec = _small_codecs.Rounded(levels=7)
  trees = _reducers.make_tree(3, ROUNDS)
  reducer = collectives.carry(codec, owner_feedback=False)
  results = _reducers.run(reducer, trees, 3)
  assert jax.tree.leaves(results[2]) == []
  with pytest.raises(AssertionError):
    check_law(reducer, trees, results, 3, 1e-2)
