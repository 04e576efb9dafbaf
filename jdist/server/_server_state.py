"""The state of a protocol: members, their tasks, and counts."""

import collections
import dataclasses
from collections.abc import Callable, Hashable, Iterable


@dataclasses.dataclass(slots=True)
class Assignment:
  """A task that is out, or whose gradient waits for an update.

  Attributes:
    task: The number of the task.
    worker: The name of its worker.
    version: Version of the parameters that were sent.
    samples: Number of samples of its batch.
    sent_s: Time at which it was given.
    push_plan: `Reply.push_plan`.
    pull_plan: `Reply.pull_plan`.
    round: Number of its update, where that is known beforehand.
    fragment: Number of the fragment that is pushed.
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
    rank: Number of workers that joined before.
    samples: Size of its next batch.
    speed: Samples a second, smoothed; None before the first push.
    exchange_s: Seconds of an exact pull and an exact push, smoothed; None in
      protocols that do not measure them.
    tasks: Numbers of its tasks that are out.
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
    version: Number of updates so far.
    now_s: The driver's time at the last message.
    members: The workers that have joined, by name, in the order of joining.
    tasks: Tasks that are out, by number.
    next_task: Number of the next task.
    joined: Number of joins so far.
    total_samples: Sum of the members' next batches.
    pushes: Pushes so far, without repeated ones and those of workers that had
      left.
    applied: Number of gradients in updates.
    discarded: Discarded pushes, by the reason.
    until_allocation: Pushes until batches are allocated again; None if never.
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
