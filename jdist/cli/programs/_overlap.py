"""`jdist overlap`: what a GPU computes while it sends, without a GPU."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax

from jdist import cluster, collectives, models, profiling, training, transforms
from jdist.cli import _commands, _output
from jdist.cli.programs import _overlap_inputs


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


def overlap(options: _commands.Overlap) -> None:
  """Compiles and reads programs, and writes a table, rows and a picture."""
  topology, device, link = _overlap_inputs.check(options)
  # XLA reads these rates from its flags when JAX starts.
  if options.tell_compiler:
    profiling.set_link_rates(link.bandwidth_bits_per_s, link.latency_s)
  # Without it JAX would reserve the memory of this host's GPUs, which are not
  # used.
  if getattr(jax.config, "jax_platforms", None) is None:
    jax.config.update("jax_platforms", "cpu")
  # JAX cannot load a cached program for devices that are not present.
  jax.config.update("jax_enable_compilation_cache", False)
  profiling.check_compiler()
  task = _overlap_inputs.make_task(options)
  workers = collectives.workers(topology.num_gpus, mesh=topology.mesh())
  output = _output.output_directory(options.output, f"overlap-{options.model}")
  console = _output.console()
  console.print(_heading(options, topology, task, device, link))
  found = []
  for method in options.methods:
    one = _read(method, options, task, workers, device, link)
    console.print(
      f"{method}: compiled in {one.compile_s:.0f} s, "
      f"{training.format_bytes(one.memory_bytes)} of a GPU's "
      f"{topology.memory_bytes / 1e9:.0f} GB"
    )
    found.append(one)
    training.append_rows(output / "rows.jsonl", [row(options, one)])
    name = method.replace(":", "-")
    one.meeting.trace.save_perfetto(output / f"{name}.json")
  console.print()
  if len(found) == 1:
    console.print(messages_table(found[0]))
    console.print()
  console.print(methods_table(found))
  _output.finish(output, options, timelines=True)


def _read(
  method: str,
  options: _commands.Overlap,
  task: _overlap_inputs.OneStep,
  workers: collectives.Workers,
  device: cluster.Device,
  link: cluster.Link,
) -> Found:
  """Compiles a method's step and forecasts it."""
  start_s = time.monotonic()
  streamed = _overlap_inputs.split(method)[1] == "streamed"
  programs = _programs(method, streamed, options, task, workers)
  compile_s = time.monotonic() - start_s
  # The first program ends a round. A single one contains both kinds of step,
  # of which a conditional's branch "idles" in all others.
  texts = [program.as_text() for program in programs]
  meeting = profiling.forecast(texts[0], device, link)
  between = profiling.forecast(texts[-1], device, link, branch="idles")
  every_step = len(programs) == 1 and not any(
    sent.conditional for sent in meeting.collectives
  )
  return Found(
    method, meeting, between,
    1 if every_step and not streamed else options.interval,
    max(_overlap_inputs.memory_bytes(program) for program in programs),
    compile_s,
  )  # fmt: skip


def _programs(
  method: str,
  streamed: bool,
  options: _commands.Overlap,
  task: _overlap_inputs.OneStep,
  workers: collectives.Workers,
) -> list[Any]:
  """Compiles a method's step; two programs if the host ends its rounds."""
  optimizer = _overlap_inputs.make_optimizer(method, options, workers.axis)
  step = training.make_step(task.loss, optimizer, axis=workers.axis)
  state = profiling.abstract_state(
    workers, optimizer, task.model.params, task.model.state
  )
  batch = profiling.abstract(workers, task.batch)
  flags: Any = _overlap_inputs.compiler_flags(options)
  stream_steps: Any = options.interval if streamed else "fixed"
  ahead = jax.eval_shape(transforms.rounds_ahead, state.opt_state)
  # A method of fragments has one more axis here, and no program by the host.
  host_ends = ahead is not None and ahead.ndim == 3
  programs = []
  for ends in (True, False) if options.host_rounds and host_ends else (None,):
    control = transforms.Control(round_ends=ends, stream_steps=stream_steps)

    def one_step(state: Any, batch: Any, control: Any = control) -> Any:
      return step(state, batch, control)

    lowered = workers.jit(one_step, donate_argnums=0).lower(state, batch)
    programs.append(lowered.compile(compiler_options=flags))
  return programs


def _heading(
  options: _commands.Overlap,
  topology: profiling.GpuTarget,
  task: _overlap_inputs.OneStep,
  device: cluster.Device,
  link: cluster.Link,
) -> str:
  size = models.num_params(task.model)
  shape = "x".join(map(str, next(iter(task.batch.values())).shape[1:]))
  return (
    f"{options.model}, {size:,} parameters, {options.batch_size} {task.unit} "
    f"of {shape} a GPU and step, {options.dtype}; {topology.num_gpus} x "
    f"{device.name}.\n{rates(device, link)}\n"
  )


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
