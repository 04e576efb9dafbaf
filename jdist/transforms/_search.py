"""Searching the state of a chain, for those who know only what they look for.

What is where among all methods is in `_found`, which knows them all and so
cannot be asked by them.
"""

from collections.abc import Callable
from typing import Any

import jax

PyTree = Any


def contains(state: PyTree, is_one: Callable[[Any], bool]) -> bool:
  """Whether a part of a state is such a one, the state itself included.

  >>> contains({"a": (1, 2.0)}, lambda x: isinstance(x, float))
  True
  """
  return any(map(is_one, jax.tree.leaves(state, is_leaf=is_one)))
