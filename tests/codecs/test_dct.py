"""Blocks are transformed to cosines and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.codecs import _cast, _dct, _gpu

DCTTopK = _dct.DCTTopK


def normal(shape, seed=0):
  x = np.random.default_rng(seed).standard_normal(shape)
  return jnp.asarray(x, jnp.float32)


def there_and_back(codec, x):
  def run(x):
    payload, state = codec.encode(x, codec.init(x))
    return payload, codec.decode(payload, state, x)

  payload, found = jax.jit(run)(x)
  num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(payload))
  assert 8 * num_bytes == codec.num_bits(x)
  assert found.shape == x.shape and found.dtype == x.dtype
  return np.asarray(found)


def cosines(x):
  """The definition, one coefficient at a time, in float64."""
  n = len(x)
  places = np.arange(n)
  result = []
  for k in range(n):
    wave = np.cos(np.pi * (2 * places + 1) * k / (2 * n))
    result.append(np.sqrt((1 if k == 0 else 2) / n) * (wave @ x))
  return np.array(result)


def test_two_entries_match_hand_computation():
  found = _dct.dct(jnp.array([3.0, 1.0]), 2)
  np.testing.assert_allclose(found, np.array([4, 2]) / np.sqrt(2), 1e-6)


@pytest.mark.parametrize("size", [1, 2, 5, 8, 64])
def test_matrix_is_orthonormal_and_the_one_defined(size):
  matrix = _dct.dct_matrix(size)
  np.testing.assert_allclose(matrix @ matrix.T, np.eye(size), atol=1e-6)
  x = np.asarray(normal(size))
  np.testing.assert_allclose(matrix @ x, cosines(x), atol=1e-5)


def tiles(x, chunk):
  """Slices of the tiles of a matrix, by the largest divisors up to `chunk`."""
  rows, columns = (
    max(d for d in range(1, chunk + 1) if length % d == 0) for length in x.shape
  )
  for top in range(0, x.shape[0], rows):
    for left in range(0, x.shape[1], columns):
      yield slice(top, top + rows), slice(left, left + columns)


def largest_cosines(x, chunk, k):
  """What is left of an array after a step of the authors' code, in NumPy."""
  matrix = x.reshape(-1, x.shape[-1]).astype(np.float64)
  found = np.zeros_like(matrix)
  for place in tiles(matrix, chunk):
    waves = np.apply_along_axis(cosines, 0, matrix[place])
    waves = np.apply_along_axis(cosines, 1, waves).reshape(-1)
    waves[np.argsort(-np.abs(waves), kind="stable")[k:]] = 0
    sides = [cosines_matrix(n) for n in matrix[place].shape]
    waves = waves.reshape(matrix[place].shape)
    found[place] = sides[0].T @ waves @ sides[1]
  return found.reshape(x.shape)


def cosines_matrix(n):
  return np.apply_along_axis(cosines, 0, np.eye(n))


@pytest.mark.parametrize(
  ("shape", "chunk", "k", "sides"),
  [
    ((8, 12), 4, 3, (4, 4)),
    ((6, 10), 4, 2, (3, 2)),  # `chunk` divides neither size.
    ((9, 15), 4, 2, (3, 3)),  # Both sizes are odd.
    ((7, 8), 4, 2, (1, 4)),  # A prime is above `chunk`.
    ((3, 5), 8, 4, (3, 5)),  # Two primes are below it.
    ((11, 13), 4, 3, (1, 1)),  # Two primes above make tiles of one entry.
    ((3, 3, 2, 10), 4, 2, (3, 2)),
    ((70,), 4, 1, (1, 2)),
    ((13,), 4, 3, (1, 1)),
    ((1,), 4, 3, (1, 1)),
  ],
)
def test_tiles_have_the_largest_divisors_as_sides(shape, chunk, k, sides):
  assert _dct.tile(shape, chunk) == sides
  x = normal(shape)
  codec = DCTTopK(chunk, k)
  wanted = largest_cosines(np.asarray(x), chunk, k)
  np.testing.assert_allclose(there_and_back(codec, x), wanted, atol=1e-5)
  # No tile sends more entries than it has, and one that sends all needs no
  # indices.
  in_tile = sides[0] * sides[1]
  values = 32 * x.size // in_tile * min(k, in_tile)
  indices = codec.num_bits(x) - values
  assert indices == 0 if in_tile <= k else 0 < indices <= x.size + 7


def test_tiles_of_a_matrix_are_transformed_both_ways():
  x = np.asarray(normal((8, 12)))
  found = np.asarray(_dct.dct(jnp.asarray(x), 4)).reshape(2, 3, 4, 4)
  for row in range(2):
    for column in range(3):
      tile = x[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
      wanted = np.apply_along_axis(cosines, 0, tile)
      wanted = np.apply_along_axis(cosines, 1, wanted)
      np.testing.assert_allclose(found[row, column], wanted, atol=1e-5)


@pytest.mark.parametrize(
  "shape",
  [(), (0,), (3, 0), (1,), (64,), (70,), (8, 12), (3, 3, 8, 4), (9, 8), (11,)],
)
def test_all_coefficients_are_the_identity(shape):
  x = normal(shape)
  found = there_and_back(DCTTopK(4, ratio=1.0), x)
  np.testing.assert_allclose(found, x, atol=1e-5)
  blocks = _dct.dct(x, 4)
  np.testing.assert_allclose(jnp.sum(blocks**2), jnp.sum(x**2), 1e-5)


def test_cosine_needs_one_coefficient():
  places = np.arange(64)
  wave = np.cos(np.pi * (2 * places + 1) * 5 / 128)
  x = jnp.asarray(np.outer(wave, wave), jnp.float32)
  codec = DCTTopK(k=1)
  np.testing.assert_allclose(there_and_back(codec, x), x, atol=1e-5)
  # It sends one value, and one index of twelve bits in two bytes.
  assert codec.num_bits(x) == 32 + 16


def test_largest_coefficients_of_each_block_are_sent():
  x = normal((8, 8))
  found = there_and_back(DCTTopK(4, k=3), x)
  wanted = np.asarray(_dct.dct(x, 4)).reshape(4, 16).copy()
  for block in wanted:
    block[np.argsort(-np.abs(block))[3:]] = 0
  np.testing.assert_allclose(
    _dct.dct(jnp.asarray(found), 4), wanted.reshape(-1), atol=1e-5
  )


def test_defaults_match_demo():
  codec = DCTTopK()
  assert (codec.chunk, codec.k) == (64, 32)
  like = jax.ShapeDtypeStruct((256, 512), jnp.float32)
  # 32 tiles send 32 floats each, with indices of less than 12 bits.
  assert codec.num_bits(like) < 32 * 32 * (32 + 9.1)


def test_nan_affects_its_block_alone():
  x = normal((8, 8)).at[1, 1].set(jnp.nan)
  found = there_and_back(DCTTopK(4, k=2), x)
  assert np.isnan(found[:4, :4]).all()
  assert np.isfinite(found[4:]).all() and np.isfinite(found[:, 4:]).all()
  x = normal((8, 8)).at[1, 1].set(jnp.inf)
  assert not np.isfinite(there_and_back(DCTTopK(4, k=2), x)[:4, :4]).any()


def test_a_cpu_transforms_without_a_loop(monkeypatch):
  """A loop copies its carry, which takes a CPU half as long again."""
  x = jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)
  transform = lambda x: _dct.dct(x, 8)  # noqa: E731
  assert "while" not in str(jax.make_jaxpr(transform)(x))
  # The loop of a GPU computes the same, with and without large entries.
  arrays = [x, x * 3e38, x.at[0, 0].set(jnp.nan)]
  wanted = [transform(x) for x in arrays]
  monkeypatch.setattr(_gpu, "choose", lambda *x, plain, cuda: cuda(*x))
  for array, result in zip(arrays, wanted, strict=True):
    np.testing.assert_allclose(transform(array), result, rtol=1e-6)


def test_large_entries_stay_finite():
  x = jnp.full((128, 64), np.finfo(np.float32).max)
  found = there_and_back(DCTTopK(), x)
  assert np.isfinite(found).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_arrays_and_values(dtype):
  x = normal((64, 128)).astype(dtype)
  codec = DCTTopK(64, ratio=1.0, values=_cast.Cast())
  found = there_and_back(codec, x).astype(np.float32)
  np.testing.assert_allclose(found, x.astype(jnp.float32), atol=0.05)


def test_payloads_of_workers_add_up():
  codec = DCTTopK(4, k=3)
  xs = normal((3, 8, 8))
  payloads, _ = jax.jit(jax.vmap(codec.encode))(xs)
  total = jnp.zeros((8, 8))
  add = jax.jit(lambda total, payload: codec.add_to(total, payload, ()))
  for i in range(3):
    payload = jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], payloads)
    total = add(total, payload)
  wanted = sum(there_and_back(codec, x) for x in xs)
  np.testing.assert_allclose(total, wanted, atol=1e-5)
  assert codec.sparse and not codec.linear and codec.granule() == 4
