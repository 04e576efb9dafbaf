"""Which random numbers a codec draws: for each leaf, worker, row and owner.

All workers come with the same key, one for each reduction.
"""

import jax

from jdist import codecs, collectives


def own(
  codec: codecs.Codec, key: jax.Array, axis: collectives.Axis
) -> jax.Array:
  """This worker's key, unless the codec wants the same on all."""
  if codec.key != "worker":
    return key
  return jax.random.fold_in(key, collectives.index(axis))


def numbered(
  codec: codecs.Codec, key: jax.Array, number: int
) -> jax.Array | None:
  """The key of a leaf; None for a codec that draws nothing."""
  if codec.key == "none":
    return None
  return jax.random.fold_in(key, number)


def of_rows(
  codec: codecs.Codec, key: jax.Array, number: int, axis: collectives.Axis
) -> jax.Array | None:
  """Keys for a worker's rows of a vector."""
  drawn = numbered(codec, own(codec, key, axis), 2 * number)
  return (
    None if drawn is None else jax.random.split(drawn, collectives.size(axis))
  )


def of_owner(
  codec: codecs.Codec, key: jax.Array, number: int, axis: collectives.Axis
) -> jax.Array | None:
  """The key of the owner of a vector's row, which is one of many."""
  drawn = numbered(codec, key, 2 * number + 1)
  return (
    None
    if drawn is None
    else jax.random.fold_in(drawn, collectives.index(axis))
  )
