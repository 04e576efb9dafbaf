"""Declarations of states, on their classes, and the dtype of what they hold.

Training loops, checkpoints and drains read them from a state, a NamedTuple of
arrays, and need no table of types:

    @states.declare(shared=("step",), drains=True)
    class DelayState(NamedTuple):
      step: jax.Array
      pending: PyTree
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

_T = TypeVar("_T", bound=type)


def declare(
  *,
  shared: Iterable[str] = (),
  rounds: bool = False,
  drains: bool = False,
  averages: bool = False,
  update_pending: bool = False,
  streams: bool = False,
) -> Callable[[_T], _T]:
  """Declares the properties of a state, as attributes of its class.

  The declared state of a wrapper around a method with rounds also declares that
  the wrapper passes the method's updates on unchanged.

  Args:
    shared: Fields that are equal on all workers, so that a checkpoint stores
      them once.  Nested states with a declaration declare their own fields.
    rounds: Whether the state has a `clock`, an `anchor` at which rounds end,
      and `kept`, the worker's intended distance from the anchor.
    drains: Whether the transformation takes `Control(drain=True)`.
    averages: Whether the transformation makes the workers' updates equal.
    update_pending: Whether the last step's update is applied in the next step.
    streams: Whether a message is sent in parts, some in every step.

  Returns:
    A decorator of the class.

  Raises:
    ValueError: when `shared` names an unknown field.

  >>> from typing import NamedTuple
  >>> @declare(shared=("step",))
  ... class State(NamedTuple):
  ...   step: int
  >>> State.shared
  frozenset({'step'})
  """
  flags = {
    "shared": frozenset(shared),
    "rounds": rounds,
    "drains": drains,
    "averages": averages,
    "update_pending": update_pending,
    "streams": streams,
  }

  def decorate(state: _T) -> _T:
    # A typing error would silently store a leaf once per worker.
    unknown = flags["shared"] - set(getattr(state, "_fields", ()))  # type: ignore[operator]
    if unknown:
      raise ValueError(
        f"`shared` must name fields of {state.__name__}, got {sorted(unknown)}."
      )
    for name, value in flags.items():
      # A class may define one of them as a property instead.
      if name not in vars(state):
        setattr(state, name, value)
    return state

  return decorate


def wide_dtype(dtype: Any) -> Any:
  """Returns float32 for narrower floats, and any other dtype as it is.

  Anchors, residuals and sums over workers or micro-batches have this dtype:
  small steps would vanish in the rounding of a narrower one.

  >>> wide_dtype(jnp.bfloat16), wide_dtype(jnp.int8)
  (dtype('float32'), dtype('int8'))
  """
  dtype = jnp.dtype(dtype)
  # Integers are counts, and float64 must not become narrower.
  narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
  return jnp.dtype(jnp.float32) if narrow else dtype


def wide(x: jax.Array) -> jax.Array:
  """Casts an array to at least float32, see `wide_dtype`."""
  return x.astype(wide_dtype(x.dtype))


def wide_like(x: Any) -> jax.ShapeDtypeStruct:
  """Returns the shape of an array with its `wide_dtype`."""
  return jax.ShapeDtypeStruct(x.shape, wide_dtype(x.dtype))
