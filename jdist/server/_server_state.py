"""The state of a protocol: members, their tasks, and counts."""

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterable


@dataclasses.dataclass(slots=True)
class Assignment:
  """A task that is out, or whose gradient waits for an update.

  Attributes:
    task: the number of the task.
    worker: the name of its worker.
    version: version of the parameters that were sent.
    samples: number of samples of its batch.
    sent_s: time at which it was given.
    push_plan: `Reply.push_plan`.
    pull_plan: `Reply.pull_plan`.
    round: number of its update, where that is known beforehand.
    fragment: number of the fragment that is pushed.
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
    rank: number of workers that joined before.
    samples: size of its next batch.
    speed: samples a second, smoothed; None before the first push.
    exchange_s: seconds of an exact pull and an exact push, smoothed; None in
      protocols that do not measure them.
    tasks: numbers of its tasks that are out.
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
    version: number of updates so far.
    now_s: the driver's time at the last message.
    members: the workers that have joined, by name, in the order of joining.
    tasks: tasks that are out, by number.
    next_task: number of the next task.
    joined: number of joins so far.
    total_samples: sum of the members' next batches.
    pushes: pushes so far, without repeated ones and those of workers that had
      left.
    applied: number of gradients in updates.
    discarded: discarded pushes, by the reason.
    until_allocation: pushes until batches are allocated anew; None if never.
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
    """The mean size of a worker's batch."""
    return self.total_samples / len(self.members) if self.members else 1.0


def by_rank(state: ServerState) -> Callable[[Hashable], int]:
  """Returns the key that sorts members by the order of joining."""
  # Dictionaries keep the order of joining, but sets of ready members do not.
  return lambda worker: state.members[worker].rank


def in_order(
  state: ServerState, pushes: Iterable[Assignment]
) -> list[Assignment]:
  """Returns pushes in the order in which their workers joined."""
  members = state.members
  # A worker that left after its push has no rank any more. Its task's number
  # puts it behind the members, in an order that does not depend on the driver:
  # floating-point sums must not differ between two runs of one seed.
  return sorted(
    pushes,
    key=lambda push: (
      (0, members[push.worker].rank)
      if push.worker in members
      else (1, push.task)
    ),
  )
