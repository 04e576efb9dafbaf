"""States that say themselves what they are, on their class.

A training loop, a checkpoint or a drain read there what they must know of a
state, a NamedTuple of arrays, and no table of types need know it:

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
  jumps: bool = False,
  streams: bool = False,
) -> Callable[[_T], _T]:
  """Declares what a state is, as attributes of its class.

  Args:
    shared: the fields that are equal on all workers, which a checkpoint stores
      once; a field whose value declares its own is left to that.
    rounds: it has a `clock`, an `anchor` at which rounds end, and `kept`: how
      far the worker stands beside it on purpose.
    drains: the transformation knows `Control(drain=True)`.
    averages: the transformation makes the workers' updates equal.
    update_pending: the last step's update comes with the next step.
    jumps: the transformation replaces parameters at times.
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
    "jumps": jumps,
    "streams": streams,
  }

  def decorate(state: _T) -> _T:
    unknown = flags["shared"] - set(getattr(state, "_fields", ()))  # type: ignore[operator]
    if unknown:
      raise ValueError(
        f"`shared` must name fields of {state.__name__}, got {sorted(unknown)}."
      )
    for name, value in flags.items():
      if name not in vars(state):  # A property may tell more than the class.
        setattr(state, name, value)
    return state

  return decorate
