"""16 bits for each entry in place of 32."""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jdist import checks
from jdist.codecs import _blocks, _codec, _random


@dataclasses.dataclass(frozen=True)
class Cast(_random.Rounding):
  """Sends 16 bits for each entry.

  The payload is the array in its shape, as `dtype`.  It is `linear`: an
  all-reduce of payloads is the sum of the arrays, **but partial sums are
  rounded too**, to `dtype`, in an order that the hardware chooses.  The error
  grows with the number of workers, and a float16 sum may overflow although no
  worker's array did.  Gather payloads that must be summed in float32.  XLA's
  CPU compiler widens 16-bit sums and gathers to float32; payloads that are only
  gathered or permuted stay 16 bits wide on every platform as
  `jax.lax.bitcast_convert_type(payload, jnp.uint16)`, without loss.

  Entries beyond float16's largest finite number, 65504, become that number with
  their sign; infinities and NaN are kept.  For bfloat16 the same holds beyond
  3.39e38.  Entries below float16's smallest normal number, 6.1e-5, have an
  absolute error of up to 3e-8, and may become zero on hardware that flushes
  denormal numbers.

  Args:
    dtype: `"bfloat16"` (8 bits of exponent, relative error up to 2**-8 for
      nearest and 2**-7 for stochastic rounding) or `"float16"` (5 bits,
      2**-11).
    rounding: `"nearest"`, ties to even, or `"stochastic"` for bfloat16, which
      rounds up with the probability of the distance to the lower neighbour, so
      that the expectation is x for entries up to 3.39e38.  The default is
      nearest, which is better with error feedback.

  Raises:
    ValueError: For another dtype, and for float16 with stochastic rounding.

  >>> payload, state = Cast("float16").encode(jnp.array([1.5, -1e9]))
  >>> payload.tolist()
  [1.5, -65504.0]
  """

  dtype: Literal["bfloat16", "float16"] = "bfloat16"
  rounding: Literal["nearest", "stochastic"] = "nearest"

  linear: ClassVar[bool] = True

  def __post_init__(self) -> None:
    checks.check_choice("dtype", self.dtype, ("bfloat16", "float16"))
    self._check_rounding()
    if self.rounding == "stochastic" and self.dtype != "bfloat16":
      raise ValueError(
        "`rounding` must be 'nearest' for float16, got 'stochastic'. Use "
        "`dtype='bfloat16'`, or `Quantize(16, rounding='stochastic')`."
      )

  def encode(
    self, x: jax.Array, state: Any = (), key: jax.Array | None = None
  ) -> tuple[jax.Array, Any]:
    if x.dtype.kind in "biuc":  # Each trace would pay for another call.
      self.check(x)
    x = x.astype(jnp.float32)
    if self.rounding == "stochastic":
      return _round_bfloat16(x, _random.require(key, self)), state
    return _blocks.narrow(x, jnp.dtype(self.dtype)), state

  def decode(
    self, payload: jax.Array, state: Any, like: _codec.Like
  ) -> jax.Array:
    """Widens a payload or a sum of payloads."""
    del state
    wide = payload.astype(jnp.float32).reshape(like.shape)
    return _blocks.narrow(wide, like.dtype)

  def num_bits(self, like: _codec.Like) -> int:
    """Returns 16 bits for each entry."""
    return 16 * like.size


def _round_bfloat16(x: jax.Array, key: jax.Array) -> jax.Array:
  """Adds 16 random bits below bfloat16's last one and cuts them off."""
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  noise = _random.bits16(key, x.shape)
  magnitude = bits & np.uint32(0x7FFFFFFF)
  # A carry into the exponent rounds to the next power of two, which is right;
  # a carry to infinity is not.
  rounded = jnp.minimum(magnitude + noise, np.uint32(0x7F7FFFFF))
  # A NaN that has bits below the cut alone would become infinity.
  special = jnp.where(
    magnitude > np.uint32(0x7F800000), np.uint32(0x7FC00000), magnitude
  )
  finite = magnitude < np.uint32(0x7F800000)
  magnitude = jnp.where(finite, rounded, special)
  sign = bits & np.uint32(0x80000000)
  high = ((sign | magnitude) >> np.uint32(16)).astype(jnp.uint16)
  return jax.lax.bitcast_convert_type(high, jnp.bfloat16)
