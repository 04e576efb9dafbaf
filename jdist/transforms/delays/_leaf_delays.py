"""Delays, as one number for all leaves or as a tree of numbers."""

from typing import Any

import jax

from jdist import checks

PyTree = Any


def check_steps(steps: PyTree) -> list[int]:
  """Returns the distinct delays of a tree in order, ints >= 0."""
  # An empty tree, and None in it, must be refused as well.
  leaves = jax.tree.leaves(steps, is_leaf=lambda x: x is None)
  return sorted(
    {
      checks.check_structural("steps", one, minimum=0)
      for one in leaves or [None]
    }
  )


def broadcast(steps: PyTree, tree: PyTree) -> PyTree:
  """Broadcasts delays to the leaves of a tree, of which they are a prefix.

  >>> broadcast({"a": 2, "b": 1}, {"a": (0.0, 0.0), "b": 0.0})
  {'a': (2, 2), 'b': 1}
  """
  try:
    return jax.tree.broadcast(steps, tree)
  except ValueError as error:
    given, wanted = map(jax.tree.structure, (steps, tree))
    raise ValueError(
      "`steps` must be a number, or a tree of numbers with the structure of "
      f"the parameters or a prefix of it, got {given} for {wanted}. Give a "
      "number for each part of the parameters."
    ) from error
