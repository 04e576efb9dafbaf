"""Indices are packed into the fewest bits and unpacked."""

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.codecs import _indices


def round_trip(indexing, indices):
  def run(indices):
    parts = indexing.pack(indices)
    return parts, indexing.unpack(parts)

  parts, back = jax.jit(run)(jnp.asarray(indices, jnp.int32))
  np.testing.assert_array_equal(back, indices)
  return parts


def num_bytes(parts):
  return sum(part.size for part in jax.tree.leaves(parts))


def test_local_indices_match_hand_computation():
  # Two chunks of 16 send two entries each, and a last chunk of 3 sends one.
  indexing = _indices.Indexing(35, 5, 16, 2)
  assert indexing.form == "local"
  assert indexing.num_bits == 5 * 4
  parts = round_trip(indexing, [1, 15, 16, 18, 34])
  # 1 and 16 - 16 share a byte, 15 and 18 - 16, and 34 - 32 is left over.
  assert parts["local"].tolist() == [0x01, 0x2F, 0x02]


def test_split_indices_match_hand_computation():
  indexing = _indices.Indexing(64, 4, 64, 4, distinct=False)
  # An index has four low bits, and a row of 4 + 3 bits holds the high parts.
  assert (indexing.form, indexing.low) == ("split", 4)
  assert indexing.num_bits == 4 * 4 + 4 + 3
  parts = round_trip(indexing, [5, 16, 31, 63])
  # High parts 0, 1, 1, 3 set the bits 0, 2, 3, 6.
  assert parts["high"].tolist() == [0b1001101]
  # The first low part shares a byte with the third: 5 with 15, 0 with 15.
  assert parts["low"].tolist() == [0xF5, 0xF0]


def test_bitmap_matches_hand_computation():
  indexing = _indices.Indexing(10, 5, 10, 5)
  assert (indexing.form, indexing.num_bits) == ("bitmap", 10)
  parts = round_trip(indexing, [0, 1, 3, 7, 9])
  assert parts["bitmap"].tolist() == [0b10001011, 0b10]


def test_all_entries_need_no_indices():
  indexing = _indices.Indexing(10, 10, 4, 4)
  assert (indexing.form, indexing.num_bits) == ("all", 0)
  assert round_trip(indexing, np.arange(10)) == {}


@pytest.mark.parametrize("size", [1, 5])
def test_empty_and_forced_indices_need_no_bytes(size):
  assert num_bytes(round_trip(_indices.Indexing(size, 1, 1, 1), [0])) == 0
  assert num_bytes(round_trip(_indices.Indexing(0, 0, 0, 0), [])) == 0


@pytest.mark.parametrize("part, most", [(0.01, 8.6), (0.001, 12.1)])
def test_few_entries_need_few_bits_an_index(part, most):
  for size in (1 << 16, 1 << 22):
    num = int(np.ceil(part * size))
    indexing = _indices.Indexing(size, num, size, num)
    assert indexing.num_bits / num < most
    # The entropy is the lower bound, which is exceeded by less than 7 %.
    entropy = -part * np.log2(part) - (1 - part) * np.log2(1 - part)
    assert indexing.num_bits < 1.07 * size * entropy


@hypothesis.settings(max_examples=6)
@hypothesis.given(st.data())
def test_indices_are_recovered_from_the_counted_bytes(data):
  size = data.draw(st.sampled_from([1, 2, 9, 64, 1000]))
  chunk = data.draw(st.sampled_from([1, 4, 10, size]))
  per_chunk = data.draw(st.integers(1, min(chunk, 5)))
  distinct = data.draw(st.booleans())
  rng = np.random.default_rng(data.draw(st.integers(0, 99)))
  indices = []
  for start in range(0, size, chunk):
    length = min(chunk, size - start)
    chosen = rng.choice(length, min(per_chunk, length), replace=not distinct)
    indices += sorted(chosen + start)
  indexing = _indices.Indexing(size, len(indices), chunk, per_chunk, distinct)
  parts = round_trip(indexing, indices)
  assert all(part.dtype == jnp.uint8 for part in parts.values())
  assert num_bytes(parts) == -(-indexing.num_bits // 8)


def test_indices_of_workers_may_be_stacked():
  indexing = _indices.Indexing(5000, 50, 5000, 50)
  assert indexing.form == "split"
  rng = np.random.default_rng(0)
  indices = np.sort(
    [rng.choice(5000, 50, replace=False) for _ in range(3)]
  ).astype(np.int32)
  pack = jax.jit(indexing.pack)
  together = jax.jit(jax.vmap(indexing.pack))(indices)
  for i in range(3):
    alone = pack(jnp.asarray(indices[i]))
    chex.assert_trees_all_equal(
      jax.tree.map(lambda x, i=i: x[i], together), alone
    )
  unpack = jax.jit(jax.vmap(indexing.unpack))
  np.testing.assert_array_equal(unpack(together), indices)
