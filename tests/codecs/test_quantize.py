"""Few-bit integers match a reference in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist import codecs
from jdist.codecs import _random
from tests.codecs import _table


def encode(codec, x, seed=0):
  return jax.jit(lambda x, key: codec.encode(x, (), key)[0])(
    x, jax.random.key(seed)
  )


def decode(codec, payload, x):
  like = jax.ShapeDtypeStruct(x.shape, jnp.float32)
  return np.asarray(jax.jit(lambda p: codec.decode(p, (), like))(payload))


def reference(codec, x):
  """What the table in the docstring says, in float64, to the nearest."""
  out = []
  for part in _table.blocks(x.astype(np.float64), codec.block):
    levels = codec.num_levels
    if codec.range == "min_max":
      low, high = part.min(), part.max()
      q = np.rint(levels * (part - low) / (high - low))
      out.append(low * (1 - q / levels) + high * q / levels)
    elif codec.bits == 1:
      out.append(np.abs(part).max() * np.where(part >= 0, 1, -1))
    else:
      norm = codec.range == "norm"
      scale = np.linalg.norm(part) if norm else np.abs(part).max()
      out.append(scale * np.rint(levels * part / scale) / levels)
  return np.concatenate(out)


@pytest.mark.smoke
def test_four_bits_match_hand_computation():
  codec = codecs.Quantize(4, 4)
  x = jnp.array([7.0, -3.0, 1.4, -7.0, 0.5, 0.2])
  payload = encode(codec, x)
  # The full block has 14, 4, 8, 0; the short one, with a maximum of 0.5, has 14
  # and round(2.8) + 7 = 10.
  full, short = payload.codes
  assert full.tolist() == [[14 + 16 * 8, 4 + 16 * 0]]
  assert short.tolist() == [[14 + 16 * 10]]
  assert [s.tolist() for s in payload.scales] == [[7.0], [0.5]]
  wanted = [7.0, -3.0, 1.0, -7.0, 0.5, 0.5 * 3 / 7]
  np.testing.assert_allclose(decode(codec, payload, x), wanted, 1e-6)


def test_min_max_of_two_bits_matches_hand_computation():
  codec = codecs.Quantize(2, None, "min_max")
  x = jnp.array([1.0, 4.0, 2.1, 2.6])
  payload = encode(codec, x)
  assert payload.codes[0].tolist() == [[0 + 4 * 3 + 16 * 1 + 64 * 2]]
  assert payload.scales[0].tolist() == [[1.0], [4.0]]
  np.testing.assert_allclose(decode(codec, payload, x), [1, 4, 2, 3], 1e-6)


def test_one_bit_is_sign_times_largest_magnitude():
  codec = codecs.Quantize(1, None)
  x = jnp.array([0.5, -2.0, 0.0])
  payload = encode(codec, x)
  assert payload.codes[0].tolist() == [[0b101]]
  assert decode(codec, payload, x).tolist() == [2.0, -2.0, 2.0]


def test_norm_levels_match_qsgd():
  # With s = 3 levels of ‖(3, 4)‖ = 5, 3 lies at level 1.8 and 4 at 2.4.
  codec = codecs.Quantize(3, None, "norm", "stochastic")
  x = jnp.array([3.0, -4.0])
  keys = jax.random.split(jax.random.key(0), 40)
  run = jax.vmap(lambda key: codec.decode(*codec.encode(x, (), key), x))
  found = set(map(tuple, np.asarray(jax.jit(run)(keys)).tolist()))
  ups = {a for a, _ in found}, {b for _, b in found}
  np.testing.assert_allclose(sorted(ups[0]), [5 / 3, 10 / 3], 1e-6)
  np.testing.assert_allclose(sorted(ups[1]), [-5, -10 / 3], 1e-6)


@pytest.mark.parametrize(
  "codec",
  [
    codecs.Quantize(8, 64),
    codecs.Quantize(3, None),
    codecs.Quantize(7, 128, "min_max"),
    codecs.Quantize(6, None, "norm"),
    codecs.Quantize(11, 1024),
  ],
  ids=str,
)
def test_codes_agree_with_a_float64_reference(codec):
  x = _table.normal(11, 1500) * 5
  found = decode(codec, encode(codec, x), x)
  # Float32 may round a tie to the other side, for a few in ten thousand.
  wrong = np.abs(found - reference(codec, x)) > 1e-5
  assert wrong.mean() < 2e-3


def test_documented_sizes_hold():
  like = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)
  full = codecs.Dense().num_bits(like)
  assert full == 32 << 20
  assert full / codecs.Quantize().num_bits(like) >= 3.9
  assert full / codecs.Quantize(4).num_bits(like) >= 7.7
  assert full / codecs.Sign(256).num_bits(like) >= 28
  assert full / codecs.Sign().num_bits(like) > 31.9
  assert full / codecs.Ternary().num_bits(like) > 19.9


def test_a_block_has_one_scale_or_two_ends():
  like = jax.ShapeDtypeStruct((300,), jnp.float32)
  for kind, bits in (("max_abs", 32), ("norm", 32), ("min_max", 64)):
    codec = codecs.Quantize(4, 256, kind)
    assert codec.num_bits(like) == 300 * 4 + 2 * bits


def test_scales_differ_by_more_than_float32_can_divide():
  # 1 / 3.4e38 is denormal, and 127 / 2e-37 is infinite.
  x = np.array([3.4e38, 1.7e38, -3.4e38, 0, 2e-37, -1e-37, 5e-38, 0])
  codec = codecs.Quantize(8, 4)
  found = decode(codec, encode(codec, x.astype(np.float32)), x)
  steps = np.repeat([3.4e38, 2e-37], 4) / 127
  assert np.all(np.abs(found - x) <= 0.51 * steps)


@pytest.mark.parametrize("ends", [(-3.4e38, 0), (0, 3.4e38), (-2e-37, 0)])
def test_ends_on_one_side_of_zero_are_met(ends):
  x = np.array(ends, np.float32)
  codec = codecs.Quantize(2, 4, "min_max")
  np.testing.assert_allclose(decode(codec, encode(codec, x), x), x, rtol=1e-6)


@pytest.mark.parametrize(
  ("codec", "value"),
  [
    # Almost 32767.5 becomes 32767.5 in float32, and is rounded to 32768.
    (codecs.Quantize(16, rounding="stochastic"), 1.0),
  ],
)
def test_codes_do_not_exceed_the_last_level(codec, value):
  x = np.where(np.arange(8192) % 2, value, -value).astype(np.float32)
  found = decode(codec, encode(codec, x), x)
  assert np.all(np.sign(found) == np.sign(x))
  np.testing.assert_allclose(found, x, 0.005)


def test_random_offsets_are_uniform_symmetric_and_new_for_each_key():
  keys = jax.random.split(jax.random.key(3), 256)
  noise = jax.vmap(lambda key: _random.offsets(key, (64, 17)))(keys)
  noise = np.asarray(noise, np.float64).reshape(256, -1)
  assert noise.min() > -0.5 and noise.max() < 0.5
  total = noise.size
  assert abs(noise.mean()) < 5 * np.sqrt(1 / 12 / total)
  assert abs(noise.var() - 1 / 12) < 5 * np.sqrt(1 / 180 / total)
  # Neighbours in an array, and an entry under two keys, are independent.
  for a, b in [
    (noise[:, :-1], noise[:, 1:]),
    (noise[:, :-17], noise[:, 17:]),
    (noise[:-1], noise[1:]),
  ]:
    correlation = (a * b).mean() * 12
    assert abs(correlation) < 5 / np.sqrt(a.size)
  # Each of 64 intervals holds its share.
  counts = np.histogram(noise, 64, (-0.5, 0.5))[0]
  assert np.abs(counts - total / 64).max() < 5 * np.sqrt(total / 64)


def test_parts_of_an_array_draw_what_the_whole_would():
  key = jax.random.key(0)
  whole = _random.bits16(key, (5, 8))
  part = _random.bits16(key, (2, 8), offset=24)
  np.testing.assert_array_equal(part, whole[3:])


@pytest.mark.parametrize("bits", [4, 8])
def test_programs_are_loops_over_contiguous_lanes(bits):
  codec = codecs.Quantize(bits)
  like = jax.ShapeDtypeStruct((1 << 16,), jnp.float32)
  encode = jax.jit(lambda x: codec.encode(x)[0]).lower(like).compile()
  payload = jax.eval_shape(lambda x: codec.encode(x)[0], like)
  decode = jax.jit(lambda p: codec.decode(p, (), like)).lower(payload).compile()
  for program in (encode, decode):
    text = program.as_text()
    for word in ("transpose(", "gather(", "scatter(", "sort(", "while("):
      assert word not in text, word


def test_last_block_is_rounded_by_numbers_of_its_own():
  """An array that ends within a block is encoded in two pieces."""
  codec = codecs.Quantize(2, block=64, rounding="stochastic")
  x = jnp.full(64 + 48, 0.5).at[jnp.array([63, 111])].set(1.0)
  found = decode(codec, encode(codec, x), x)
  first, last = found[:47], found[64:111]
  assert {*first.tolist(), *last.tolist()} == {0.0, 1.0}
  assert 10 < (first != last).sum() < 40
