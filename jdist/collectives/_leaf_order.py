"""The paths of a tree's leaves, their order by priority, and their hashes."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jdist import checks, states
from jdist.states import PyTree

# An order of leaves: from the front, from the back, or by a key of their paths.
Order: TypeAlias = Literal["front_first", "back_first"] | Callable[[str], Any]
# They are odd, and a product with an odd number loses no bit modulo 2**32.
_MULTIPLIERS, _MIXERS = (0x9E3779B1, 0x85EBCA77), (0x7FEB352D, 0x846CA68B)


def leaf_paths(tree: PyTree) -> tuple[str, ...]:
  """Returns the paths of a tree's leaves.

  >>> leaf_paths({"dense": {"bias": 1, "kernel": 2}})
  ('dense/bias', 'dense/kernel')
  """
  return tuple(
    jax.tree_util.keystr(path, simple=True, separator="/")
    for path, _ in jax.tree_util.tree_leaves_with_path(tree)
  )


def check_order(order: Order) -> None:
  """Raises a ValueError unless `order` orders leaves."""
  named = isinstance(order, str) and order in ("front_first", "back_first")
  # A type such as `str` orders leaves by their paths.
  takes = isinstance(order, type) or checks.is_function(order, 1)
  if not named and not takes:
    raise ValueError(
      "`order` must be 'front_first', 'back_first' or a function of a leaf's "
      f"path, got {checks.show(order)}."
    )


def check_numbers(order: Any, num_leaves: int) -> list[int]:
  """Returns the leaves' numbers; raises unless each occurs once."""
  numbers = checks.check_list("order", order, "the leaves' numbers")
  if not all(isinstance(x, int | np.integer) for x in numbers) or sorted(
    numbers
  ) != list(range(num_leaves)):
    raise ValueError(
      "`order` must have the number of each leaf once, of "
      f"{num_leaves} from 0, got {checks.show(tuple(numbers))}. A leaf that is "
      "not in it would not be sent."
    )
  return numbers


def leaf_order(tree: PyTree, order: Order) -> tuple[int, ...]:
  """Sorts the numbers of a tree's leaves, the most urgent leaf first.

  >>> leaf_order({"a": 1, "b": 2}, "back_first")
  (1, 0)
  """
  check_order(order)
  paths = leaf_paths(tree)
  numbers = range(len(paths))
  if not callable(order):
    return tuple(numbers if order == "front_first" else reversed(numbers))
  keys = [checks.call("order", order, path) for path in paths]
  try:
    return tuple(sorted(numbers, key=keys.__getitem__))
  except TypeError as error:
    raise ValueError(
      "`order` must give keys that can be compared with each other, got "
      f"{keys[:3]}: {error}."
    ) from error


def check_leaves(tree: PyTree, like: PyTree, what: str) -> None:
  """Raises a ValueError unless a tree has the leaves of another, by shape.

  Anything may stand for the gradient of an integer.
  """
  structures = [jax.tree.structure(t) for t in (tree, like)]
  for name, one in ((what.strip("`"), tree), ("params", like)):
    checks.check_arrays(name, one)
  if [jnp.shape(x) for x in jax.tree.leaves(tree)] == [
    jnp.shape(x) for x in jax.tree.leaves(like)
  ] and str(structures[0]) == str(structures[1]):
    return
  named, wanted = map(checks.named_leaves, (tree, like))
  ours = {
    name: x
    for name, x in wanted.items()
    if jnp.issubdtype(jnp.result_type(x), jnp.inexact)
  }
  rest = wanted.keys() - ours.keys()
  rule = f"{what} must be a tree like the parameters"
  remedy = "Take the loss's gradient by these very parameters."
  given = {name: x for name, x in named.items() if name not in rest}
  checks.check_form(rule, given, ours, remedy)
  # An integer's gradient may be missing.
  left_out = _left_out(tree), _left_out(like)
  if not rest or left_out[0] != left_out[1]:
    raise ValueError(
      f"{rule}, but it is {checks.show(structures[0])} and not "
      f"{checks.show(structures[1])}. {remedy}"
    )


def _left_out(tree: PyTree) -> Any:
  """Returns a tree's structure, in which missing leaves are leaves."""
  return jax.tree.structure(
    tree, is_leaf=lambda x: x is None or isinstance(x, optax.MaskedNode)
  )


def fingerprint(tree: PyTree) -> jax.Array:
  """Hashes the bits of every leaf of one worker's tree.

  The sum over a leaf's words of a hash of `word + position * multiplier`,
  modulo 2**32, with two multipliers, uint32 [leaves, 2]: a changed word always
  changes it, and two leaves that differ otherwise agree with a chance of about
  2**-64.  It is a sum of integers, so neither sharding nor order matters.

  >>> same = fingerprint([jnp.array([1.0, 2.0]), jnp.array([1.0, 2.0])])
  >>> bool((same[0] == same[1]).all())
  True
  >>> swapped = fingerprint([jnp.array([2.0, 1.0])])
  >>> bool((same[0] == swapped[0]).any())
  False
  """
  rows = [_hash(x) for x in jax.tree.leaves(tree)]
  return jnp.stack(rows) if rows else jnp.zeros((0, 2), jnp.uint32)


def _hash(x: jax.Array) -> jax.Array:
  x = states.key_words(x)
  if jnp.iscomplexobj(x):
    x = jnp.stack([x.real, x.imag])
  if x.dtype.itemsize == 1:  # There are numbers of fewer bits, too.
    floats = jnp.issubdtype(x.dtype, jnp.floating)
    x = x.astype(jnp.float32 if floats else jnp.int32)
  width = jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32
  words = jax.lax.bitcast_convert_type(x, width).astype(jnp.uint32)
  # Positions are computed along each dimension, because a sharded leaf would
  # have to be gathered before it is flattened.
  position = jnp.zeros(words.shape, jnp.uint32)
  stride = 1
  for dim in reversed(range(words.ndim)):
    step = jnp.uint32(stride % 2**32)
    position += jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim) * step
    stride *= words.shape[dim]

  def total(multiplier: int) -> jax.Array:
    # Weighted words alone have equal sums for many pairs of positions.
    x = words + (position + 1) * jnp.uint32(multiplier)
    for factor in _MIXERS:
      x = (x ^ (x >> 16)) * jnp.uint32(factor)
    return jnp.sum(x ^ (x >> 16), dtype=jnp.uint32)

  return jnp.stack([total(m) for m in _MULTIPLIERS])
