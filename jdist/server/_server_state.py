"""The state of a protocol: members, their tasks, and counts."""

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterable


@dataclasses.dataclass(slots=True)
class Assignment:
  """A task that is out, or whose gradient has come back.

  Attributes:
    task: its number.
    worker: who computes it.
    version: of the parameters that were sent.
    samples: of its batch.
    sent_s: when it was given.
    push_plan: of its `Reply`.
    pull_plan: of its `Reply`.
    round: of the update that it is for, where that is known beforehand.
    fragment: of the parameters that is pushed.
  """

  task: int
  worker: Hashable
  version: int
  samples: int
  sent_s: float = 0.0
  push_plan: int = 0
  pull_plan: int | None = 0
  round: int = 0
  fragment: int = 0


@dataclasses.dataclass(slots=True)
class Member:
  """A worker as its server knows it.

  Attributes:
    rank: how many workers joined before.
    samples: of its next batch.
    speed: samples a second, smoothed; None before the first push.
    exchange_s: seconds of an exact pull and an exact push, smoothed; None where
      nobody measures them.
    tasks: numbers of those that are out.
  """

  rank: int
  samples: int
  speed: float | None = None
  exchange_s: float | None = None
  tasks: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class ServerState:
  """The state of a protocol, changed in place.

  Attributes:
    version: updates so far.
    now_s: the driver's time at the last message.
    members: who is here, by name, in the order of joining.
    tasks: those that are out, by number.
    next_task: the number of the next one.
    joined: workers that ever joined, each time counted.
    total_samples: of the members' next batches.
    pushes: that were neither repeated nor of one who had left.
    applied: how many of them went into an update.
    discarded: pushes by the reason.
    until_allocation: pushes until batches are allocated anew, if ever.
  """

  version: int = 0
  now_s: float = 0.0
  members: dict[Hashable, Member] = dataclasses.field(default_factory=dict)
  tasks: dict[int, Assignment] = dataclasses.field(default_factory=dict)
  next_task: int = 0
  joined: int = 0
  total_samples: int = 0
  pushes: int = 0
  applied: int = 0
  discarded: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  until_allocation: int | None = None

  @property
  def mean_samples(self) -> float:
    """Samples of a worker's batch, on the average."""
    return self.total_samples / len(self.members) if self.members else 1.0


def by_rank(state: ServerState) -> Callable[[Hashable], int]:
  """Returns the key that sorts members by the order of joining."""
  return lambda worker: state.members[worker].rank


def in_order(
  state: ServerState, pushes: Iterable[Assignment]
) -> list[Assignment]:
  """Returns pushes in the order in which their workers joined.

  One who left after its push has no rank any more; tasks are in order.
  """
  members = state.members
  return sorted(
    pushes,
    key=lambda push: (
      (0, members[push.worker].rank)
      if push.worker in members
      else (1, push.task)
    ),
  )
