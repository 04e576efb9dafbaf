"""Declarations of states, on their classes.

A training loop, a checkpoint or a drain reads them off a state, a NamedTuple of
arrays, and needs no table of types:

    @states.declare(shared=("step",), drains=True)
    class DelayState(NamedTuple):
      step: jax.Array
      pending: PyTree
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

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

  A declared state of a transformation that stands around a method with rounds
  also says that it passes the method's updates on as they are.

  Args:
    shared: the fields that are equal on all workers, which a checkpoint stores
      once; fields of a nested state with its own declaration are left to it.
    rounds: it has a `clock`, an `anchor` at which rounds end, and `kept`, the
      worker's intended distance from the anchor.
    drains: the transformation takes `Control(drain=True)`.
    averages: the transformation makes the workers' updates equal.
    update_pending: the last step's update is applied in the next step.
    streams: a message is sent in parts, some in every step.

  Returns:
    A decorator of the class.

  Raises:
    ValueError: when `shared` names no field.

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
    unknown = flags["shared"] - set(getattr(state, "_fields", ()))  # type: ignore[operator]
    if unknown:
      raise ValueError(
        f"`shared` must name fields of {state.__name__}, got {sorted(unknown)}."
      )
    for name, value in flags.items():
      if name not in vars(state):  # A property of its own stays.
        setattr(state, name, value)
    return state

  return decorate
