"""Nothing is lost on the way, and all workers know the same mean."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import codecs, reducers
from jdist.reducers import _all_to_all
from tests import _thinned
from tests.reducers import _reducers, _small_codecs

ROUNDS = 3
# Relative to the largest entry of a leaf: float32 and the leaf's own rounding.
_LOOSE = {"float32": 1e-5, "bfloat16": 2e-2}


def residual_leaves(reducer, residuals, like, num_workers):
  """The owners' residuals, [workers, rows' entries], as leaves of the tree."""
  out = jax.tree.map(lambda x: np.zeros(x.shape), like)
  if not isinstance(reducer, _all_to_all.AllToAll):
    return jax.tree.leaves(out)
  residuals = list(residuals)
  layout, coders = reducer._layout(like, num_workers)
  buffers = [
    residuals.pop(0)
    if reducer._keeps(coder)
    else np.zeros((bucket.num_rows, bucket.row_size))
    for bucket, coder in zip(layout.buckets.buckets, coders, strict=True)
  ]
  assert not residuals
  return jax.tree.leaves(layout.buckets.unpack(buffers, like))


def check_law(reducer, trees, results, num_workers, tolerance):
  """sum x = N mean + sum (x - own) + N sum of the change of e, each round."""
  means, shares, states, first = results
  like = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), trees
  )
  e = first.residual if isinstance(first, _all_to_all.AllToAllState) else ()
  old = residual_leaves(reducer, e, like, num_workers)
  for r in range(ROUNDS):
    e = states.residual if isinstance(states, _all_to_all.AllToAllState) else ()
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


# A program each takes seconds to compile: one of a kind in the default set.
_ONE_OF_A_KIND = ("sum_random_k", "gather_top_k", "all_to_all_int4", "low_rank")
# And one for each codec and each way to send.
_OFTEN = (
  *_ONE_OF_A_KIND,
  "exact",
  "sum",
  "gather_random_k",
  "gather_int8",
  "all_to_all_stochastic",
  "all_to_all_sign",
  "all_to_all_top_k",
  "all_to_all_blind",
)


@pytest.mark.parametrize("name", _thinned.some(list(_reducers.LAWFUL), _OFTEN))
def test_nothing_is_lost(name):
  check(name, 8, "float32", "vmap")


@pytest.mark.parametrize(
  "name", _thinned.some(list(_reducers.LAWFUL), _ONE_OF_A_KIND)
)
def test_nothing_is_lost_in_bfloat16_on_devices(name):
  check(name, 6, "bfloat16", "two_a_device")


@pytest.mark.parametrize("name", ["sum", "gather", "all_to_all"])
@pytest.mark.parametrize(
  ("num_workers", "dtype", "substrate"),
  [
    (1, "float32", "none"),
    (3, "bfloat16", "vmap"),
    (4, "float32", "shard_map"),
  ],
)
def test_law_holds_on_other_substrates(name, num_workers, dtype, substrate):
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
    reducer = reducers.compressed(codec, wire="all_to_all")
    trees = _reducers.make_tree(3, ROUNDS, "bfloat16")
    results = _reducers.run(reducer, trees, 3)
    check_law(reducer, trees, results, 3, 1e-5)


@pytest.mark.parametrize("owner_feedback", [True, "own_share", False])
def test_int4_loses_mass_without_owner_feedback(owner_feedback):
  """Missing over rounds with error feedback, of what workers still hold."""
  num_workers, rounds, size = 8, 20, 2048
  reducer = reducers.compressed(
    codecs.Quantize(4, 64), owner_feedback=owner_feedback
  )
  rng = np.random.default_rng(0)
  x = rng.standard_normal((num_workers, rounds, size)).astype(np.float32)

  def worker(x):
    state = reducer.init(x[0], "worker")

    def step(carried, x):
      e, state = carried
      key = jax.random.key(0)
      mean, own, state = reducer.reduce(x + e, state, key, "worker")
      return (x + e - own, state), mean

    (e, state), means = jax.lax.scan(step, (jnp.zeros(size), state), x)
    return e, state, means

  e, state, means = jax.jit(jax.vmap(worker, axis_name="worker"))(x)
  owned = state.residual[0].reshape(-1) if owner_feedback is True else 0.0
  assert bool(state) == (owner_feedback is True)
  known = num_workers * (np.asarray(means[0], np.float64).sum(0) + owned)
  missing = x.sum((0, 1), np.float64) - known - np.asarray(e).sum(0)
  part = np.linalg.norm(missing) / np.linalg.norm(np.asarray(e))
  print(f"{owner_feedback=}: {part:.2e} is missing")
  relative = np.linalg.norm(missing) / np.linalg.norm(x.sum((0, 1)))
  if owner_feedback:
    assert relative < 1e-5
  else:
    assert relative > 0.01
    assert part > 0.2
