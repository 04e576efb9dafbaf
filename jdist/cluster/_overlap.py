"""How much of a program's communication is hidden, on a stated machine."""

import dataclasses
from collections.abc import Iterable
from typing import Literal

from jdist.cluster import _links


@dataclasses.dataclass(frozen=True)
class Device:
  """An accelerator's rates.

  Attributes:
    name: of the device.
    flops_per_s: floating point operations a second that programs reach, not
      the data sheet's.
    memory_bytes_per_s: memory bandwidth that programs reach.
    launch_s: the least time of one kernel.
  """

  name: str
  flops_per_s: float
  memory_bytes_per_s: float
  launch_s: float = 0.0

  def __post_init__(self) -> None:
    for field in ("flops_per_s", "memory_bytes_per_s"):
      if not getattr(self, field) > 0:
        raise ValueError(
          f"`{field}` must be positive, got {getattr(self, field)}."
        )
    if not self.launch_s >= 0:
      raise ValueError(f"`launch_s` must not be negative, got {self.launch_s}.")

  def compute_s(self, flops: float, num_bytes: float) -> float:
    """Seconds of one kernel: bounded by arithmetic, memory, or its launch.

    >>> Device("toy", flops_per_s=10, memory_bytes_per_s=2).compute_s(20, 2)
    2.0
    """
    return max(
      flops / self.flops_per_s,
      num_bytes / self.memory_bytes_per_s,
      self.launch_s,
    )


@dataclasses.dataclass(frozen=True)
class Task:
  """One entry of a program's order, for `overlap`.

  Attributes:
    kind: `"compute"`, or the `"start"` or `"done"` of a message.
    name: of the task; a start and its done have one name.
    flops: of a computation.
    num_bytes: that a computation moves in memory, or that a start sends.
    messages: of a start: how many, one after the other.
  """

  kind: Literal["compute", "start", "done"]
  name: str
  flops: float = 0.0
  num_bytes: float = 0.0
  messages: float = 0.0


@dataclasses.dataclass(frozen=True)
class Span:
  """A stretch of time on the device or on its link.

  Attributes:
    where: `"device"`, or `"link"`.
    name: the task's.
    start_s: when it begins.
    end_s: when it ends.
    exposed_s: of a message, how long the device waited for it.
  """

  where: Literal["device", "link"]
  name: str
  start_s: float
  end_s: float
  exposed_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Timeline:
  """A program's run on a stated machine.

  Attributes:
    spans: all tasks, in order of their starts.
  """

  spans: tuple[Span, ...]

  @property
  def end_s(self) -> float:
    """When everything is done."""
    return max((span.end_s for span in self.spans), default=0.0)

  @property
  def compute_s(self) -> float:
    """Seconds that the device computes."""
    return sum(s.end_s - s.start_s for s in self.spans if s.where == "device")

  @property
  def send_s(self) -> float:
    """Seconds that the link sends."""
    return sum(s.end_s - s.start_s for s in self.spans if s.where == "link")

  @property
  def exposed_s(self) -> float:
    """Seconds that the device waits for messages."""
    return sum(span.exposed_s for span in self.spans)

  @property
  def hidden_share(self) -> float:
    """The part of sending that the device does not wait for; 1 for none."""
    return 1.0 - self.exposed_s / self.send_s if self.send_s else 1.0


def overlap(
  tasks: Iterable[Task], device: Device, link: _links.Link
) -> Timeline:
  """Runs a program's order on a device that computes and a link that sends.

  The device does one task after the other and stops at a `done` until its
  message is there.  The link sends one message after the other, in the order
  of their starts.  What is never waited for must still end with the program.

  Args:
    tasks: in the program's order.
    device: the device's rates.
    link: the link's.

  Returns:
    The timeline.

  Raises:
    ValueError: for a `done` without its `start`.

  >>> toy = Device("toy", flops_per_s=1, memory_bytes_per_s=1)
  >>> slow = _links.Link(bandwidth_bits_per_s=8)  # One byte a second.
  >>> found = overlap(
  ...   [
  ...     Task("start", "m", num_bytes=4),
  ...     Task("compute", "a", flops=3),
  ...     Task("done", "m"),
  ...   ],
  ...   toy,
  ...   slow,
  ... )
  >>> found.end_s, found.exposed_s, found.hidden_share
  (4.0, 1.0, 0.75)
  """
  spans: list[Span] = []
  open_messages: dict[str, int] = {}
  now_s = link_free_s = 0.0

  def wait(name: str) -> float:
    index = open_messages.pop(name)
    span = spans[index]
    exposed_s = max(0.0, span.end_s - now_s)
    # Of a message that waited for the link, only its own time can be exposed;
    # the rest is that of the messages before it, which are waited for too.
    spans[index] = dataclasses.replace(span, exposed_s=exposed_s)
    return max(now_s, span.end_s)

  for task in tasks:
    if task.kind == "compute":
      end_s = now_s + device.compute_s(task.flops, task.num_bytes)
      spans.append(Span("device", task.name, now_s, end_s))
      now_s = end_s
    elif task.kind == "start":
      start_s = max(now_s, link_free_s)
      link_free_s = start_s + link.send_s(task.num_bytes, task.messages)
      open_messages[task.name] = len(spans)
      spans.append(Span("link", task.name, start_s, link_free_s))
    elif task.name in open_messages:
      now_s = wait(task.name)
    else:
      raise ValueError(
        f"`tasks` must start a message before it is done, got {task.name!r} "
        "done without a start."
      )
  for name in list(open_messages):
    now_s = wait(name)
  return Timeline(tuple(sorted(spans, key=lambda span: span.start_s)))
