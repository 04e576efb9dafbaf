"""Packing unsigned integers of any width into bytes.

With `g = gcd(width, 8)`, groups of `lanes = 8 / g` codes fill exactly
`planes = width / g` bytes.  The codes are cut into `lanes` stretches of equal
length and the bytes into `planes`; group i consists of the i-th code of every
stretch and the i-th byte of every plane.  For five bits (8 lanes, 5 planes):

    codes   |---0---|---1---| ... |---7---| rest
    bytes   |--0--|--1--|--2--|--3--|--4--| rest

All operations are shifts and ors of long contiguous pieces, which compilers
turn into vector instructions; packing neighbours took up to twice the time on a
CPU.  The rest of fewer than `lanes` codes is last, packed neighbour by
neighbour, lowest bits first.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jdist.codecs import _gpu

MAX_WIDTH = 32


def num_bytes(num_codes: int, width: int) -> int:
  """Returns the number of bytes that codes fill."""
  return -(-num_codes * width // 8)


def group(width: int) -> int:
  """Returns the smallest number of codes that fills whole bytes.

  >>> [group(width) for width in (1, 3, 4, 6, 8, 12)]
  [8, 8, 2, 4, 1, 2]
  """
  return 8 // math.gcd(width, 8)


def code_dtype(width: int) -> np.dtype:
  """Returns the smallest unsigned dtype that holds codes of this width."""
  if width not in range(1, MAX_WIDTH + 1):
    rule = f"`width` must be an int from 1 to {MAX_WIDTH}"
    raise ValueError(f"{rule}, got {width!r}.")
  return np.dtype(
    np.uint8 if width <= 8 else np.uint16 if width <= 16 else np.uint32
  )


def pack(codes: jax.Array, width: int) -> jax.Array:
  """Packs the `width` low bits, 1 to 32, of integers along the last axis.

  Returns:
    uint8 [..., ceil(n * width / 8)]; unused bits of the last byte are zero.
  """
  dtype = code_dtype(width)
  # Shifts to the left must not lose high bits in a dtype that is too narrow.
  if codes.dtype.itemsize < dtype.itemsize:
    codes = codes.astype(dtype)
  lanes = group(width)
  groups = _stretches(codes, lanes, codes.shape[-1] // lanes)
  pieces = [byte for each in groups for byte in _pack_lanes(each, width)]
  return _join(pieces, codes, np.dtype(np.uint8))


def unpack(packed: jax.Array, width: int, num_codes: int) -> jax.Array:
  """Unpacks a result of `pack` to the smallest unsigned dtype that fits."""
  dtype = code_dtype(width)
  lanes = group(width)
  length, num_rest = divmod(num_codes, lanes)

  def plain(packed: jax.Array) -> jax.Array:
    groups = _stretches(packed, lanes * width // 8, length)
    pieces = _unpack_lanes(groups.pop(0), width, lanes) if length else []
    if num_rest:
      pieces += _unpack_lanes(groups.pop(), width, num_rest)
    return _join(pieces, packed, dtype)

  def fused(packed: jax.Array) -> jax.Array:
    # One expression, which a GPU fuses with the operation that reads the codes.
    # A CPU takes up to five times as long for it, without vector instructions.
    shifts = width * np.arange(lanes, dtype=np.uint8)[:, None]
    codes = packed[..., None, :] >> shifts & np.uint8((1 << width) - 1)
    return codes.reshape(*packed.shape[:-1], num_codes)

  # `choose` asks for the backend, too; so a trace on a CPU stays in this file.
  if lanes * width != 8 or num_rest or jax.default_backend() != "gpu":
    return plain(packed)
  return _gpu.choose(packed, plain=plain, cuda=fused)


def pack_trits(codes: jax.Array) -> jax.Array:
  """Packs codes 0, 1 and 2 along the last axis, five to a byte.

  The i-th byte holds the i-th code of each of five stretches, in base 3; a rest
  of up to four codes shares one more byte: uint8 [..., ceil(n / 5)].
  """
  groups = _stretches(codes.astype(jnp.uint8), 5, codes.shape[-1] // 5)
  pieces = [
    sum((x * np.uint8(3**i) for i, x in enumerate(lanes[1:], 1)), lanes[0])
    for lanes in groups
  ]
  return _join(pieces, codes, np.dtype(np.uint8))


def unpack_trits(packed: jax.Array, num_codes: int) -> jax.Array:
  """Unpacks a result of `pack_trits`: uint8 [..., num_codes]."""
  length, num_rest = divmod(num_codes, 5)
  body, rest = packed[..., :length], packed[..., length:]
  pieces = [_trit(body, i) for i in range(5)] if length else []
  pieces += [_trit(rest, i) for i in range(num_rest)]
  return _join(pieces, packed, np.dtype(np.uint8))


def _stretches(x: jax.Array, num: int, length: int) -> list[list[jax.Array]]:
  """Cuts the last axis into `num` stretches, and the rest into single entries.

  Either group is left out if it is empty.
  """
  rest = x[..., num * length :]
  body = [x[..., i * length : (i + 1) * length] for i in range(num)]
  single = [rest[..., i : i + 1] for i in range(rest.shape[-1])]
  return [group for group in (body if length else [], single) if group]


# For bytes below 243, x // 3**place equals (x * factor) >> shift in 16 bits, by
# a search of all factors.  A division has no vector instruction on CPUs.
_TRIT_QUOTIENTS = ((1, 0), (171, 9), (57, 9), (19, 9), (203, 14), (0, 0))


def _trit(packed: jax.Array, place: int) -> jax.Array:
  """Returns a digit, in base 3, of bytes below 243."""
  x = packed.astype(jnp.uint16)
  quotient, higher = (
    (x * np.uint16(factor)) >> np.uint16(shift)
    for factor, shift in _TRIT_QUOTIENTS[place : place + 2]
  )
  return (quotient - 3 * higher).astype(jnp.uint8)


def _pack_lanes(codes: list[jax.Array], width: int) -> list[jax.Array]:
  """Returns the planes of bytes of the lanes of codes, lowest bits first."""
  if width < 8:
    # A vector instruction shifts more bytes than wider integers at once.
    mask = codes[0].dtype.type((1 << width) - 1)
    codes = [(lane & mask).astype(jnp.uint8) for lane in codes]
  planes = []
  for plane in range(num_bytes(len(codes), width)):
    byte = None
    for i, lane in enumerate(codes):
      shift = i * width - 8 * plane
      # A code and a byte overlap if the shift between them is shorter than
      # both; all shifts are static, so that the loop leaves no branches.
      if not -width < shift < 8:
        continue
      if shift < 0:
        piece = lane >> lane.dtype.type(-shift)
      else:
        piece = lane.astype(jnp.uint8) << np.uint8(shift)
      if width > 8 and shift <= 0:
        # Higher bits of the code belong to other planes.
        mask = (1 << min(8, width + shift)) - 1
        piece = piece.astype(jnp.uint8) & np.uint8(mask)
      byte = piece if byte is None else byte | piece
    assert byte is not None
    planes.append(byte)
  return planes


def _unpack_lanes(
  planes: list[jax.Array], width: int, num_lanes: int
) -> list[jax.Array]:
  """Returns the lanes of codes from planes of bytes."""
  dtype = code_dtype(width)
  lanes = []
  for i in range(num_lanes):
    code = None
    for plane, byte in enumerate(planes):
      shift = i * width - 8 * plane
      if not -width < shift < 8:
        continue
      if shift >= 0:
        piece = (byte >> np.uint8(shift)).astype(dtype)
      else:
        piece = byte.astype(dtype) << dtype.type(-shift)
      code = piece if code is None else code | piece
    assert code is not None
    # The bytes also hold bits of neighbouring codes.
    if width < 8 * dtype.itemsize:
      code = code & dtype.type((1 << width) - 1)
    lanes.append(code)
  return lanes


def _join(
  pieces: list[jax.Array], like: jax.Array, dtype: np.dtype
) -> jax.Array:
  if not pieces:
    return jnp.zeros((*like.shape[:-1], 0), dtype)
  pieces = [piece.astype(dtype) for piece in pieces]
  return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, -1)
