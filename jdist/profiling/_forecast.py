"""Forecasts of a compiled step on machines that need not exist."""

import dataclasses
from typing import Any, Literal

from jdist import cluster, signatures
from jdist.profiling import _timeline


@dataclasses.dataclass(frozen=True)
class SentCollective:
  """A collective of a step on the link, and the kernels that hide it.

  Attributes:
    wire_bytes: The bytes that a worker sends, in a ring.
    conditional: Whether it runs only in steps that end a round.
    kernels: The number of kernels between its start and its done.
    products: The number of matrix products or convolutions among these.
    compute_s: The seconds that these kernels take.
    start_s: The time at which the link begins to send it.
    exposed_s: The seconds for which the device waits for it.
  """

  name: str
  kind: str
  wire_bytes: float
  conditional: bool
  kernels: int
  products: int
  compute_s: float
  start_s: float
  end_s: float
  exposed_s: float

  @property
  def send_s(self) -> float:
    """The seconds on the link."""
    return self.end_s - self.start_s

  @property
  def hidden_share(self) -> float:
    """The part of sending for which the device does not wait, in [0, 1]."""
    # The device may also wait for earlier messages in the link's queue, so that
    # the exposed time can exceed the time of sending.
    exposed = self.exposed_s / self.send_s if self.send_s else 0.0
    return max(0.0, 1.0 - exposed)


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A computation on the device; see `Event` for its operations."""

  name: str
  start_s: float
  end_s: float
  flops: int


@dataclasses.dataclass(frozen=True)
class Forecast:
  """One step on a device and a link, each in the order of starts."""

  collectives: tuple[SentCollective, ...]
  kernels: tuple[Kernel, ...]

  @property
  def end_s(self) -> float:
    """The time at which everything is done."""
    ends = [kernel.end_s for kernel in self.kernels]
    return max([*ends, *(sent.end_s for sent in self.collectives)], default=0.0)

  @property
  def compute_s(self) -> float:
    """The seconds for which the device computes."""
    return sum(kernel.end_s - kernel.start_s for kernel in self.kernels)

  @property
  def send_s(self) -> float:
    """The seconds for which the link sends."""
    return sum(sent.send_s for sent in self.collectives)

  @property
  def exposed_s(self) -> float:
    """The seconds for which the device waits for collectives."""
    return sum(sent.exposed_s for sent in self.collectives)

  @property
  def hidden_share(self) -> float:
    """The part of sending for which the device does not wait; 1 if none."""
    return 1.0 - self.exposed_s / self.send_s if self.send_s else 1.0

  @property
  def wire_bytes(self) -> float:
    """The bytes that a worker sends."""
    return sum(sent.wire_bytes for sent in self.collectives)

  @property
  def flops(self) -> int:
    """The operations of products and convolutions."""
    return sum(kernel.flops for kernel in self.kernels)

  @property
  def trace(self) -> cluster.Trace:
    """The step as spans on the device and on the link.

    The kinds of spans are "product" (also of convolutions), "other" and "wait"
    on the device, and "hidden" and "exposed" on the link.
    """
    trace = cluster.Trace()
    for kernel in self.kernels:
      kind = "product" if kernel.flops else "other"
      trace.add("device", kernel.name, kernel.start_s, kernel.end_s, kind)
    for sent in self.collectives:
      # The device waits for a message only after it waited for earlier ones,
      # so that its wait ends when the message does.
      waits = sent.end_s - sent.exposed_s
      cut = max(sent.start_s, waits)
      if sent.exposed_s:
        trace.add("device", f"wait: {sent.name}", waits, sent.end_s, "wait")
      if cut > sent.start_s:
        trace.add("link", sent.name, sent.start_s, cut, "hidden")
      if sent.end_s > cut:
        trace.add("link", sent.name, cut, sent.end_s, "exposed")
    return trace


@signatures.checked
def forecast(
  program: Any,
  device: cluster.Device,
  link: cluster.Link,
  *,
  branch: Literal["sends", "idles"] = "sends",
) -> Forecast:
  """Predicts how much of a compiled step's communication is hidden.

  The order is the compiler's, as `read_timeline` reads it, and the times are a
  model's. The device runs one kernel after the other, each bounded by
  arithmetic, memory or its launch, and stops at a `done` until its collective
  has been sent. The link sends one collective after the other, in a ring and in
  the order of their starts. Neither slows the other. A collective without
  `done` must end with the program.

  Args:
    program: A compiled step (`jitted.lower(...).compile()`) or its text.
    device: The device's rates.
    link: Each device's link to the others.
    branch: The step: "sends" (default), one that ends a round, or "idles", one
      that does not.

  >>> device = cluster.Device("toy", flops_per_s=16, memory_bytes_per_s=1e9)
  >>> link = cluster.Link(bandwidth_bits_per_s=8 * 4)
  >>> found = forecast('''
  ... ENTRY %main (x: f32[8], w: f32[8,8]) -> f32[8] {
  ...   %x = f32[8]{0} parameter(0)
  ...   %w = f32[8,8]{1,0} parameter(1)
  ...   %s = f32[8]{0} all-reduce-start(%x), replica_groups={{0,1}}
  ...   %y = f32[8]{0} dot(%x, %w), lhs_contracting_dims={0}
  ...   ROOT %d = f32[8]{0} all-reduce-done(%s)
  ... }''', device, link)
  >>> (sent,) = found.collectives  # 32 bytes, while 128 operations run.
  >>> sent.send_s, sent.compute_s, sent.hidden_share
  (8.0, 8.0, 1.0)
  """
  kernels: list[Kernel] = []
  found: list[SentCollective] = []
  started: dict[str, tuple[int, int]] = {}
  now_s = link_free_s = 0.0

  def wait(name: str) -> float:
    # All kernels since the start have run under the collective.
    number, first = started.pop(name)
    sent, under = found[number], kernels[first:]
    found[number] = dataclasses.replace(
      sent,
      kernels=len(under),
      products=sum(kernel.flops > 0 for kernel in under),
      compute_s=sum(kernel.end_s - kernel.start_s for kernel in under),
      exposed_s=max(0.0, sent.end_s - now_s),
    )
    return max(now_s, sent.end_s)

  for event in _timeline.read_timeline(program, branch=branch):
    if event.kind == "compute":
      end_s = now_s + device.compute_s(event.flops, event.num_bytes)
      kernels.append(Kernel(event.name, now_s, end_s, event.flops))
      now_s = end_s
    elif event.collective is not None:
      sent = event.collective
      start_s = max(now_s, link_free_s)
      messages = cluster.ring_messages(sent.num_workers, sent.kind)
      link_free_s = start_s + link.send_s(sent.wire_bytes, messages)
      started[event.name] = len(found), len(kernels)
      found.append(
        SentCollective(
          event.name, sent.kind, sent.wire_bytes, sent.conditional,
          0, 0, 0.0, start_s, link_free_s, 0.0,
        )
      )  # fmt: skip
    else:
      now_s = wait(event.name)
  for name in list(started):
    now_s = wait(name)
  return Forecast(tuple(found), tuple(kernels))
