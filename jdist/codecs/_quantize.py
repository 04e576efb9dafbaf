"""Few-bit integers and a scale for each block of entries."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jdist import checks
from jdist.codecs import _bits, _blocks, _codec, _random

# A float32 of magnitude below 2**22 plus this number holds the nearest integer
# in its low bits: one addition takes the place of a slow conversion.
_MAGIC = np.float32(1.5 * 2**23)
_MAGIC_BITS = np.int32(0x4B400000)


@dataclasses.dataclass(frozen=True)
class Quantize(_blocks.Blocked, _random.Rounding):
  r"""Sends integers of a few bits and a scale for each block.

  The array is flattened and cut into blocks; the last may be short.  With b
  bits, R(v) the rounding of v to an integer, and for each block

  ==========  =======================================  =====================
  range       sent                                     decoded
  ==========  =======================================  =====================
  max_abs     s = max |x|, q = R(L x / s)              s q / L
  norm        s = ‖x‖₂, q = R(L x / s)                 s q / L
  min_max     l = min x, h = max x,                    l (1 - q/M) + h q/M
              q = R(M (x - l) / (h - l))
  ==========  =======================================  =====================

  with :math:`L = 2^{b-1} - 1` and :math:`M = 2^b - 1`.  So q is in -L..L (b=8:
  -127..127, b=4: -7..7, b=2: -1..1) and sent as q + L; the last code is unused.
  With one bit and max_abs, q is the sign, -1 or 1, and 1 for zero: s sign(x),
  or with stochastic rounding s with probability (1 + x/s) / 2.  For min_max q
  is in 0..M.

  Rounding to the nearest has an error of at most half a step (s / 2L, or
  (h - l) / 2M; s with one bit and max_abs), and stochastic rounding of less
  than one step.  Blocks of zeros decode to zeros, and with max_abs and min_max
  the largest entries are exact in float32.  Finite entries do not overflow;
  blocks whose largest magnitude is denormal, below 1.2e-38, may become zeros.
  A block with an infinity or a NaN decodes to infinities and NaN everywhere.

  The payload holds `bits` for each entry and one scale for each block (two for
  min_max): float32 arrays become 3.94 times smaller with int8 in blocks of 256,
  and 7.76 times with int4.

  Args:
    bits: Bits of an entry, sign included: 1 to 16, for norm 2 to 16.
    block: The number of entries that share a scale, such that a block fills
      whole bytes (any for 8 bits, a multiple of 2 for 4 bits, of 8 for 3 bits).
      None means one scale for the array.
    range: `"max_abs"`, symmetric, which keeps zeros, for gradients;
      `"min_max"`, affine, for entries that are not centered; `"norm"` for QSGD.
    rounding: `"nearest"`, ties to even, or `"stochastic"`, up with the
      probability of the distance to the lower level, which is noisier and
      unbiased to 2**-17 steps (2**-10 with 16 bits).

  >>> codec = Quantize(bits=4, block=2)
  >>> payload, state = codec.encode(jnp.array([7.0, -3.0, 0.0]))
  >>> [x.tolist() for x in payload.codes]  # 7 + 7 and -3 + 7; 0 + 7
  [[[78]], [[7]]]
  >>> [x.tolist() for x in payload.scales]
  [[7.0], [0.0]]
  >>> codec.decode(payload, state, jnp.zeros(3)).round(5).tolist()
  [7.0, -3.0, 0.0]

  References: D. Alistarh et al., QSGD, NeurIPS 2017 (arXiv:1610.02132),
  section 3.1, for norm with stochastic rounding: its s levels are L here, and
  its buckets are blocks.  Departures: levels have a fixed width in place of
  Elias's code; s is a power of two minus one.  Section 4 has max_abs as
  "scaling by the maximum".  Block-wise scales: T. Dettmers, arXiv:1511.04561.
  """

  bits: int = 8
  block: int | None = 256
  range: Literal["max_abs", "min_max", "norm"] = "max_abs"
  rounding: Literal["nearest", "stochastic"] = "nearest"

  def __post_init__(self) -> None:
    remedy = "Beyond it, use `Dense`."
    checks.set_structural(self, "bits", minimum=1, maximum=16, remedy=remedy)
    checks.check_choice("range", self.range, ("max_abs", "min_max", "norm"))
    self._check_rounding()
    _blocks.check_block(self.block, _bits.group(self.bits))
    if self.range == "norm" and self.bits == 1:
      raise ValueError(
        "`bits` must be at least 2 for `range='norm'`, one for the sign and "
        "the rest for the levels, got bits=1. Use `Sign(scale='l2')`."
      )

  @property
  def num_levels(self) -> int:
    """The number L or M of the equations."""
    if self.range == "min_max":
      return (1 << self.bits) - 1
    return max((1 << (self.bits - 1)) - 1, 1)

  def granule(self) -> int:
    """Returns the block; without one, the codes that fill whole bytes."""
    return _bits.group(self.bits) if self.block is None else self.block

  def num_bits(self, like: _codec.Like) -> int:
    """Returns `bits` for each entry, and 32 or 64 for each block."""
    scale_bits = 64 if self.range == "min_max" else 32
    blocks = _blocks.num_blocks(like.size, self.block)
    return like.size * self.bits + blocks * scale_bits

  def _scales(self, pieces: list[jax.Array]) -> list[jax.Array]:
    if self.range == "min_max":
      return _blocks.low_high(pieces, self.block is None)
    return _blocks.scales(self.range, pieces, self.block is None)

  def _encoded(
    self, rows: jax.Array, scale: jax.Array, key: Any, start: int
  ) -> jax.Array:
    # Rounding to the nearest, the default, takes no way through random numbers.
    nearest = self.rounding == "nearest"
    noise = None if nearest else self._noise(key, rows.shape, start)
    codes = self._codes(rows, scale, noise)
    # Codes of whole bytes need no packing.
    if self.bits in (8, 16):
      return codes.astype(f"uint{self.bits}")
    return _bits.pack(codes, self.bits)

  def _decoded(
    self, packed: jax.Array, columns: int, scale: jax.Array
  ) -> jax.Array:
    if self.bits not in (8, 16):
      packed = _bits.unpack(packed, self.bits, columns)
    levels = self.num_levels
    # For all possible numbers of levels, the last level times the step is 1.
    step = np.float32(1) / np.float32(levels)
    # CPUs convert signed integers to floats faster than unsigned ones.
    q = packed.astype(jnp.int32).astype(jnp.float32)
    if self.range == "min_max":
      low, high = scale[0][:, None], scale[1][:, None]
      t = jnp.minimum(q * step, 1)
      return jnp.clip(low * (1 - t) + high * t, low, high)
    if self.bits == 1:
      return (2 * q - 1) * scale[:, None]
    # The clip changes no value.  It keeps compilers from multiplying scale and
    # step first, whose product may be denormal, or not exact at the last level.
    return jnp.clip((q - levels) * step, -1, 1) * scale[:, None]

  def _codes(
    self, rows: jax.Array, scale: jax.Array, noise: jax.Array | None
  ) -> jax.Array:
    """Returns codes in 0..2**bits - 1, int32 [rows, columns]."""
    levels = self.num_levels
    if self.range == "min_max":
      t = _blocks.ratio(rows, scale[0], scale[1])
      return round_to_int(t * np.float32(levels), noise, 0, levels)
    v = _blocks.quotient(rows, scale)
    if self.bits > 1:
      return (
        round_to_int(v * np.float32(levels), noise, -levels, levels) + levels
      )
    # One bit: a level for each sign, without a level for zero.
    if noise is None:
      return (rows >= 0).astype(jnp.int32)
    return round_to_int((v + 1) * np.float32(0.5), noise, 0, 1)


def round_to_int(
  v: jax.Array, noise: jax.Array | None, low: int, high: int
) -> jax.Array:
  """Returns integers in low..high; NaN becomes any of them."""
  if noise is not None:
    v = v + noise
  bits = jax.lax.bitcast_convert_type(v + _MAGIC, jnp.int32)
  return jnp.clip(bits - _MAGIC_BITS, low, high)
