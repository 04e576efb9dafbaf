"""The one place where pushes are merged: a weighted sum, program by program."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any


class Pushed(NamedTuple):
  """Content of a push.

  Attributes:
    grads: a worker's gradient, or the progress of its local steps.
    change: change of its batch statistics, or the statistics; integers are
      always the new ones.
  """

  grads: PyTree
  change: PyTree


def merge(
  pushes: Sequence[Pushed], weights: Sequence[float], parts: Sequence[float]
) -> Pushed:
  r"""Returns the weighted sum of pushes, in their order.

  .. math:: \Bigl(\sum_k w_k g_k, \; \sum_k p_k c_k\Bigr)

  Integers in c do not add up: those of the last push are returned.

  Args:
    pushes: at least one.
    weights: weights w of the gradients, one for each push.
    parts: weights p of the changes, with the sum 1.
  """
  if len(pushes) == 1 and weights[0] == parts[0] == 1.0:
    return pushes[0]  # Each update of plain asynchronous SGD: a program less.
  total = None
  # One program for each number of pushes would be compiled anew whenever a
  # worker leaves; two programs serve all numbers.
  for pushed, weight, part in zip(pushes, weights, parts, strict=True):
    factors = np.float32(weight), np.float32(part)
    if total is None:
      total = _scale(pushed, *factors)
    else:
      total = _add(total, pushed, *factors)
  assert total is not None
  return total


def is_number(x: jax.Array) -> bool:
  """Returns whether an array is of real or complex numbers, not integers."""
  return bool(jnp.issubdtype(x.dtype, jnp.inexact))


@jax.jit
def _scale(pushed: Pushed, weight: jax.Array, part: jax.Array) -> Pushed:
  return Pushed(
    jax.tree.map(lambda g: weight.astype(g.dtype) * g, pushed.grads),
    jax.tree.map(
      lambda c: part.astype(c.dtype) * c if is_number(c) else c, pushed.change
    ),
  )


@jax.jit
def _add(
  total: Pushed, pushed: Pushed, weight: jax.Array, part: jax.Array
) -> Pushed:
  own = _scale(pushed, weight, part)
  return Pushed(
    jax.tree.map(jnp.add, total.grads, own.grads),
    jax.tree.map(
      lambda t, c: t + c if is_number(c) else c, total.change, own.change
    ),
  )
