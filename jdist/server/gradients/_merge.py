"""The one place where pushes are merged: a weighted sum in few programs."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jdist import transforms
from jdist.states import PyTree

# The pushes that one program sums: more arguments take longer to compile.
_MOST = 8


class Pushed(NamedTuple):
  """Content of a push.

  Attributes:
    grads: A worker's gradient, or the progress of its local steps.
    change: Change of its batch statistics, or the statistics; integers are
      always the new ones.
    read: With delay compensation, the parameters of the gradient; else None.
  """

  grads: PyTree
  change: PyTree
  read: PyTree = None


def narrowed(
  pushes: Sequence[Pushed],
  weights: Sequence[float],
  parts: Sequence[float],
  num_workers: int,
  now: PyTree = None,
  strength: float = 0.0,
) -> tuple[list[Pushed], Any]:
  """Returns few pushes and their factors, with the sum of all, for `merge`.

  A program is compiled for each number of pushes, which changes whenever a
  worker leaves or returns.  The numbers returned are therefore only halves,
  quarters and so on of the largest one.  `weights` are those of the gradients,
  `parts` those of the changes, whose sum is 1.
  """
  pushes, factors = list(pushes), _factors(tuple(weights), tuple(parts))
  if len(pushes) == 1:
    return pushes, factors
  while len(pushes) > _MOST:
    factors = np.asarray(factors)
    first = _partial_sum(pushes[:_MOST], factors[:, :_MOST], now, strength)
    pushes = [first, *pushes[_MOST:]]
    factors = np.insert(factors[:, _MOST:], 0, 1.0, axis=1)
  # A worker with several tasks may have several pushes in an update.
  largest = max(num_workers, len(pushes))
  width = min(w for w in widths(largest) if w >= len(pushes))
  if missing := width - len(pushes):
    # Copies of the last push, since the integers of the last one are returned.
    pushes += pushes[-1:] * missing
    factors = np.pad(factors, ((0, 0), (0, missing)))
  return pushes, factors


@functools.lru_cache(maxsize=64)
def _factors(weights: tuple[float, ...], parts: tuple[float, ...]) -> Any:
  if weights == (1.0,):
    return None
  # An array of NumPy would be copied to the device in each update; numbers of
  # Python would be cast there, by a program that has to be compiled.
  return jax.device_put(np.array([weights, parts], np.float32))


def forms(num_workers: int) -> list[tuple[int, Any]]:
  """Returns the numbers of pushes and factors for which programs differ."""
  found = [(w, np.zeros((2, w), np.float32)) for w in widths(num_workers)]
  return [*found, (1, None)]


def widths(num_workers: int) -> list[int]:
  """Returns the numbers of pushes that `narrowed` returns, largest first."""
  found = [min(num_workers, _MOST)]
  while found[-1] > 1:
    found.append(-(-found[-1] // 2))
  return found


def merge(
  pushes: Sequence[Pushed],
  factors: jax.Array | None,
  now: PyTree = None,
  strength: float = 0.0,
) -> Pushed:
  r"""Returns the weighted sum of pushes, in their order.

  .. math:: \Bigl(\sum_k w_k g_k, \; \sum_k p_k c_k\Bigr)

  Integers in c do not add up: those of the last push are returned.  Compiled
  updates call it: for small models the start of another program takes longer
  than the sum.

  The `factors` are w and p, [2, pushes], or None for one push as it is.  Pushes
  with `read` are compensated for their delay, by the parameters `now`.
  """

  def weighted(factors: jax.Array) -> Callable[..., jax.Array]:
    def total(*leaves: jax.Array) -> jax.Array:
      if not is_number(leaves[-1]):
        return leaves[-1]
      terms = [
        factor.astype(x.dtype) * x
        for factor, x in zip(factors, leaves, strict=True)
      ]
      # Every product but the first one is rounded together with its sum (XLA
      # makes it a fused multiply-add), for any number of pushes.
      terms[0] = jax.lax.optimization_barrier(terms[0])
      return functools.reduce(operator.add, terms)

    return total

  def compensated(push: Pushed) -> PyTree:
    if push.read is None:
      return push.grads
    return jax.tree.map(
      lambda g, new, old: transforms.compensated(g, strength, new, old),
      push.grads,
      now,
      push.read,
    )

  if factors is None:
    total = Pushed(compensated(pushes[0]), pushes[0].change)
  else:
    total = Pushed(
      jax.tree.map(weighted(factors[0]), *map(compensated, pushes)),
      jax.tree.map(weighted(factors[1]), *(push.change for push in pushes)),
    )
  # The same bits, whatever the optimizer does with them first.
  return jax.lax.optimization_barrier(total)


_partial_sum = jax.jit(merge, static_argnums=3)


def is_number(x: jax.Array) -> bool:
  """Returns whether an array is of real or complex numbers, not integers."""
  return bool(jnp.issubdtype(x.dtype, jnp.inexact))
