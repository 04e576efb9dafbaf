"""`jdist overlap`: what a GPU computes while it sends, without a GPU."""

import time
from typing import Any

import jax

from jdist import cluster, collectives, models, profiling, training, transforms
from jdist.cli import _commands, _output
from jdist.cli.programs import _overlap_inputs, _overlap_report

_COMBINE = "xla_gpu_all_reduce_combine_threshold_bytes"


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
    training.append_rows(
      output / "rows.jsonl", [_overlap_report.row(options, one)]
    )
    name = method.replace(":", "-")
    one.meeting.trace.save_perfetto(output / f"{name}.json")
  console.print()
  if len(found) == 1:
    console.print(_overlap_report.messages_table(found[0]))
    console.print()
  console.print(_overlap_report.methods_table(found))
  _output.finish(output, options, timelines=True)


def _read(
  method: str,
  options: _commands.Overlap,
  task: _overlap_inputs.OneStep,
  workers: collectives.Workers,
  device: cluster.Device,
  link: cluster.Link,
) -> _overlap_report.Found:
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
  return _overlap_report.Found(
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
  flags: dict[str, Any] = {}
  if options.in_flight is not None:
    flags[_overlap_inputs.IN_FLIGHT] = options.in_flight
  if options.combine_mb is not None:
    flags[_COMBINE] = int(options.combine_mb * 1e6)
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
    f"{device.name}.\n{_overlap_report.rates(device, link)}\n"
  )
