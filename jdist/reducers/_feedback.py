"""Error feedback: what a message left out is fed into the next one.

A compressed mean of the workers' trees is not the mean of what they wanted to
say.  A feedback stands on both sides of it:

    x --prepare--> wanted --[reducer]--> mean, own_share --finish--> output

`wanted` is what a worker would send if bits were free, `own_share` what it has
sent; the difference stays with the worker.  Feedbacks are frozen dataclasses
without arrays, like codecs and reducers, and pure functions on trees.  What
they remember is float32 whatever the parameters are.

No number that is not finite stays in a memory: it becomes zero there (or the
old value stays, where that is what keeps workers together), and the state's
`nonfinite` counts the rounds in which that happened.
"""

import abc
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import optax

PyTree: TypeAlias = Any


class Feedback(abc.ABC):
  """The interface of feedback: the use of what a message leaves out.

  Attributes:
    keeps_rest: whether it remembers what of `wanted` is not in `own_share`, or
      what is; for reducers whose mean is made of the shares
      (`Reducer.averages`) only.
  """

  keeps_rest: ClassVar[bool] = True

  @abc.abstractmethod
  def init(self, like: PyTree) -> PyTree:
    """The first state: a NamedTuple of arrays.

    Args:
      like: one worker's tree of floats, arrays or `jax.ShapeDtypeStruct`.
    """

  @abc.abstractmethod
  def prepare(self, x: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
    """Returns what this worker wants to send, at least float32, and the state.

    Args:
      x: this worker's tree of floats.
      state: this worker's.
    """

  @abc.abstractmethod
  def finish(
    self, mean: PyTree, own_share: PyTree, wanted: PyTree, state: PyTree
  ) -> tuple[PyTree, PyTree]:
    """Returns the result, equal on all workers, and the state.

    Args:
      mean: the workers' mean of `own_share`, as all of them know it.
      own_share: what this worker has sent of `wanted`.
      wanted: what `prepare` returned.
      state: that `prepare` returned.
    """

  def keep_cast(self, left: PyTree, state: PyTree) -> PyTree:
    """Takes over what the mean lost in the cast to narrower leaves.

    By default nothing, for feedbacks whose output is kept wide.

    Args:
      left: the mean less what came out, finite, equal on all workers.
      state: this worker's, after `finish`.
    """
    del left
    return state

  def absorb(self, held: PyTree, state: PyTree) -> PyTree | None:
    """Takes over what owners hold back, so that a later mean has it.

    Args:
      held: what the mean has lacked, from `Reducer.release`, equal on all
        workers.
      state: this worker's.

    Returns:
      The state; None where there is no place for it.
    """
    del held, state
    return None


def check_feedback(name: str, value: Any) -> None:
  """Raises a ValueError unless `value` is a feedback or None."""
  if value is not None and not isinstance(value, Feedback):
    raise ValueError(
      f"`{name}` must be a feedback or None, for instance "
      f"`reducers.ErrorFeedback()`, got {value!r}."
    )


def wide(x: jax.Array) -> jax.Array:
  """At least float32."""
  return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def number(x: jax.typing.ArrayLike, like: jax.Array) -> jax.Array:
  """A hyper-parameter, in the dtype of what it multiplies."""
  # Injected hyper-parameters come in the parameters' dtype.
  return jnp.asarray(x).astype(like.dtype)


def zeros(like: PyTree) -> PyTree:
  """Float32 zeros, or wider."""

  def one(x: Any) -> jax.Array:
    return wide(jnp.zeros(jnp.shape(x), x.dtype))

  return jax.tree.map(one, like)


def added(tree: PyTree, held: PyTree) -> PyTree:
  """Adds what is held to a tree."""
  return jax.tree.map(lambda x, h: x + h.astype(x.dtype), tree, held)


def any_nonfinite(tree: PyTree) -> jax.Array:
  """Returns whether a number of a tree is not finite."""
  found = jnp.zeros((), bool)
  for x in jax.tree.leaves(tree):
    found |= ~jnp.isfinite(x).all()
  return found


def cleaned(tree: PyTree) -> tuple[PyTree, jax.Array]:
  """Zero where a number is not finite, and whether there was one."""
  cleaned = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0.0), tree)
  return cleaned, any_nonfinite(tree)


def counted(count: jax.Array, found: jax.Array) -> jax.Array:
  """One more, if it was found."""
  return jnp.where(found, optax.safe_increment(count), count)
