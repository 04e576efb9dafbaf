"""The interface of codecs, and the identity codec."""

import abc
import dataclasses
from typing import Any, ClassVar, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jdist import checks, signatures
from jdist.states import PyTree

Like: TypeAlias = jax.ShapeDtypeStruct | jax.Array


class Codec(signatures.Explained, abc.ABC):
  """An array -> a packed payload -> an array.

  Codecs are frozen dataclasses without arrays: they compare, hash and print by
  their settings, and are static in a compiled program.  All methods are pure,
  take one array of one worker, and work under `jit`, `vmap` and `shard_map`.
  They compute in float32 for arrays of every dtype.

  A payload is a tree of packed arrays of static shapes: a byte holds two
  four-bit codes or eight signs, and indices take the fewest bits.

  Attributes:
    linear: Whether the sum of the workers' payloads decodes to the sum of their
      arrays, so that an all-reduce can carry them.
    sparse: Whether it sends few of the array's entries, so that payloads are
      gathered and not re-encoded by an owner.
    contractive: Whether the error x - decode(encode(x)) is smaller than x, as
      error feedback needs.
    key: Which random key it needs: `"none"`, `"worker"` (each worker its own,
      as for stochastic rounding), or `"shared"` (all workers the same one, so
      that they choose the same entries).
  """

  linear: ClassVar[bool] = False
  sparse: ClassVar[bool] = False

  @property
  def contractive(self) -> bool:
    """Returns whether the error is smaller than the array."""
    return True

  @property
  def key(self) -> Literal["none", "worker", "shared"]:
    """Returns which random key it needs."""
    return "none"

  def granule(self) -> int:
    """Returns the unit of lengths at which a vector may be cut into parts.

    Payloads of parts then hold whole bytes and whole blocks.
    """
    return 1

  def check(self, like: Like) -> None:
    """Raises a ValueError for an array that it cannot encode."""
    check_float(like)

  def init(self, like: Like) -> PyTree:
    """Returns the first state: a tree of arrays, or `()` without a state."""
    del like
    return ()

  @abc.abstractmethod
  def encode(
    self, x: jax.Array, state: PyTree = (), key: jax.Array | None = None
  ) -> tuple[PyTree, PyTree]:
    """Packs a float array of any shape; returns a payload and the new state.

    The state is that of `init` or of the last `encode`; codecs that draw random
    numbers need a typed PRNG key.
    """

  @abc.abstractmethod
  def decode(self, payload: PyTree, state: PyTree, like: Like) -> jax.Array:
    """Unpacks a payload to an array of `like`'s shape and dtype."""

  def add_to(
    self, total: jax.Array, payload: PyTree, state: PyTree
  ) -> jax.Array:
    """Adds a decoded payload to a float32 array of the encoded shape."""
    # Sparse codecs override this, as they need not decode to a dense array.
    like = jax.ShapeDtypeStruct(total.shape, jnp.float32)
    return total + self.decode(payload, state, like)

  @abc.abstractmethod
  def num_bits(self, like: Like) -> int:
    """Returns the bits of a payload, scales and indices included."""


@dataclasses.dataclass(frozen=True)
class Dense(Codec):
  r"""Sends the array unchanged, in its shape and dtype.

  .. math:: \mathrm{decode}(\mathrm{encode}(x)) = x

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
  """Raises a ValueError for an array whose entries are no floats."""
  checks.check_array("like", like)
  if not jnp.issubdtype(like.dtype, jnp.floating):
    raise ValueError(
      f"`like` must be of a float dtype to be encoded, got {like.dtype} of "
      f"shape {like.shape}. Leave integers out, or send them uncompressed."
    )
