"""Report of `jdist overlap`: tables, rows and names of what was read."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jdist import cluster, profiling, training
from jdist.cli import _commands


@dataclasses.dataclass(frozen=True)
class Found:
  """A method's program as it was read, and how long compiling it took."""

  method: str
  meeting: profiling.Forecast  # The step that ends a round.
  between: profiling.Forecast  # A step that does not, or the same.
  interval: int
  memory_bytes: int
  compile_s: float

  @property
  def mean_step_s(self) -> float:
    """Of the steps of a round."""
    return self.mean(lambda step: step.end_s)

  @property
  def hidden_share(self) -> float:
    """Of all sending of a round."""
    sent = self.mean(lambda step: step.send_s)
    exposed = self.mean(lambda step: step.exposed_s)
    return 1.0 - exposed / sent if sent else 1.0

  def mean(self, of: Callable[[profiling.Forecast], float]) -> float:
    """Of something over the steps of a round."""
    rest = self.interval - 1
    return (of(self.meeting) + rest * of(self.between)) / self.interval


def rates(device: cluster.Device, link: cluster.Link) -> str:
  """The rates that were stated, in words."""
  return (
    f"Stated rates, not measurements: {device.flops_per_s / 1e12:,.0f} "
    f"TFLOP/s, {device.memory_bytes_per_s / 1e9:,.0f} GB/s of memory, "
    f"{device.launch_s * 1e6:g} µs at least a kernel; link "
    f"{link.bandwidth_bits_per_s / 1e9:,.0f} Gbit/s each way, "
    f"{link.latency_s * 1e6:g} µs a message."
  )


def messages_table(found: Found) -> Any:
  """A line for each collective of a method."""
  from rich import table

  grid = table.Table(
    title=f"Collectives of {found.method}, in the order of their starts",
    caption=(
      "Sent: bytes that each GPU sends in a ring. Under it: kernels between "
      "its start and its done, and of these products and convolutions."
    ),
  )
  grid.add_column("#", justify="right")
  grid.add_column("collective")
  grid.add_column("when")
  columns: dict[str, Callable[[profiling.SentCollective], str]] = {
    "MB sent": lambda x: f"{x.wire_bytes / 1e6:.3g}",
    "µs on the link": lambda x: f"{x.send_s * 1e6:,.1f}",
    "kernels under it": lambda x: str(x.kernels),
    "products": lambda x: str(x.products),
    "µs of kernels": lambda x: f"{x.compute_s * 1e6:,.1f}",
    "hidden %": lambda x: f"{100 * x.hidden_share:.1f}",
  }
  for name in columns:
    grid.add_column(name, justify="right")
  # Where the host ends rounds, that step has a program of its own.
  rarely = found.interval > 1 and not found.between.collectives
  for number, message in enumerate(found.meeting.collectives, 1):
    often = "round's end" if message.conditional or rarely else "each step"
    cells = [column(message) for column in columns.values()]
    grid.add_row(str(number), message.kind, often, *cells)
  return grid


def methods_table(found: list[Found]) -> Any:
  """A line for each method."""
  from rich import table

  grid = table.Table(
    title="Steps at the stated rates",
    caption=(
      "Means over a round, and the step that ends one. Hidden: the part of "
      "sending in which the device did not wait."
    ),
  )
  grid.add_column("method", no_wrap=True)
  columns: dict[str, Callable[[Found], str]] = {
    "round": lambda x: str(x.interval),
    "MB a step": lambda x: f"{x.mean(lambda s: s.wire_bytes) / 1e6:.3g}",
    "sending ms": lambda x: f"{x.mean(lambda step: step.send_s) * 1e3:.3f}",
    "hidden %": lambda x: f"{100 * x.hidden_share:.1f}",
    "step ms": lambda x: f"{x.mean_step_s * 1e3:.3f}",
    "last step ms": lambda x: f"{x.meeting.end_s * 1e3:.3f}",
    "its hidden %": lambda x: f"{100 * x.meeting.hidden_share:.1f}",
  }
  for name in columns:
    grid.add_column(name, justify="right")
  for one in found:
    grid.add_row(one.method, *(column(one) for column in columns.values()))
  return grid


def label(found: Found) -> str:
  """A method's name in the picture."""
  if found.interval == 1:
    return found.method
  return f"{found.method}, last step of {found.interval}"


def row(options: _commands.Overlap, found: Found) -> dict[str, Any]:
  """A method's row."""
  return training.make_row(
    dataclasses.asdict(options),
    0,
    method=found.method,
    interval=found.interval,
    compile_s=found.compile_s,
    memory_bytes=found.memory_bytes,
    mean_step_s=found.mean_step_s,
    mean_wire_bytes=found.mean(lambda step: step.wire_bytes),
    hidden_share=found.hidden_share,
    meeting=_step_row(found.meeting),
    between=_step_row(found.between),
    messages=[
      dataclasses.asdict(message)
      | {"send_s": message.send_s, "hidden_share": message.hidden_share}
      for message in found.meeting.collectives
    ],
  )


def _step_row(step: profiling.Forecast) -> dict[str, Any]:
  return {
    "step_s": step.end_s,
    "compute_s": step.compute_s,
    "send_s": step.send_s,
    "exposed_s": step.exposed_s,
    "hidden_share": step.hidden_share,
    "wire_bytes": step.wire_bytes,
    "flops": step.flops,
  }
