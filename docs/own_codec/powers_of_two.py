"""A codec outside of jdist: powers of two, in a byte each."""

import dataclasses

import jax.numpy as jnp

from jdist import codecs


@dataclasses.dataclass(frozen=True)
class Powers(codecs.Codec):
  """Rounds each entry to a power of two, in one byte."""

  def encode(self, x, state=(), key=None):
    """Returns the exponents and signs, uint8."""
    wide = x.astype(jnp.float32)
    exponent = jnp.round(jnp.log2(jnp.maximum(jnp.abs(wide), 2.0**-63)))
    code = jnp.clip(exponent + 64, 1, 127).astype(jnp.uint8)
    code = jnp.where(jnp.isfinite(wide), code, 0)  # A NaN must stay visible.
    return jnp.where(wide < 0, code + jnp.uint8(128), code), state

  def decode(self, payload, state, like):
    """Returns the powers."""
    code = (payload % 128).astype(jnp.float32)
    size = jnp.where(code > 0, jnp.exp2(code - 64), jnp.nan)
    signed = jnp.where(payload >= 128, -size, size)
    return signed.reshape(like.shape).astype(like.dtype)

  def num_bits(self, like):
    """Returns a byte for each entry."""
    return 8 * like.size
