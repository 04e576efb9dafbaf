"""Codes are packed into bytes and unpacked."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdist.codecs import _bits, _gpu


def bits_of(value, width):
  return [(int(value) >> i) & 1 for i in range(width)]


def pack_reference(codes, width):
  """The layout by its description, one bit at a time."""
  lanes = _bits.group(width)
  length = len(codes) // lanes
  groups = [codes[i : lanes * length : length] for i in range(length)]
  rest = codes[lanes * length :]
  rows = []
  for group in [*groups, rest]:
    row = [bit for code in group for bit in bits_of(code, width)]
    row += [0] * (-len(row) % 8)
    rows.append(np.packbits(np.array(row, bool), bitorder="little"))
  planes = [
    rows[i][p] for p in range(lanes * width // 8) for i in range(length)
  ]
  return np.array([*planes, *rows[-1]], np.uint8)


def random_codes(width, num, seed=0):
  codes = np.random.default_rng(seed).integers(0, 2**width, num, np.uint64)
  return codes.astype(_bits.code_dtype(width))


def test_four_bits_match_hand_computation():
  codes = jnp.array([1, 2, 3, 4, 5], jnp.uint8)
  packed = _bits.pack(codes, 4)
  # 1 shares a byte with 3 and 2 with 4; 5 is left over.
  assert packed.tolist() == [0x31, 0x42, 0x05]
  assert _bits.unpack(packed, 4, 5).tolist() == [1, 2, 3, 4, 5]


def there_and_back(width, all_codes):
  packed = [_bits.pack(codes, width) for codes in all_codes]
  sizes = [codes.shape[-1] for codes in all_codes]
  back = [_bits.unpack(p, width, n) for p, n in zip(packed, sizes, strict=True)]
  return packed, back


def check_there_and_back(width, all_codes):
  run = jax.jit(there_and_back, static_argnums=0)
  for codes, packed, back in zip(
    all_codes, *run(width, all_codes), strict=True
  ):
    assert packed.dtype == np.uint8
    assert packed.size == -(-codes.size * width // 8)
    np.testing.assert_array_equal(packed, pack_reference(codes, width))
    assert back.dtype == codes.dtype
    np.testing.assert_array_equal(back, codes)


@pytest.mark.smoke
@pytest.mark.parametrize(
  "width", [1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 17, 20, 31, 32]
)
def test_every_width_is_recovered_from_the_fewest_bytes(width):
  check_there_and_back(
    width, [random_codes(width, num) for num in (0, 1, 8, 43)]
  )


@hypothesis.settings(max_examples=8)
@hypothesis.given(st.integers(1, 32), st.integers(0, 70), st.integers(0, 9))
def test_codes_of_any_width_and_length_are_recovered(width, num, seed):
  check_there_and_back(width, [random_codes(width, num, seed)])


@pytest.mark.parametrize("width", [3, 12])
def test_rows_are_packed_like_vectors(width):
  codes = np.stack([random_codes(width, 21, seed) for seed in range(3)])
  run = jax.jit(there_and_back, static_argnums=0)
  [packed], [back] = run(width, [codes])
  for row, wanted in zip(packed, codes, strict=True):
    np.testing.assert_array_equal(row, pack_reference(wanted, width))
  np.testing.assert_array_equal(back, codes)


@pytest.mark.parametrize("width", [3, 8, 11, 31])
def test_high_bits_and_other_integer_dtypes_do_no_harm(width):
  codes = random_codes(32, 37)
  low = (codes & (2**width - 1)).astype(_bits.code_dtype(width))
  pack = jax.jit(_bits.pack, static_argnums=1)
  for high in (codes, codes.view(np.int32)):
    np.testing.assert_array_equal(pack(high, width), pack_reference(low, width))


@pytest.mark.parametrize("width", [4, 5])
def test_nothing_is_gathered_scattered_or_transposed(width):
  codes = jnp.zeros((2, 4096), jnp.uint8)

  def both(codes):
    packed = _bits.pack(codes, width)
    return packed, _bits.unpack(packed, width, 4096)

  text = jax.jit(both).lower(codes).compile().as_text()
  for word in ("gather(", "scatter(", "transpose(", "while(", "custom-call"):
    assert word not in text, word


def test_a_cpu_unpacks_stretches():
  """One expression of all lanes takes a CPU up to five times as long."""
  unpack = lambda packed: _bits.unpack(packed, 1, 4096)  # noqa: E731
  jaxpr = jax.make_jaxpr(unpack)(jnp.zeros((2, 512), jnp.uint8)).jaxpr
  assert all(x.aval.ndim <= 2 for each in jaxpr.eqns for x in each.outvars)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_a_gpu_unpacks_the_same_codes(width, monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  monkeypatch.setattr(
    _gpu, "choose", lambda *operands, plain, cuda: cuda(*operands)
  )
  codes = random_codes(width, 80).reshape(2, 40)
  back = _bits.unpack(_bits.pack(jnp.asarray(codes), width), width, 40)
  assert back.dtype == codes.dtype
  np.testing.assert_array_equal(back, codes)


def test_trits_match_hand_computation():
  codes = jnp.array([1, 2, 0, 1, 2, 2, 1], jnp.int32)
  # The bytes are 1 + 3 * 2 + 9 * 0 + 27 * 1 + 81 * 2 and the rest, 2 + 3 * 1.
  packed = _bits.pack_trits(codes)
  assert packed.tolist() == [196, 5]
  assert _bits.unpack_trits(packed, 7).tolist() == codes.tolist()


def test_every_byte_of_trits_is_recovered():
  codes = np.stack(np.unravel_index(np.arange(243), [3] * 5)).reshape(-1)
  pack = jax.jit(_bits.pack_trits)
  unpack = jax.jit(_bits.unpack_trits, static_argnums=1)
  packed = pack(jnp.asarray(codes))
  assert sorted(packed.tolist()) == list(range(243))
  np.testing.assert_array_equal(unpack(packed, 5 * 243), codes)
  for num in (0, 1, 4, 5, 9, 83):
    packed = pack(codes[:num])
    assert packed.size == -(-num // 5)
    np.testing.assert_array_equal(unpack(packed, num), codes[:num])
