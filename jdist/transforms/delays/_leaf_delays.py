"""Numbers of delays, one for all leaves or in a tree of them."""

from typing import Any

import jax
import jax.numpy as jnp

from jdist import checks

PyTree = Any


def check_steps(steps: PyTree) -> list[int]:
  """Returns the different delays of a tree; a ValueError for no ints >= 0."""
  leaves = jax.tree.leaves(steps, is_leaf=lambda x: x is None)
  return sorted(
    {
      checks.check_structural("steps", one, minimum=0)
      for one in leaves or [None]
    }
  )


def broadcast(name: str, prefix: PyTree, tree: PyTree) -> PyTree:
  """Gives each leaf of a tree its value of a prefix tree.

  >>> broadcast("steps", {"a": 2, "b": 1}, {"a": (0.0, 0.0), "b": 0.0})
  {'a': (2, 2), 'b': 1}
  """
  try:
    return jax.tree.broadcast(prefix, tree)
  except ValueError as error:
    given, wanted = map(jax.tree.structure, (prefix, tree))
    raise ValueError(
      f"`{name}` must be a number, or a tree of numbers with the structure of "
      f"the parameters or a prefix of it, got {given} for {wanted}. Give a "
      "number for each part of the parameters."
    ) from error


def ring(steps: int, first: jax.Array) -> Any:
  """Makes a leaf's last arrays [steps, ...], all of them the first."""
  if not steps:
    return ()  # An array of size zero cannot be saved.
  first = jnp.asarray(first)
  return jnp.full((steps, *first.shape), first, first.dtype)
