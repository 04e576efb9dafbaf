"""Report of `jdist overlap`: tables, rows and labels of programs."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jdist import cluster, profiling, training
from jdist.cli import _commands, _output


@dataclasses.dataclass(frozen=True)
class Found:
  """Forecasts of a method's program: the end of a round, and another step."""

  method: str
  # Rows have these two names for the steps.
  meeting: profiling.Forecast
  between: profiling.Forecast
  interval: int
  memory_bytes: int
  compile_s: float

  @property
  def mean_step_s(self) -> float:
    """Returns the mean duration of the steps of a round."""
    return self.mean(lambda step: step.end_s)

  @property
  def hidden_share(self) -> float:
    """Returns the share of a round's communication that computation hides."""
    sent = self.mean(lambda step: step.send_s)
    # A method without communication has nothing that could be exposed.
    exposed = self.mean(lambda step: step.exposed_s)
    return 1.0 - exposed / sent if sent else 1.0

  def mean(self, figure: Callable[[profiling.Forecast], float]) -> float:
    """Returns the mean of a figure over the steps of a round."""
    # A round consists of equal steps and one that also sends.
    rest = self.interval - 1
    return (figure(self.meeting) + rest * figure(self.between)) / self.interval


def rates(device: cluster.Device, link: cluster.Link) -> str:
  """Describes the rates on which all times are based."""
  return (
    f"Stated rates, not measurements: {device.flops_per_s / 1e12:,.0f} "
    f"TFLOP/s, {device.memory_bytes_per_s / 1e9:,.0f} GB/s of memory, "
    f"{device.launch_s * 1e6:g} µs at least a kernel; link "
    f"{link.bandwidth_bits_per_s / 1e9:,.0f} Gbit/s each way, "
    f"{link.latency_s * 1e6:g} µs a message."
  )


def messages_table(found: Found) -> Any:
  """Returns a table with a line for each collective of a method."""
  # A round that the host ends has its messages in a program of their own.
  rarely = found.interval > 1 and not found.between.collectives
  columns: dict[str, Callable[[int, Any], str]] = {
    "#": lambda number, _: str(number),
    "collective": lambda _, x: x.kind,
    "when": lambda _, x: (
      "round's end" if x.conditional or rarely else "each step"
    ),
    "MB sent": lambda _, x: f"{x.wire_bytes / 1e6:.3g}",
    "µs on the link": lambda _, x: f"{x.send_s * 1e6:,.1f}",
    "kernels under it": lambda _, x: str(x.kernels),
    "products": lambda _, x: str(x.products),
    "µs of kernels": lambda _, x: f"{x.compute_s * 1e6:,.1f}",
    "hidden %": lambda _, x: f"{100 * x.hidden_share:.1f}",
  }
  return _output.table(
    f"Collectives of {found.method}, in the order of their starts",
    "Sent: bytes that each GPU sends in a ring. Under it: kernels between its "
    "start and its end; products: matrix products and convolutions of them.",
    columns,
    enumerate(found.meeting.collectives, 1),
    left=3,
  )


def methods_table(found: list[Found]) -> Any:
  """Returns a table with a line for each method."""
  columns: dict[str, Callable[[Found], str]] = {
    "method": lambda x: x.method,
    "round": lambda x: str(x.interval),
    "MB a step": lambda x: f"{x.mean(lambda s: s.wire_bytes) / 1e6:.3g}",
    "sending ms": lambda x: f"{x.mean(lambda step: step.send_s) * 1e3:.3f}",
    "hidden %": lambda x: f"{100 * x.hidden_share:.1f}",
    "step ms": lambda x: f"{x.mean_step_s * 1e3:.3f}",
    "last step ms": lambda x: f"{x.meeting.end_s * 1e3:.3f}",
    "its hidden %": lambda x: f"{100 * x.meeting.hidden_share:.1f}",
  }
  return _output.table(
    "Steps at the stated rates",
    "Means over a round, and the step that ends it. Hidden: the share of the "
    "communication during which the device did not wait.",
    columns,
    found,
  )


def row(options: _commands.Overlap, found: Found) -> dict[str, Any]:
  """Returns a method's row."""
  return training.make_row(
    dataclasses.asdict(options),
    0,  # Nothing in a compiled program is random.
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
  # Rows keep these keys, so that earlier ones can still be compared.
  names = ("compute_s", "send_s", "exposed_s", "hidden_share", "wire_bytes")
  figures = {name: getattr(step, name) for name in (*names, "flops")}
  return {"step_s": step.end_s, **figures}
