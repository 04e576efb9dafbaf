"""Small reducers with whole arrays in place of payloads, for the tests.

What a feedback, a schedule or a method does with a reducer is tested on these,
whose every number can be followed by hand.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jdist import collectives, reducers, states


class Plain(reducers.Reducer):
  """Everything, as it is."""

  def init(self, like, axis):
    return ()

  def reduce(self, tree, state, key, axis):
    own = jax.tree.map(
      lambda x: x if x.dtype.itemsize > 4 else x.astype(jnp.float32), tree
    )
    return reducers.Reduced(collectives.mean(tree, axis), own, state)

  def num_bits(self, like, num_workers):
    bits = sum(x.size * x.dtype.itemsize * 8 for x in jax.tree.leaves(like))
    return reducers.Bits(bits, bits)


def largest(x, k):
  """Zero but for the k largest entries."""
  flat = x.reshape(-1)
  _, chosen = jax.lax.top_k(jnp.abs(flat), min(k, flat.size))
  return jnp.zeros_like(flat).at[chosen].set(flat[chosen]).reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class Largest(Plain):
  """The k largest entries of each leaf."""

  k: int

  def reduce(self, tree, state, key, axis):
    return super().reduce(
      jax.tree.map(lambda x: largest(x, self.k), tree), state, key, axis
    )


@states.declare(shared=("seen", "residual"))
class OwnedState(NamedTuple):
  """What workers know together, what each has counted, and its residual."""

  seen: jax.Array
  mine: jax.Array
  residual: list[jax.Array]


@dataclasses.dataclass(frozen=True)
class Owned(reducers.Reducer):
  """Rounds the mean to whole numbers, and remembers what that left out.

  Like the owners of parts, except that every worker owns all.
  """

  step: float = 1.0

  def init(self, like, axis):
    zeros = [
      jnp.zeros(x.shape, x.dtype if x.dtype.itemsize > 4 else jnp.float32)
      for x in jax.tree.leaves(like)
    ]
    # A shape that depends on the number of workers.
    return OwnedState(
      jnp.zeros((), jnp.int32),
      jnp.zeros(collectives.size(axis), jnp.float32),
      zeros,
    )

  def reduce(self, tree, state, key, axis):
    leaves, structure = jax.tree.flatten(tree)
    means = collectives.mean(leaves, axis)
    wanted = [m + e for m, e in zip(means, state.residual, strict=True)]
    sent = [jnp.round(w / self.step) * self.step for w in wanted]
    residual = [w - s for w, s in zip(wanted, sent, strict=True)]
    mine = state.mine + collectives.index(axis).astype(jnp.float32)
    return reducers.Reduced(
      jax.tree.unflatten(structure, sent),
      tree,  # All of it has been handed over.
      OwnedState(state.seen + 1, mine, residual),
    )

  def num_bits(self, like, num_workers):
    raise NotImplementedError
