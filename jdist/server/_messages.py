"""Messages that a protocol receives, and the actions with which it answers.

They are plain data, without arrays and clock.  Gradients and parameters stay
with the driver, which knows them by the number of their task.
"""

from collections.abc import Hashable
from typing import Any, NamedTuple, TypeAlias

# NamedTuples and not dataclasses: the virtual clock makes millions of them, and
# a recording writes them as plain lists.
Worker: TypeAlias = Hashable  # What names a worker, such as a string.


def _shown(message: Any) -> str:
  """Returns a message with the fields that differ from their defaults."""
  usual, found = message._field_defaults, message._asdict().items()
  shown = (f"{k}={v!r}" for k, v in found if k not in usual or v != usual[k])
  return f"{type(message).__name__}({', '.join(shown)})"


class Join(NamedTuple):
  """A worker joins, or joins again after it left."""

  worker: Worker


class Leave(NamedTuple):
  """A worker has left, or its failure was detected."""

  worker: Worker


class Pull(NamedTuple):
  """A worker is ready for a task."""

  worker: Worker


class Push(NamedTuple):
  """The server has received the gradient of a task.

  Attributes:
    worker: The name of the worker that computed it.
    task: The number of the task, from its `Reply`.
    samples: Number of samples over which the gradient is a mean.
    compute_s: Seconds for which the worker computed.
    waited_s: Seconds between the receipt of the parameters and the start.
  """

  worker: Worker
  task: int
  samples: int
  compute_s: float
  waited_s: float = 0.0


class Expired(NamedTuple):
  """A timer has expired.

  Attributes:
    task: The number from the `Timer`.
  """

  task: int


class Merge(NamedTuple):
  """A merge of pushes, as it is sent to workers that merge themselves.

  Attributes:
    fragment: The fragment that is merged.
    tasks: Numbers of the tasks whose pushes are in it, in their order.
    weights: Weight of each push.
    workers: The worker of each push.
  """

  fragment: int
  tasks: tuple[int, ...]
  weights: tuple[float, ...]
  workers: tuple[Worker, ...]


class Reply(NamedTuple):
  """The driver must send the present parameters to a worker, with a task.

  Attributes:
    worker: The receiver.
    task: The number under which the gradient will be pushed.
    version: Version of the parameters, the number of updates so far.
    samples: Number of samples of the gradient.
    passes: Number of batches into which the samples are cut.  Gradients of
      batches that memory does not hold at once are accumulated; learners with
      local steps take one step on each.
    push_plan: Number of the plan of bits for the gradient; 0 is exact.
    pull_plan: Number of the plan of bits for the parameters, which sends the
      difference from what the worker holds.  0 is exact; None sends nothing, as
      the worker holds this version.
    fragment: Number of the fragment to push, if the parameters have fragments.
    pulled: Numbers of the fragments that are sent; None sends all of them, and
      the worker starts again from them.
    merges: If workers merge, the merges since the last task, whose pushes the
      worker gets from its peers; without any, the fragments are sent.
  """

  worker: Worker
  task: int
  version: int
  samples: int
  passes: int = 1
  push_plan: int = 0
  pull_plan: int | None = 0
  fragment: int = 0
  pulled: tuple[int, ...] | None = None
  merges: tuple[Merge, ...] | None = None

  def __repr__(self) -> str:
    return _shown(self)


class Apply(NamedTuple):
  r"""The driver must update the parameters by a weighted sum of gradients.

  .. math:: g = \sum_k w_k \, g_k

  Attributes:
    tasks: Numbers of the tasks whose gradients are summed.
    weights: Weight w of each gradient.
    staleness: For each gradient, the number of updates since its parameters
      were sent.
    kept: Tasks whose gradients stay for a later update.  Each use counts as a
      gradient in an update, and samples count at the last one.
  """

  tasks: tuple[int, ...]
  weights: tuple[float, ...]
  staleness: tuple[int, ...]
  kept: frozenset[int] = frozenset()

  def __repr__(self) -> str:
    return _shown(self)


class Discard(NamedTuple):
  """The driver must drop a gradient.

  Attributes:
    task: The number of its task.
    reason: `"late"` if it is too stale for the protocol; `"left"` if its worker
      had left, and has to send `Join` again; `"restart"` if all workers were
      restarted since its task was given; `"repeated"` if it was pushed before,
      or its task was never given.
  """

  task: int
  reason: str


class Timer(NamedTuple):
  """The driver must deliver `Expired` after some time.

  Attributes:
    task: The number for `Expired`: a task's, or one that no task has.
    after_s: Seconds from now.
  """

  task: int
  after_s: float


Message: TypeAlias = Join | Leave | Pull | Push | Expired
Action: TypeAlias = Reply | Apply | Discard | Timer  # A protocol's answer.
Actions: TypeAlias = list[Action]  # A protocol's methods add to it, in order.
