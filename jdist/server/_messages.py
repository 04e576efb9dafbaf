"""Messages that a protocol receives, and the actions with which it answers.

Plain data: no arrays, no clock.  Gradients and parameters stay with the driver,
which knows them by the number of their task.
"""

from collections.abc import Hashable
from typing import NamedTuple, TypeAlias

Worker: TypeAlias = Hashable


class Join(NamedTuple):
  """A worker arrives, or returns after it left.

  Attributes:
    worker: its name.
  """

  worker: Worker


class Leave(NamedTuple):
  """A worker is gone: it said so, or a failure was detected.

  Attributes:
    worker: its name.
  """

  worker: Worker


class Pull(NamedTuple):
  """A worker is ready for a task.

  Attributes:
    worker: its name.
  """

  worker: Worker


class Push(NamedTuple):
  """The gradient of a task is here.

  Attributes:
    worker: who computed it.
    task: the number of the task, from its `Reply`.
    samples: of how many samples it is the mean.
    compute_s: how long the worker computed.
    waited_s: how long the parameters had been there before it began.
  """

  worker: Worker
  task: int
  samples: int
  compute_s: float
  waited_s: float = 0.0


class Expired(NamedTuple):
  """A timer has expired.

  Attributes:
    task: whose, or the timer's own number, from the `Timer`.
  """

  task: int


class Reply(NamedTuple):
  """Send the present parameters to a worker: its next task.

  Attributes:
    worker: to whom.
    task: the number under which the gradient will be pushed.
    version: of the parameters, the number of updates so far.
    samples: how many to take the gradient of.
    passes: into so many batches, one after the other, they are cut: where
      memory holds no larger ones, whose gradients are accumulated, or for as
      many local steps.
    push_plan: by how many bits to push the gradient, a plan's number; 0 is
      exact.
    pull_plan: by how many bits the parameters are sent, as the difference from
      what the worker holds; 0 is exactly; with None nothing is sent, as the
      worker holds this version.
    fragment: which one to push, of parameters that have fragments.
    pulled: which fragments are sent; all, to begin anew, if None.
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

  def __repr__(self) -> str:
    """Returns the fields, without those that are as usual."""
    shown = (
      f"{name}={value!r}"
      for name, value in self._asdict().items()
      if name not in self._field_defaults or value != self._field_defaults[name]
    )
    return f"Reply({', '.join(shown)})"


class Apply(NamedTuple):
  r"""Update the parameters with a weighted sum of gradients.

  .. math:: g = \sum_k w_k \, g_k

  Attributes:
    tasks: whose gradients.
    weights: of each.
    staleness: of each, how many updates were made since its parameters were
      sent.
  """

  tasks: tuple[int, ...]
  weights: tuple[float, ...]
  staleness: tuple[int, ...]


class Discard(NamedTuple):
  """Drop a gradient unused.

  Attributes:
    task: whose.
    reason: `"late"`, too stale for the protocol; `"left"`, its worker had
      left, and has to send `Join` again; `"restart"`, all have begun anew since
      its task was given; `"repeated"`, it was here before, or
      its task was never given.
  """

  task: int
  reason: str


class Timer(NamedTuple):
  """Send `Expired` when some time has gone by.

  Attributes:
    task: what `Expired` names: a task, or a number that no task has.
    after_s: seconds from now.
  """

  task: int
  after_s: float


Message: TypeAlias = Join | Leave | Pull | Push | Expired
Action: TypeAlias = Reply | Apply | Discard | Timer
