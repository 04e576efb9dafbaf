"""Signs of one bit, or ternary values, with a scale."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jdist import checks
from jdist.codecs import _bits, _blocks, _codec, _quantize, _random

_SCALES = ("mean_abs", "max_abs", "one", "l2")


@dataclasses.dataclass(frozen=True)
class Sign(_blocks.Blocked):
  r"""Sends the sign of each entry, eight to a byte, and a scale for a block.

  .. math:: \mathrm{decode} = s \cdot \mathrm{sign}(x), \qquad
            \mathrm{sign}(0) = 1

  ==========  =====================  ===========================================
  scale       s of a block of n      why
  ==========  =====================  ===========================================
  mean_abs    ‖x‖₁ / n               the nearest of all s sign(x): its error is
                                     ‖x‖² - ‖x‖₁² / n, at most ‖x‖²
  l2          ‖x‖₂ / √n              keeps the norm
  max_abs     max |x|                no entry shrinks
  one         1                      signs alone, as for a majority vote
  ==========  =====================  ===========================================

  Blocks of zeros decode to zeros, and to ones with `"one"`.  A block with an
  infinity or a NaN decodes to NaN, or with max_abs and infinity to infinities;
  with `"one"` the whole array does.  The codec is biased and needs error
  feedback.  Float32 arrays become 28.4 times smaller with blocks of 256, and
  nearly 32 times with one scale.

  Args:
    block: The number of entries that share a scale, a multiple of 8; None
      (default) means one scale for the array, as for the paper's layers.
    scale: A name of the table.  The scale is float32, except with `"one"`,
      where 16 bits for the array mark it as finite.

  >>> codec = Sign()
  >>> payload, state = codec.encode(jnp.array([3.0, -1.0, 0.0]))
  >>> codec.decode(payload, state, jnp.zeros(3)).round(3).tolist()
  [1.333..., -1.333..., 1.333...]

  References: S. P. Karimireddy et al., Error feedback fixes SignSGD, ICML 2019
  (arXiv:1901.09847), algorithm 2, has mean_abs; J. Bernstein et al., signSGD,
  ICML 2018 (arXiv:1802.04434) has `"one"`.  Departure: the sign of zero is 1,
  as one bit has no third value; the papers' may be 0.
  """

  block: int | None = None
  scale: Literal["mean_abs", "max_abs", "one", "l2"] = "mean_abs"

  def __post_init__(self) -> None:
    checks.check_choice("scale", self.scale, _SCALES)
    _blocks.check_block(self.block, 8)

  def granule(self) -> int:
    """Returns the block; without one, eight."""
    return 8 if self.block is None else self.block

  def num_bits(self, like: _codec.Like) -> int:
    """Returns 1 for each entry and 32 for each scale, or 16 for `"one"`."""
    if self.scale == "one":
      return like.size + 16 * min(like.size, 1)
    return like.size + 32 * _blocks.num_blocks(like.size, self.block)

  def _scales(self, pieces: list[jax.Array]) -> list[jax.Array]:
    if self.scale != "one":
      # The paper's norm of a block, divided by the root of its length.
      kind = "root_mean_square" if self.scale == "l2" else self.scale
      return _blocks.scales(kind, pieces, self.block is None)
    # A sign cannot express NaN; the scale makes it visible to the receiver.
    largest = _blocks.scales("max_abs", pieces, True)
    one = np.float32(1)
    return [
      jnp.where(_blocks.finite(x), one, jnp.nan).astype(jnp.bfloat16)
      for x in largest
    ]

  def _encoded(
    self, rows: jax.Array, scale: jax.Array, key: Any, start: int
  ) -> jax.Array:
    del scale, key, start
    return _bits.pack((rows >= 0).astype(jnp.uint8), 1)

  def _decoded(
    self, packed: jax.Array, columns: int, scale: jax.Array
  ) -> jax.Array:
    signs = _bits.unpack(packed, 1, columns).astype(jnp.int32)
    return (2 * signs.astype(jnp.float32) - 1) * scale[:, None]


@dataclasses.dataclass(frozen=True)
class Ternary(_blocks.Blocked, _random.Rounding):
  r"""Sends -1, 0 or 1 for each entry, five to a byte, and the largest entry.

  .. math:: s = \max |x|, \qquad \mathrm{decode} = s \cdot \mathrm{sign}(x)
            \cdot b, \qquad b \sim \mathrm{Bernoulli}(|x| / s)

  for each block; the expectation is x, within 2**-17 s.  Rounding to the
  nearest has b = 1 where |x| > s / 2.  The error is at most s, and s / 2 for
  the nearest.  A block of zeros decodes to zeros, and one with an infinity or a
  NaN to infinities and NaN.  Float32 arrays become 20 times smaller with one
  scale, and 18.8 times in blocks of 320.

  Args:
    block: The number of entries that share a scale; multiples of 5 waste no
      bits.  None (default) means one scale for the array, as for the paper's
      layers.
    rounding: `"stochastic"` as in the paper, or `"nearest"`.

  >>> codec = Ternary(rounding="nearest")
  >>> payload, state = codec.encode(jnp.array([2.0, -1.5, 0.5]))
  >>> payload.codes[0].tolist()  # 2 + 3 * 0 + 9 * 1
  [[11]]
  >>> codec.decode(payload, state, jnp.zeros(3)).tolist()
  [2.0, -2.0, 0.0]

  Reference: W. Wen et al., TernGrad, NeurIPS 2017 (arXiv:1705.07878),
  equations 2 and 3.  Departures: a codec neither clips gradients at 2.5
  standard deviations nor shares the largest s among workers; nearest rounding
  and blocks are additions.
  """

  block: int | None = None
  rounding: Literal["nearest", "stochastic"] = "stochastic"

  # Without blocks: five codes fill a byte, and maxima have eight lanes.
  _row: ClassVar[int] = 240

  def __post_init__(self) -> None:
    self._check_rounding()
    _blocks.check_block(self.block)

  def granule(self) -> int:
    """Returns the block; without one, five."""
    return 5 if self.block is None else self.block

  def num_bits(self, like: _codec.Like) -> int:
    """Returns 8 for five entries of a block, and 32 for each scale."""
    shapes = _blocks.shapes(like.size, self.block, self._row)
    num_bytes = sum(rows * -(-columns // 5) for rows, columns in shapes)
    return 8 * num_bytes + 32 * _blocks.num_blocks(like.size, self.block)

  def _scales(self, pieces: list[jax.Array]) -> list[jax.Array]:
    return _blocks.scales("max_abs", pieces, self.block is None)

  def _encoded(
    self, rows: jax.Array, scale: jax.Array, key: Any, start: int
  ) -> jax.Array:
    noise = self._noise(key, rows.shape, start)
    v = _blocks.quotient(rows, scale)
    return _bits.pack_trits(_quantize.round_to_int(v, noise, -1, 1) + 1)

  def _decoded(
    self, packed: jax.Array, columns: int, scale: jax.Array
  ) -> jax.Array:
    trits = _bits.unpack_trits(packed, columns).astype(jnp.int32)
    return (trits.astype(jnp.float32) - 1) * scale[:, None]
