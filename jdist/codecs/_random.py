"""Random bits for rounding, for a few instructions an entry.

JAX's own generator is strong and slow: bits for a 16 MiB tensor take the time
of about thirty copies of it on a CPU, most of a compressed step.  Here the key
gives two words, and a mixing function of these and the entry's index gives the
bits, fused into the loop that rounds.  Over the keys the bits of an entry are
exactly uniform, so that rounding is unbiased; the independence of entries is as
good as the mixing function.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jdist import checks
from jdist.codecs import _codec


class Rounding(_codec.Codec):
  """A codec that rounds to the nearest level, or stochastically."""

  rounding: Literal["nearest", "stochastic"]

  def _check_rounding(self) -> None:
    checks.check_choice("rounding", self.rounding, ("nearest", "stochastic"))

  def _noise(
    self, key: jax.Array | None, shape: tuple[int, ...], start: int
  ) -> jax.Array | None:
    """Returns the noise to add before rounding; None rounds to nearest."""
    if self.rounding == "nearest":
      return None
    return offsets(require(key, self), shape, start)

  @property
  def key(self) -> Literal["none", "worker", "shared"]:
    """Returns `"worker"` for stochastic rounding."""
    return "worker" if self.rounding == "stochastic" else "none"


def require(key: jax.Array | None, codec: _codec.Codec) -> jax.Array:
  """Returns the key; raises a ValueError without one."""
  if not isinstance(key, jax.Array):
    own = "Give each worker its own: `jax.random.fold_in(key, worker_index)`."
    same = "Give all workers the same one."
    raise ValueError(
      f"`key` must be a typed PRNG key for {codec}, got {checks.show(key)}. "
      f"{same if codec.key == 'shared' else own}"
    )
  return key


def bits16(
  key: jax.Array, shape: tuple[int, ...], offset: int = 0
) -> jax.Array:
  """Returns uniform integers in 0..65535, uint32.

  `offset` is the index of the first one.  The mixing function is "lowbias32"
  with the constants of its second search (C. Wellons, hash-prospector).
  """
  seeds = jax.random.bits(key, (2,), jnp.uint32)
  index = jnp.full(shape, offset, jnp.uint32)
  # The index in the flat array, without a reshape that would break fusion.
  stride = 1
  for axis in reversed(range(len(shape))):
    steps = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    index = index + steps * np.uint32(stride)
    stride *= shape[axis]
  # Each step is one-to-one on words, and so is the exclusive or with a random
  # word, which makes the result exactly uniform over the keys.
  word = index * np.uint32(0x9E3779B9) + seeds[0]
  word = (word ^ (word >> np.uint32(16))) * np.uint32(0x21F0AAAD)
  word = (word ^ (word >> np.uint32(15))) * np.uint32(0x735A2D97)
  word = (word ^ (word >> np.uint32(15))) ^ seeds[1]
  return word >> np.uint32(16)


def offsets(
  key: jax.Array, shape: tuple[int, ...], offset: int = 0
) -> jax.Array:
  """Returns uniform float32 in (-1/2, 1/2), symmetric, in steps of 2**-16."""
  bits = bits16(key, shape, offset).astype(jnp.int32).astype(jnp.float32)
  return (bits - np.float32(32767.5)) * np.float32(2.0**-16)
