"""The programs of a step, and which one is next.

How many sub-tensors a step sends shapes its program, and so does whether it
ends a round.  The host chooses without waiting for the device: the state says
where in their rounds the next two updates are.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jdist import checks, transforms

# Nothing is said: the device ends rounds.
DEVICE = transforms.Control()


class Choice(NamedTuple):
  """The static arguments for which a step is compiled."""

  control: transforms.Control = DEVICE
  idle: bool = False  # The round's end sends nothing: all was sent before.


class Programs:
  """The programs of a run, and the choice between them."""

  def __init__(
    self, stream_steps: Sequence[int], host_rounds: bool | None = None
  ):
    """Checks the numbers of steps; `host_rounds` is None where the host can."""
    found = {
      checks.check_int(f"stream_steps[{i}]", number, 1)
      for i, number in enumerate(
        checks.check_list("stream_steps", stream_steps, "ints >= 1")
      )
    }
    self.stream_steps = tuple(sorted(found))
    self.host_rounds = host_rounds

  def for_state(self, opt_state: Any) -> "Programs":
    """Decides for a state, or its shapes, whether the host ends its rounds."""
    if self.stream_steps and not transforms.streams(opt_state):
      raise ValueError(
        "`stream_steps` must be empty for an optimizer that streams nothing, "
        f"got {self.stream_steps}: each is a program, and none would run. "
        "Leave it out, or build the optimizer with "
        "`overlap=Delayed(stream=Stream())`."
      )
    can = jax.eval_shape(transforms.rounds_ahead, opt_state) is not None
    if self.host_rounds and not can:
      raise ValueError(
        "`host_rounds` must be False for an optimizer whose rounds no host "
        "ends, got True. Leave it out: the loop ends rounds where it can."
      )
    ends = can if self.host_rounds is None else self.host_rounds
    return Programs(self.stream_steps, ends)

  def needed(self, due: int, undelayed: bool) -> tuple[Choice, ...]:
    """Returns the programs that a run may need: those of all places.

    A mean arrives after `due` updates of a round, 0 for all of them; the device
    ends first rounds that are `undelayed`.  The programs of fragments are too
    many; they are compiled when needed.
    """
    places = [(-1, 0, 1)] if undelayed else []
    for interval in range(1, max(due, *self.stream_steps, 1) + 3):
      window = min(interval, due) or interval
      places += [(window, offset, interval) for offset in range(interval)]
    chosen = [self._one(*place) for place in places]
    return tuple({choice.control: choice for choice in chosen}.values())

  @property
  def at_once(self) -> tuple[Choice, ...]:
    """The programs of rounds whose means are sent when they are due."""
    if self.stream_steps or not self.host_rounds:
      return (self._one(-1, 0, 1),)
    return (self._one(1, 0, 1), self._one(2, 0, 2))

  def fragments_at_once(self, fragments: int) -> Choice:
    """Chooses for fragments that the device sends whole, when they are due."""
    if not self.stream_steps:
      return Choice()
    one = transforms.Control(stream_steps=None)
    return Choice(transforms.Control(fragments=(one,) * fragments))

  def choose(self, place: np.ndarray) -> Choice:
    """Chooses the program of one step.

    Its place is window, offset and interval of the update, [3] or
    [fragments, 3]; see `transforms.rounds_ahead`.

    >>> programs = Programs((1, 2, 4, 8), False)
    >>> programs.choose(np.array([6, 0, 6])).control.stream_steps
    4
    >>> programs.choose(np.array([6, 4, 6])).idle
    True
    """
    if place.ndim == 1:
      return self._one(*map(int, place))
    each = [self._one(*map(int, row)) for row in place]
    if not self.host_rounds and not self.stream_steps:
      return Choice()
    return Choice(
      transforms.Control(fragments=tuple(one.control for one in each)),
      all(one.idle for one in each),
    )

  def _one(self, window: int, offset: int, interval: int) -> Choice:
    host_ends = self.host_rounds and window >= 0
    steps: Any = "fixed"
    idle = False
    if self.stream_steps:
      fitting = [s for s in self.stream_steps if s <= window]
      steps = fitting[-1] if fitting and offset < fitting[-1] else None
      # Of a window that no number fits into, the round's end sends.
      idle = steps is None and (bool(fitting) or window == 0)
    control = transforms.Control(
      round_ends=offset + 1 >= interval if host_ends else None,
      arrives=offset + 1 == window if host_ends else None,
      stream_steps=steps,
    )
    return Choice(control, idle)
