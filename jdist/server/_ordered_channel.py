"""A channel that delivers messages in the order in which they were sent."""

import collections
from collections.abc import Callable
from typing import Any


class OrderedChannel:
  """One direction between a worker and its server, as a connection has it.

  A modelled network may carry a message without bytes, or a small one, faster
  than an earlier large one.  A task must not overtake the one before it: its
  parameters may be what that one brings, or a difference from them.
  """

  __slots__ = ("_under_way",)

  def __init__(self) -> None:
    self._under_way: collections.deque[list[Any]] = collections.deque()

  def send(
    self, carried: Any, deliver: Callable[..., Any], *arguments: Any
  ) -> None:
    """Delivers a message once it and all earlier ones have been carried.

    Args:
      carried: SimPy's event of the network; None if there is nothing to carry.
      deliver: Is called with the arguments.
      *arguments: Arguments of `deliver`.
    """
    under_way = self._under_way
    if carried is None and not under_way:
      deliver(*arguments)
      return
    # Whether it has been carried: a list, as the clock makes millions of them.
    message = [carried is None, deliver, arguments]
    under_way.append(message)

    def arrive(event: Any) -> None:
      del event
      message[0] = True
      while under_way and under_way[0][0]:
        _, deliver, arguments = under_way.popleft()
        deliver(*arguments)

    if carried is not None:
      carried.callbacks.append(arrive)
