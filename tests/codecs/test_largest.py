"""The search finds the same largest entries as a sort."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jdist import collectives
from jdist.codecs import _gpu, _largest

LENGTH = 20000  # Shorter rows are sorted.


def largest_reference(row, k):
  """By magnitude, NaN first, ties to the lower index."""
  keys = np.abs(row.astype(np.float64))
  keys = np.where(np.isnan(keys), np.inf, keys)
  order = np.lexsort((np.arange(row.size), -keys, ~np.isnan(row)))
  return np.sort(order[:k])


def some_rows(name, shape=(2, LENGTH), seed=0):
  rng = np.random.default_rng(seed)
  normal = rng.standard_normal(shape)
  x = {
    "normal": normal,
    "cauchy": rng.standard_cauchy(shape),
    "lognormal": np.exp(3 * normal),
    "zeros": np.zeros(shape),
    "equal": np.full(shape, -2.0),
    "few": np.where(rng.random(shape) < 0.002, normal, 0),
    "integers": rng.integers(-3, 4, shape),
    "denormal": normal * 1e-40,
    "huge": np.sign(normal) * (1 + rng.random(shape)) * 1e38,
    "sorted": np.sort(normal, axis=-1),
    "nan": np.where(rng.random(shape) < 0.001, np.nan, normal),
    "infinite": np.where(rng.random(shape) < 0.05, -np.inf, normal),
    "all_nan": np.full(shape, np.nan),
  }[name]
  return x.astype(np.float32)


NAMES = [
  "normal",
  "cauchy",
  "lognormal",
  "zeros",
  "equal",
  "few",
  "integers",
  "denormal",
  "huge",
  "sorted",
  "nan",
  "infinite",
  "all_nan",
]
find = jax.jit(_largest.largest, static_argnames=("k", "at_least"))


def test_keys_are_ordered_as_magnitudes_are():
  x = jnp.array([0.0, -1e-44, 1e-40, 1.0, -1.5, 3e38, -jnp.inf, jnp.nan])
  keys = _largest.magnitude_keys(x)
  assert (jnp.diff(keys) > 0).all()
  assert _largest.magnitude_keys(-x).tolist() == keys.tolist()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("k", [1, 20, 200, 9000])
def test_exactly_the_largest_are_found(name, k):
  x = some_rows(name)
  found = find(x, k)
  assert found.num_used.tolist() == [k, k]
  for row, indices in zip(x, found.indices, strict=True):
    np.testing.assert_array_equal(indices, largest_reference(row, k))


@pytest.mark.parametrize("name", ["integers", "nan", "normal"])
@pytest.mark.parametrize("length", [1, 7, 16384, 20031])
def test_any_length_is_searched(name, length):
  x = some_rows(name, (1, length))
  for k in {max(1, length // 50), length}:
    found = find(x, k)
    np.testing.assert_array_equal(found.indices[0], largest_reference(x[0], k))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("k", [20, 200])
def test_sampled_threshold_keeps_its_bounds(name, k):
  x = some_rows(name)
  found = find(x, k, at_least=-(-8 * k // 10))
  for row, indices, used in zip(x, *jax.device_get(found), strict=True):
    assert 0.8 * k <= used <= k
    # Fewer entries may be sent, but these are the largest; unused slots hold
    # the last index.
    wanted = largest_reference(row, int(used))
    np.testing.assert_array_equal(indices[:used], wanted)
    assert (indices[used:] == LENGTH - 1).all()


@pytest.mark.parametrize(
  ("k", "at_least", "rank"), [(200, 160, 210.0), (200, None, 276.0)]
)
def test_guess_aims_between_the_bounds(monkeypatch, k, at_least, rank):
  # With another guess the same entries are found, in more passes.
  asked = []
  guess = _largest._guess
  monkeypatch.setattr(
    _largest, "_guess", lambda x, *more: asked.append(more) or guess(x, *more)
  )
  x = jax.ShapeDtypeStruct((1, LENGTH), jnp.float32)
  jax.eval_shape(lambda x: _largest.largest(x, k, at_least=at_least), x)
  assert asked == [(rank, 0.01)]


@hypothesis.settings(max_examples=15)
@hypothesis.given(st.integers(0, 10**6), st.sampled_from([3, 130]))
def test_largest_are_exact_with_ties_and_any_magnitudes(seed, k):
  rng = np.random.default_rng(seed)
  x = rng.standard_normal(LENGTH) * 10.0 ** rng.integers(-30, 30)
  x = np.where(rng.random(LENGTH) < rng.random(), x, rng.choice(x))
  x = x.astype(np.float32)
  np.testing.assert_array_equal(
    find(x[None], k).indices[0], largest_reference(x, k)
  )


keys = _largest.magnitude_keys


# The forms for GPUs, whose kernel is interpreted here.
@pytest.mark.parametrize("k", [1, 37])
def test_kernel_finds_the_largest_of_short_rows(k):
  x = np.concatenate([some_rows(name, (1, 300)) for name in NAMES])
  found, _ = _gpu.places(x, k, keys)
  for row, indices in zip(x, found, strict=True):
    np.testing.assert_array_equal(indices, largest_reference(row, k))


@pytest.mark.slow
@pytest.mark.parametrize("length", [38, 5000])
def test_kernel_finds_the_largest_of_rows_of_any_length(length):
  x = np.concatenate([some_rows(name, (2, length)) for name in NAMES])
  found, _ = _gpu.places(x, 37, keys)
  for row, indices in zip(x, found, strict=True):
    np.testing.assert_array_equal(indices, largest_reference(row, 37))


@pytest.mark.parametrize(
  ("at_least", "k"),
  [(200, 200), pytest.param(160, 200, marks=pytest.mark.slow)],
)
def test_kernel_finds_what_the_search_finds(at_least, k):
  @jax.jit
  def both(x):
    guess = _largest._guess(x, (at_least + 330) / 2, 0.01)
    found, right = _largest._by_kernel(x, guess, at_least, 330, k)
    words = _largest._settle(x, guess, at_least, 330)
    plain = _largest._refine(x, _largest.first_set(words, 330), k)
    return found, right, plain

  rights = {}
  for name in NAMES:
    found, right, plain = both(some_rows(name, (1, LENGTH)))
    rights[name] = bool(right)
    if right:
      np.testing.assert_array_equal(found.indices, plain.indices)
      np.testing.assert_array_equal(found.num_used, plain.num_used)
  # Others have too many equal entries, and are searched by the plain form.
  assert rights["normal"] and rights["cauchy"] and rights["huge"]
  assert not rights["equal"] and not rights["zeros"]


def test_kernel_takes_entries_equal_to_the_key_up_to_a_place():
  x = jnp.array([[1.0, -2.0, 1.0, 3.0, 1.0], [0.0, 1.0, 1.0, 0.0, 2.0]])
  threshold = keys(jnp.ones(2)), jnp.array([2, 1])
  places, counts = _gpu.places(x, 4, keys, threshold)
  assert counts.tolist() == [4, 2]
  assert places[0].tolist() == [0, 1, 2, 3]
  assert places[1, :2].tolist() == [1, 4]


def test_kernel_counts_all_entries_that_equal_the_guess():
  x = jnp.zeros((1, 64)).at[0, jnp.array([5, 20, 40, 63])].set(-1.0)
  found, right = _largest._by_kernel(x, keys(jnp.ones(1)), 4, 8, 4)
  assert right and found.num_used.tolist() == [4]
  assert found.indices.tolist() == [[5, 20, 40, 63]]
  # Slots that are not used hold the last index, so that all are ascending.
  found, right = _largest._by_kernel(x, keys(jnp.ones(1)), 3, 8, 6)
  assert right and found.num_used.tolist() == [4]
  assert found.indices.tolist() == [[5, 20, 40, 63, 63, 63]]
  # Each of two rows must have enough.
  x = jnp.concatenate([x, jnp.zeros_like(x)])
  assert not _largest._by_kernel(x, keys(jnp.ones(2)), 4, 8, 4)[1]


def test_kernel_leaves_out_entries_beyond_the_capacity():
  x = some_rows("normal")
  threshold = keys(jnp.full(2, 2.0)), jnp.full(2, LENGTH)
  places, counts = _gpu.places(x, 50, keys, threshold)
  for row, found, count in zip(x, places, counts, strict=True):
    wanted = np.flatnonzero(np.abs(row) >= 2)
    np.testing.assert_array_equal(found, wanted[:50])
    assert count == wanted.size > 50


def test_first_set_bits_match_hand_computation():
  words = jnp.array([[0b101, 0, 1 << 31], [0, 0, 0]], jnp.uint32)
  first_set = jax.jit(_largest.first_set, static_argnums=1)
  found = first_set(words, 4)
  assert found.indices.tolist() == [[0, 2, 95, 95], [95] * 4]
  assert found.num_used.tolist() == [3, 0]
  assert first_set(words, 2).indices[0].tolist() == [0, 2]


def test_vmap_over_workers_equals_single_workers():
  x = np.stack([some_rows(name) for name in ("normal", "equal", "few")])
  together = jax.jit(jax.vmap(lambda x: _largest.largest(x, 200)))(x)
  for i in range(3):
    np.testing.assert_array_equal(together.indices[i], find(x[i], 200).indices)


@pytest.mark.parametrize("k", [3, 200])
def test_one_large_entry_too_few_is_completed(k):
  # Every threshold between the two magnitudes is reached by k - 1 entries.
  x = np.full((1, LENGTH), 1e-3, np.float32)
  x[0, -k + 1 :] = 1.0
  found = find(x, k)
  assert found.num_used.tolist() == [k]
  np.testing.assert_array_equal(found.indices[0], largest_reference(x[0], k))


def test_too_many_entries_for_a_sampled_threshold_are_not_taken():
  # 0.9 k entries are large, and with those behind them they are 1.6 k.
  x = np.full((1, LENGTH), 1e-6, np.float32)
  places = np.random.default_rng(0).permutation(LENGTH)
  x[0, places[:320]], x[0, places[:180]] = 0.5, 1.0
  found = find(x, 200, at_least=160)
  assert found.num_used.tolist() == [180]
  np.testing.assert_array_equal(found.indices[0, :180], np.sort(places[:180]))


def test_nothing_is_sorted():
  text = find.lower(jnp.zeros((1, LENGTH)), 200).compile().as_text()
  assert " sort(" not in text and "TopK" not in text


def test_workers_of_a_mesh_search_their_own():
  mesh = collectives.make_mesh((2,), ("worker",))
  x = np.stack([some_rows(name, (1, LENGTH)) for name in ("normal", "few")])
  split = PartitionSpec("worker")

  def one(x):
    return _largest.largest(x[0], 200).indices[None]

  mapped = jax.shard_map(one, mesh=mesh, in_specs=split, out_specs=split)
  found = jax.jit(mapped)(x)
  for i in range(2):
    np.testing.assert_array_equal(found[i, 0], largest_reference(x[i, 0], 200))
