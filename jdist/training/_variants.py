"""The programs of a step, and which one is next.

How many sub-tensors a step sends shapes its program, and so does whether it
ends a round.  A streamed method whose interval adapts is compiled for a few
numbers, one whose rounds the host ends for both cases, and the host takes the
program that fits, without waiting for the device: the state says which
intervals the next two updates have.
"""

from collections.abc import Sequence
from typing import Any, Literal

import jax

from jdist import transforms

# What a step is compiled for: the number of steps in which a message is sent;
# "usual", as the optimizer has it; None, at once; or "idle", when all of it
# has been sent. Or for one that goes on with a round or ends it.
Variant = int | Literal["usual", "idle", "on", "end"] | None


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
    if stream_steps and host_rounds:
      raise ValueError(
        "`host_rounds` must be False where something is streamed, got True "
        f"and stream_steps={tuple(stream_steps)}. A streamed round ends when "
        "all of it has arrived."
      )
    self.stream_steps = tuple(sorted(set(stream_steps)))
    self.host_rounds = host_rounds

  @property
  def all(self) -> tuple[Variant, ...]:
    """All that may be needed; what is sent at once comes first."""
    if self.host_rounds:
      return ("end", "on")
    if not self.stream_steps:
      return ("usual",)
    return (None, *self.stream_steps)

  def ahead(self, opt_state: Any) -> jax.Array | None:
    """Intervals and offsets of the next two steps; None if nobody asks.

    Raises:
      ValueError: when the host is to end rounds that it cannot end.
    """
    if not self.host_rounds:
      return transforms.stream_steps(opt_state)
    found = transforms.rounds_ahead(opt_state)
    if found is None:
      raise ValueError(
        "`host_rounds` must be False for an optimizer that does not take "
        "`round_ends`, got True. Those of `local_steps` without `stream` do: "
        "`local_sgd`, `diloco`, `msdpu`."
      )
    return found

  def choose(self, interval: int, offset: int) -> Variant:
    """The program of one step.

    Args:
      interval: local steps of its round; 0 for a round without a delay.
      offset: how many of them came before it.

    >>> variants = Variants((1, 2, 4, 8))
    >>> variants.choose(6, 0), variants.choose(6, 4), variants.choose(0, 0)
    (4, 'idle', None)
    >>> variants = Variants((), host_rounds=True)
    >>> variants.choose(2, 0), variants.choose(2, 1)
    ('on', 'end')
    """
    if self.host_rounds:
      return "end" if offset + 1 >= interval else "on"
    if not self.stream_steps:
      return "usual"
    fitting = [s for s in self.stream_steps if s <= interval]
    if not fitting:
      return None
    return fitting[-1] if offset < fitting[-1] else "idle"

  def options(self, variant: Variant) -> dict[str, Any]:
    """What the step is given for it."""
    if variant == "usual":
      return {}
    if variant in ("on", "end"):
      return {"round_ends": variant == "end"}
    return {"stream_steps": None if variant == "idle" else variant}

  def program(self, variant: Variant) -> Variant:
    """The variant whose program it runs."""
    return None if variant == "idle" else variant
