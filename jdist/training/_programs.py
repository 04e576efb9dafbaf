"""The programs of a step, and which one is next.

How many sub-tensors a step sends shapes its program, and so does whether it
ends a round.  A streamed method whose interval adapts is compiled for a few
numbers, one whose rounds the host ends for both cases, and the host takes the
program that fits, without waiting for the device: the state says which
intervals the next two updates have.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax

from jdist import transforms


class Variant(NamedTuple):
  """What a step is compiled for.

  Attributes:
    steps: the number of steps in which a message is sent; "usual", as the
      optimizer has it; None, at once at the round's end.
    ends: whether the step ends its round; None where the device decides.
    idle: whether all of the message has been sent before; then `steps` is
      None, and the round's end sends nothing.
  """

  steps: int | Literal["usual"] | None = "usual"
  ends: bool | None = None
  idle: bool = False


USUAL = Variant()


class Variants:
  """Which programs there are."""

  def __init__(self, stream_steps: Sequence[int], *, host_rounds: bool = False):
    """Checks the numbers of steps."""
    wrong = [
      s for s in stream_steps if isinstance(s, bool) or not isinstance(s, int)
    ]
    if wrong or any(s < 1 for s in stream_steps):
      raise ValueError(
        "`stream_steps` must be ints >= 1, the numbers of steps in which a "
        f"message may be sent, got {tuple(stream_steps)}."
      )
    self.stream_steps = tuple(sorted(set(stream_steps)))
    self.host_rounds = host_rounds

  @property
  def all(self) -> tuple[Variant, ...]:
    """All programs that may be needed; what is sent at once comes first."""
    told = (True, False) if self.host_rounds else (None,)
    if not self.stream_steps:
      return tuple(Variant("usual", ends) for ends in told)
    # Rounds that are not delayed the device ends in any case.
    at_once = dict.fromkeys((None, *told))
    return (
      *(Variant(None, ends) for ends in at_once),
      *(Variant(s, ends) for s in self.stream_steps for ends in told),
    )

  def ahead(self, opt_state: Any) -> jax.Array | None:
    """Intervals and offsets of the next two steps; None if nobody asks.

    Raises:
      ValueError: when the host is to end rounds that it cannot end, or to
        choose for a method that streams nothing.
    """
    if self.stream_steps and transforms.stream_steps(opt_state) is None:
      raise ValueError(
        "`stream_steps` must be empty for an optimizer that streams nothing, "
        f"got {self.stream_steps}: each is a program, and none would run. "
        "Leave it out, or build the optimizer with `stream=Stream()`, which "
        "`msdpu` and `local_steps(..., delay_rounds=1)` take."
      )
    if not self.host_rounds:
      return transforms.stream_steps(opt_state)
    found = transforms.rounds_ahead(opt_state)
    if found is None:
      raise ValueError(
        "`host_rounds` must be False for an optimizer that does not take "
        "`round_ends`, got True. Those of `local_steps` do: `local_sgd`, "
        "`diloco`, `msdpu`."
      )
    return found

  def choose(self, interval: int, offset: int) -> Variant:
    """The variant of one step.

    Args:
      interval: local steps of its round; 0 for a round without a delay.
      offset: how many of them came before it.

    >>> variants = Variants((1, 2, 4, 8))
    >>> variants.choose(6, 0).steps, variants.choose(6, 4).idle
    (4, True)
    >>> variants.choose(0, 0)
    Variant(steps=None, ends=None, idle=False)
    >>> variants = Variants((), host_rounds=True)
    >>> variants.choose(2, 0).ends, variants.choose(2, 1).ends
    (False, True)
    """
    ends = offset + 1 >= interval if self.host_rounds else None
    if not self.stream_steps:
      return Variant("usual", ends)
    fitting = [s for s in self.stream_steps if s <= interval]
    if not fitting:
      return Variant(None)
    if offset < fitting[-1]:
      return Variant(fitting[-1], ends)
    return Variant(None, ends, idle=True)

  def options(self, variant: Variant) -> dict[str, Any]:
    """What the step is given for it."""
    given: dict[str, Any] = {}
    if variant.steps != "usual":
      given["stream_steps"] = variant.steps
    if variant.ends is not None:
      given["round_ends"] = variant.ends
    return given

  def program(self, variant: Variant) -> Variant:
    """The variant whose program it runs."""
    return variant._replace(idle=False)
