"""The largest entries are sent, and nothing else."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.codecs import _cast, _quantize, _sparse
from tests import _thinned

SampledTopK = _sparse.SampledTopK
TopK = _sparse.TopK
LONG = 40000


def there_and_back(codec, x, key=None):
  def run(x):
    payload, state = codec.encode(x, codec.init(x), key)
    return payload, codec.decode(payload, state, x)

  payload, found = jax.jit(run)(x)
  num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(payload))
  assert 8 * num_bytes == codec.num_bits(x)
  assert found.shape == x.shape and found.dtype == x.dtype
  return np.asarray(found)


def normal(shape, seed=0):
  x = np.random.default_rng(seed).standard_normal(shape)
  return jnp.asarray(x, jnp.float32)


def keep_largest(x, k):
  """By a stable sort: ties go to the lower index."""
  x = np.asarray(x)
  order = np.argsort(-np.abs(x).reshape(-1), kind="stable")[:k]
  kept = np.zeros(x.size, x.dtype)
  kept[order] = x.reshape(-1)[order]
  return kept.reshape(x.shape)


def test_two_of_five_entries_match_hand_computation():
  codec = TopK(k=2)
  x = jnp.array([1.0, -3.0, 2.0, -2.0, 0.5])
  assert there_and_back(codec, x).tolist() == [0, -3, 2, 0, 0]
  # It sends two floats and a bitmap of five entries.
  assert codec.num_bits(x) == 64 + 8


def test_each_chunk_sends_its_own():
  codec = TopK(k=1, chunk=3)
  x = jnp.array([9.0, 8.0, 7.0, 1.0, 3.0, 2.0, 0.5, 0.25])
  assert there_and_back(codec, x).tolist() == [9, 0, 0, 0, 3, 0, 0.5, 0]


@pytest.mark.parametrize(
  ("chunk", "dtype"),
  _thinned.thinned(
    [None, 64, 20000, 10**6], [jnp.float32, jnp.bfloat16, jnp.float16]
  ),
)
def test_only_largest_entries_are_decoded(chunk, dtype):
  x = normal((100, 410)).astype(dtype)
  found = there_and_back(TopK(0.01, chunk=chunk), x).reshape(-1)
  flat = np.asarray(x).reshape(-1)
  step = min(chunk or flat.size, flat.size)
  for start in range(0, flat.size, step):
    part = flat[start : start + step]
    wanted = keep_largest(part, int(np.ceil(round(0.01 * part.size, 9))))
    np.testing.assert_array_equal(found[start : start + step], wanted)


@pytest.mark.parametrize("chunk", [None, 4096, 65536])
def test_one_per_cent_is_at_least_95_times_smaller(chunk):
  codec = TopK(0.01, chunk=chunk, values=_cast.Cast())
  x = normal((1 << 18,))
  payload, _ = jax.jit(codec.encode)(x)
  num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(payload))
  assert x.nbytes / num_bytes > 125


@pytest.mark.parametrize(
  "codec",
  [
    TopK(1),
    TopK(1.0, chunk=7),
    SampledTopK(1.0),
    TopK(k=LONG),
  ],
)
def test_all_entries_are_the_identity(codec):
  x = normal(LONG).at[0].set(-3.0)
  np.testing.assert_array_equal(there_and_back(codec, x), x)


def test_all_entries_need_no_indices():
  assert TopK(1.0).num_bits(normal(1000)) == 32 * 1000


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("codec", [TopK(k=1), SampledTopK(k=1)])
def test_nan_and_infinity_stay_visible(codec, value):
  for size in (100, LONG):
    x = normal(size).at[77].set(value)
    assert not np.isfinite(there_and_back(codec, x)[77])


@pytest.mark.parametrize("codec", [TopK(), TopK(0.5, chunk=2), SampledTopK()])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (3, 5)])
def test_small_arrays(codec, shape):
  found = there_and_back(codec, jnp.full(shape, 2.0))
  assert set(np.unique(found)) <= {0.0, 2.0}
  if found.size == 1:
    assert found.item() == 2.0


@pytest.mark.parametrize("value", [0.0, -2.5, 1e-40, 3e38])
def test_equal_entries_are_sent_by_index(value):
  found = there_and_back(TopK(k=3), jnp.full(50, value))
  assert (found[:3] == np.float32(value)).all() and not found[3:].any()


@pytest.mark.parametrize(
  ("values", "codec"),
  _thinned.thinned(
    [_cast.Cast(), _quantize.Quantize(2), _quantize.Quantize(8)],
    [TopK, SampledTopK],
  ),
)
def test_values_are_sent_by_their_codec(values, codec):
  x = normal(LONG)
  codec = codec(0.02, values=values)

  @jax.jit
  def compare(x):
    payload, state = codec.encode(x)
    indices, found = codec.entries(payload, state, x.size)
    used = indices < x.size
    wanted = jnp.where(used, x[jnp.minimum(indices, x.size - 1)], 0)
    sent, inner = values.encode(wanted)
    return found, jnp.where(used, values.decode(sent, inner, wanted), 0)

  np.testing.assert_array_equal(*compare(x))


@pytest.mark.parametrize("chunk", [None, 20000])
@pytest.mark.parametrize("name", ["normal", "heavy", "few"])
def test_sampled_threshold_sends_nearly_k_of_the_largest(name, chunk):
  x = np.asarray(normal(LONG + 100), np.float32)
  x = {"normal": x, "heavy": x**9, "few": np.where(x > 3.5, x, 0)}[name]
  found = there_and_back(SampledTopK(0.01, chunk=chunk), jnp.asarray(x))
  step = chunk or x.size
  for start in range(0, x.size, step):
    part, got = x[start : start + step], found[start : start + step]
    k = int(np.ceil(0.01 * part.size))
    sent = int((got != 0).sum())
    if name != "few":
      assert 0.8 * k <= sent <= k
    np.testing.assert_array_equal(got, keep_largest(part, sent))


def test_unused_slots_decode_to_zero():
  # 350 of 400 slots are used; with one bit, the zeros of the others would be
  # decoded to 3.
  codec = SampledTopK(k=400, values=_quantize.Quantize(1, None))
  x = jnp.zeros(LONG).at[7 : 7 + 350].set(-3.0)

  @jax.jit
  def run(x):
    payload, state = codec.encode(x)
    entries = codec.entries(payload, state, LONG)
    return *entries, codec.decode(payload, state, x)

  indices, values, found = run(x)
  assert indices.tolist() == [*range(7, 357)] + [LONG] * 50
  assert values.tolist() == [-3] * 350 + [0] * 50
  np.testing.assert_array_equal(found, x)


@pytest.mark.parametrize("codec", [TopK(0.02), SampledTopK(0.02)])
def test_payloads_are_added_without_dense_arrays(codec):
  xs = normal((3, LONG))
  payloads, _ = jax.jit(jax.vmap(codec.encode))(xs)

  def total(payloads):
    def add(total, payload):
      return codec.add_to(total, payload, ()), None

    return jax.lax.scan(add, jnp.zeros(LONG), payloads)[0]

  back = jax.vmap(lambda payload: codec.decode(payload, (), xs[0]))
  wanted = np.asarray(jax.jit(back)(payloads)).sum(0)
  compiled = jax.jit(total).lower(payloads).compile()
  np.testing.assert_allclose(compiled(payloads), wanted, rtol=1e-6)
  # Memory holds two copies of the total and not one of each worker's array.
  assert compiled.memory_analysis().temp_size_in_bytes < 2.5 * 4 * LONG


@pytest.mark.parametrize(
  "codec", [TopK(0.02), TopK(0.02, chunk=64), SampledTopK(0.02)]
)
def test_vmap_equals_a_loop_on_the_device(codec):
  xs = normal((2, LONG)) ** 3
  payloads, _ = jax.jit(jax.vmap(codec.encode))(xs)
  encode = jax.jit(codec.encode).lower(xs[0]).compile()
  for i in range(2):
    payload, _ = encode(xs[i])
    rows = jax.tree.map(lambda x, i=i: x[i], payloads)
    chex.assert_trees_all_equal(rows, payload)
  text = encode.as_text()
  for word in ("infeed", "outfeed", "callback", "send(", "recv("):
    assert word not in text


def test_parts_hold_whole_blocks():
  codec = TopK(k=6, chunk=50, values=_quantize.Quantize(4, 8))
  # Four chunks with six entries each fill three blocks of eight.
  assert codec.granule() == 200
  assert TopK().granule() == 1


def test_codecs_compare_and_hash_by_settings():
  assert TopK() == TopK(0.01) and hash(TopK()) == hash(TopK(0.01))
  assert TopK().sparse and not TopK().linear
  assert TopK().key == "none"
  values = _quantize.Quantize(4, rounding="stochastic")
  assert TopK(values=values).key == "worker"
  x = normal(100)
  key = jax.random.key(0)
  assert (there_and_back(TopK(0.1, values=values), x, key) != 0).any()


def test_ratio_of_entries_has_no_rounding_error():
  assert 0.07 * 100 > 7
  assert _sparse.num_entries(0.07, None, 100) == 7
  assert _sparse.num_entries(0.071, None, 100) == 8


def test_slots_of_a_shorter_last_chunk_have_its_count():
  codec = SampledTopK(0.5, chunk=4)
  used = codec._used(jnp.array([2, 0, 1]), 10)
  assert used.tolist() == [True, True, False, False, True]
