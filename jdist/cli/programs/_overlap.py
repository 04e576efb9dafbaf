"""`jdist overlap`: what a GPU does while it sends, without a GPU."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist import cluster, collectives, models, profiling, training, transforms
from jdist.cli import _methods, _options, _output, _trained
from jdist.cli.programs import _abstract_model, _overlap_report

_VOCABULARY = 50_257
_GPT2 = {"num_layers": 12, "width": 768, "num_heads": 12, "tied": True}

_IN_FLIGHT = "xla_gpu_experimental_parallel_collective_overlap_limit"
_COMBINE = "xla_gpu_all_reduce_combine_threshold_bytes"


@dataclasses.dataclass(frozen=True)
class Task:
  """A model and what it is fed with, as shapes.

  Attributes:
    model: with shapes for parameters.
    loss: as `training.make_step` takes it.
    batch: one worker's, arrays of shapes.
    unit: what a batch consists of.
  """

  model: models.Model
  loss: Callable[..., Any]
  batch: dict[str, jax.ShapeDtypeStruct]
  unit: str


def overlap(options: _options.Overlap) -> None:
  """Compiles, reads, and leaves a table, rows and a picture."""
  topology, device, link = _check(options)
  if options.tell_compiler:
    profiling.set_link_rates(link.bandwidth_bits_per_s, link.latency_s)
  # The devices of this host are not needed, and its GPUs not taken.
  if getattr(jax.config, "jax_platforms", None) is None:
    jax.config.update("jax_platforms", "cpu")
  # Programs for devices that are not there cannot be read back.
  jax.config.update("jax_enable_compilation_cache", False)
  profiling.check_compiler()
  training.check_plots()
  task = _task(options)
  workers = collectives.workers(topology.num_gpus, mesh=topology.mesh())
  output = _output.make_directory(options.output, f"overlap-{options.model}")
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
  console.print()
  if len(found) == 1:
    console.print(_overlap_report.messages_table(found[0]))
    console.print()
  console.print(_overlap_report.methods_table(found))
  path = output / "overlap.png"
  profiling.plot_forecasts(
    {_overlap_report.label(one): one.meeting for one in found},
    path,
    title=f"One training step of {options.model} on {topology}, "
    "in the compiled program's order",
    note=_overlap_report.rates(device, link),
  )
  for one in found:
    timeline = output / f"{one.method.replace(':', '-')}.json"
    one.meeting.trace.save_perfetto(timeline)
  # Not through the console, which would break a long path into lines.
  print(f"Rows: {output / 'rows.jsonl'}")
  print(f"Picture: {path}")
  print(f"Timelines for https://ui.perfetto.dev: {output}/*.json")


def _check(
  options: _options.Overlap,
) -> tuple[profiling.GpuTarget, cluster.Device, cluster.Link]:
  """The stated machine; raises a ValueError for options that are wrong."""
  if len(set(options.methods)) < len(options.methods):
    raise ValueError(
      "`--methods` must be one or more different methods, got "
      f"{options.methods}."
    )
  _methods.check_methods(
    "--methods", tuple(dict.fromkeys(_split(m)[0] for m in options.methods))
  )
  _options.check_model(options.model, models.NAMES)
  try:
    topology = profiling.gpu_target(options.topology)
  except ValueError as error:
    raise ValueError(f"`--topology`: {error}") from None
  _options.check_least(
    options, batch_size=1, image_size=1, length=1, interval=1, in_flight=1,
    combine_mb=0, latency_us=0, launch_us=0,
  )  # fmt: skip
  _options.check_positive(
    options, "bandwidth_gbit_per_s", "tflop_per_s", "memory_gb_per_s",
    "message_mb",
  )  # fmt: skip
  if not 0 <= options.pending <= 1:
    raise ValueError(f"`--pending` must be in [0, 1], got {options.pending}.")
  _methods.check_used(options, [_split(m)[0] for m in options.methods])
  gpu = profiling.GPUS[topology.kind]
  device = gpu.device(options.dtype, options.launch_us / 1e6)
  link = gpu.link(topology.nodes, options.latency_us / 1e6)
  if options.tflop_per_s is not None:
    device = dataclasses.replace(device, flops_per_s=options.tflop_per_s * 1e12)
  if options.memory_gb_per_s is not None:
    device = dataclasses.replace(
      device, memory_bytes_per_s=options.memory_gb_per_s * 1e9
    )
  if options.bandwidth_gbit_per_s is not None:
    link = dataclasses.replace(
      link, bandwidth_bits_per_s=options.bandwidth_gbit_per_s * 1e9
    )
  return topology, device, link


def _split(method: str) -> tuple[str, str | None]:
  """A method's name and form: `msdpu:simple`."""
  name, _, form = method.partition(":")
  _methods.check_methods("--methods", (name,))
  if name in _trained.NEEDS:
    raise ValueError(
      f"`--methods` must be one without trained networks, got {name}. `jdist "
      "bytes` counts what it sends."
    )
  forms = _options.FORMS.get(name, ())
  if form and form not in forms:
    raise ValueError(
      f"`--methods` {name} has "
      f"{'the forms ' + ', '.join(forms) if forms else 'one form only'}, got "
      f"{method!r}."
    )
  return name, form or next(iter(forms), None)


def _task(options: _options.Overlap) -> Task:
  """The model, its loss and its batch."""
  norm: dict[str, Any] = {} if options.norm is None else {"norm": options.norm}
  dtype = jnp.dtype(options.dtype)
  size = options.batch_size
  if options.model == "transformer":
    model = models.build(
      "transformer",
      input_shape=(options.length,),
      num_classes=_VOCABULARY,
      abstract=True,
      **_GPT2,
      **norm,
    )
    tokens = jax.ShapeDtypeStruct((size, options.length), jnp.int32)
    loss = _next_token_loss(model, dtype)
    return Task(model, loss, {"tokens": tokens, "next": tokens}, "sequences")
  model, shape = _abstract_model.image_model(
    options.model, options.image_size, **norm
  )
  batch = {
    "image": jax.ShapeDtypeStruct((size, *shape), jnp.float32),
    "label": jax.ShapeDtypeStruct((size,), jnp.int32),
  }
  loss = training.classification_loss(model.apply, compute_dtype=dtype)
  return Task(model, loss, batch, "images")


def _next_token_loss(model: models.Model, dtype: Any) -> Callable[..., Any]:
  """Mean cross-entropy of a language model's next tokens."""

  def loss_fn(
    params: Any, model_state: Any, batch: Any, key: jax.Array
  ) -> tuple[jax.Array, tuple[Any, dict[str, jax.Array]]]:
    del key
    logits, model_state = model.apply(
      training.cast(params, dtype), model_state, batch["tokens"], train=True
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits.astype(jnp.float32), batch["next"]
    )
    return losses.mean(), (model_state, {})

  return loss_fn


def _read(
  method: str,
  options: _options.Overlap,
  task: Task,
  workers: collectives.Workers,
  device: cluster.Device,
  link: cluster.Link,
) -> _overlap_report.Found:
  """Compiles a method's step and forecasts it."""
  start_s = time.monotonic()
  programs = _programs(method, options, task, workers)
  compile_s = time.monotonic() - start_s
  texts = [program.as_text() for program in programs]
  meeting = profiling.forecast(texts[0], device, link)
  between = profiling.forecast(texts[-1], device, link, branch="idles")
  every_step = len(programs) == 1 and not any(
    sent.conditional for sent in meeting.collectives
  )
  return _overlap_report.Found(
    method,
    meeting,
    between,
    1 if every_step and not _streamed(method) else options.interval,
    max(_memory_bytes(program) for program in programs),
    compile_s,
  )


def _streamed(method: str) -> bool:
  return _split(method)[1] == "streamed"


def _programs(
  method: str,
  options: _options.Overlap,
  task: Task,
  workers: collectives.Workers,
) -> list[Any]:
  """A method's step, compiled; of rounds that the host ends both of it."""
  optimizer = _optimizer(method, options, workers.axis)
  state = profiling.abstract_state(
    workers, optimizer, task.model.params, task.model.state
  )
  chosen: dict[str, Any] = {}
  if _streamed(method):
    chosen["stream_steps"] = options.interval
  told: list[dict[str, Any]] = [{}]
  if options.host_rounds and _host_ends(state):
    told = [{"round_ends": True}, {"round_ends": False}]
  return [
    _compile(optimizer, state, chosen | more, options, task, workers)
    for more in told
  ]


def _host_ends(state: training.TrainState) -> bool:
  """Returns True where a host may end rounds, of all parameters at once."""
  ahead = jax.eval_shape(transforms.rounds_ahead, state.opt_state)
  return ahead is not None and ahead.ndim == 3  # Of fragments 4.


def _memory_bytes(program: Any) -> int:
  memory = program.memory_analysis()
  return int(
    memory.argument_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
    + memory.temp_size_in_bytes
  )


def _compile(
  optimizer: optax.GradientTransformation,
  state: training.TrainState,
  chosen: dict[str, Any],
  options: _options.Overlap,
  task: Task,
  workers: collectives.Workers,
) -> Any:
  step = training.make_step(task.loss, optimizer, axis=workers.axis)

  def one_step(state: Any, batch: Any) -> Any:
    return step(state, batch, transforms.Control(**chosen))

  lowered = workers.jit(one_step, donate_argnums=0).lower(
    state, profiling.abstract(workers, task.batch)
  )
  flags: dict[str, Any] = {}
  if options.in_flight is not None:
    flags[_IN_FLIGHT] = options.in_flight
  if options.combine_mb is not None:
    flags[_COMBINE] = int(options.combine_mb * 1e6)
  return lowered.compile(compiler_options=flags)


def _optimizer(
  method: str, options: _options.Overlap, axis: collectives.Axis
) -> optax.GradientTransformation:
  """A method's chain, in one of its forms."""
  name, form = _split(method)
  common = _options.common(options, stream=form == "streamed")
  run = _methods.run_of(
    common,
    1_000_000,  # Longer than any round.
    0,
    optax.constant_schedule(0.1),
  )
  if form not in ("first", "scattered", "hybrid"):
    return _methods.build_method(name, common, run, axis)
  sized: dict[str, Any] = {}
  if options.message_mb is not None:
    sized["max_bytes"] = max(8, int(options.message_mb * 1e6))
  # The worker's own optimizer is the method without anybody to speak to.
  return transforms.update_first(
    _methods.build_method(name, common, run, None),
    axis=axis,
    in_flight=options.in_flight or 1,
    scatter=form == "scattered",
    pending=options.pending if form == "hybrid" else 1.0,
    **sized,
  )


def _heading(
  options: _options.Overlap,
  topology: profiling.GpuTarget,
  task: Task,
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
