"""The interface of codecs: an array, packed and unpacked."""

import abc
import dataclasses
from typing import Any, ClassVar, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

PyTree: TypeAlias = Any
Like: TypeAlias = jax.ShapeDtypeStruct | jax.Array


class Codec(abc.ABC):
  """An array -> a packed payload -> an array.

  Codecs are frozen dataclasses without arrays: they compare, hash and print
  by their settings, and are static in a compiled program.  All their methods
  are pure, for one array of one worker, and work under `jit`, `vmap` and
  `shard_map`.  They compute in float32 whatever the array's dtype is.

  A payload is a tree of arrays of static shapes, packed for good: four-bit
  codes two to a byte, signs eight, indices in the fewest bits.

  Attributes:
    linear: whether the sum of the workers' payloads decodes to the sum of
      their arrays, so that an all-reduce can carry them.
    sparse: whether it sends a few of the array's entries, so that payloads
      are gathered and not re-encoded by an owner.
    contractive: whether what it leaves out of an array, x - decode(encode(x)),
      is smaller than x, as error feedback needs.
    key: whose random numbers it draws: `"none"`, `"worker"` (each worker its
      own, as for stochastic rounding), or `"shared"` (all the same, so that
      they choose the same entries).
  """

  linear: ClassVar[bool] = False
  sparse: ClassVar[bool] = False

  @property
  def contractive(self) -> bool:
    """Returns whether what it leaves out is smaller than the array."""
    return True

  @property
  def key(self) -> Literal["none", "worker", "shared"]:
    """Whose random numbers it draws."""
    return "none"

  def granule(self) -> int:
    """A vector may be cut at multiples of this and its parts encoded alone.

    The parts' payloads then hold whole bytes and whole blocks.
    """
    return 1

  def check(self, like: Like) -> None:
    """Raises a ValueError, with the reason, for an array it does not suit."""
    check_float(like)

  def init(self, like: Like) -> PyTree:
    """The first state: a tree of arrays, `()` where nothing is kept."""
    del like
    return ()

  @abc.abstractmethod
  def encode(
    self, x: jax.Array, state: PyTree = (), key: jax.Array | None = None
  ) -> tuple[PyTree, PyTree]:
    """Packs a float array of any shape; returns a payload and the new state.

    Args:
      x: the array.
      state: what `init` or the last `encode` returned.
      key: a typed PRNG key, for a codec that draws random numbers.
    """

  @abc.abstractmethod
  def decode(self, payload: PyTree, state: PyTree, like: Like) -> jax.Array:
    """Unpacks what `encode` made to an array of `like`'s shape and dtype."""

  def add_to(
    self, total: jax.Array, payload: PyTree, state: PyTree
  ) -> jax.Array:
    """Adds what a payload holds to a float32 array of the encoded shape."""
    like = jax.ShapeDtypeStruct(total.shape, jnp.float32)
    return total + self.decode(payload, state, like)

  @abc.abstractmethod
  def num_bits(self, like: Like) -> int:
    """Counts the bits of a payload, scales and indices included."""


@dataclasses.dataclass(frozen=True)
class Dense(Codec):
  r"""Sends the array as it is.

  .. math:: \mathrm{decode}(\mathrm{encode}(x)) = x

  The payload is the array, in its own shape and dtype; the identity among
  codecs.

  >>> Dense().num_bits(jax.ShapeDtypeStruct((3,), jnp.float32))
  96
  """

  linear: ClassVar[bool] = True

  def encode(
    self, x: jax.Array, state: Any = (), key: jax.Array | None = None
  ) -> tuple[jax.Array, Any]:
    del key
    return x, state

  def decode(self, payload: jax.Array, state: Any, like: Like) -> jax.Array:
    del state
    return payload.astype(like.dtype).reshape(like.shape)

  def num_bits(self, like: Like) -> int:
    return like.size * 8 * np.dtype(like.dtype).itemsize


def check_float(like: Like) -> None:
  """Raises a ValueError for an array that is not of floats."""
  if not jnp.issubdtype(like.dtype, jnp.floating):
    raise ValueError(
      f"`like` must be of a float dtype to be encoded, got {like.dtype} of "
      f"shape {like.shape}. Leave integers out, or send them uncompressed."
    )
