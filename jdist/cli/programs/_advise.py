"""`jdist advise`: whether communicating less pays, on this machine and link."""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import optax

from jdist import (
  advice,
  cluster,
  collectives,
  methods,
  pipeline,
  server,
  training,
)
from jdist.cli import _commands, _groups, _methods, _options, _output, _workload
from jdist.cli.pipelines import _tables

_INT4 = {"codec": "int4", "feedback": "error"}
_SERVER_STEPS = 40  # The clock runs so many steps of all workers.
_PIPELINES = "gpipe", "1f1b", "zb_h1"  # Their gradients are in time.
_STREAMED: dict[str, Any] = {"interval_policy": "fixed", "stream": True}
# The methods and their options, unless some are named; the first is the base.
_CHOICES: tuple[tuple[str, dict[str, Any]], ...] = (
  ("ssgd", {}), ("ssgd", _INT4), ("powersgd", {}), ("topk_sgd", {}),
  ("local_sgd", {}), ("diloco", _INT4), ("msdpu", _STREAMED),
  ("msdpu", _STREAMED | _INT4),
)  # fmt: skip


def advise(options: _commands.Advise) -> None:
  """Measures a step, and prints what each method would take on the link."""
  collectives.make_cpu_devices(1)  # The threads of a worker's process.
  number, team, latency_s = 8, None, options.latency_ms / 1e3
  link = cluster.Link(options.bandwidth_mbit_per_s * 1e6, latency_s)
  joined = options.num_processes or 1
  if options.methods:
    known = methods.registry.keys() - {_methods.TRAINED}
    _options.check_names("--methods", options.methods, "methods", sorted(known))
    if not any(methods.registry[x].in_rounds for x in options.methods):
      where = f"for {', '.join(options.methods)}, without rounds"
      _options.check_left_out(options, ("interval",), where)
  if options.step is not None:
    unused = *_groups.ModelOptions.__dataclass_fields__, "batch_size"
    _options.check_left_out(options, unused, "with `--step`")
  output = None
  if options.output is not None and not options.process_id:
    output = _output.output_directory(options.output, "advise")
  if joined > 1:
    measured = "slowdown", "bandwidth_mbit_per_s", "latency_ms"
    where = "in several processes, which measure it"
    _options.check_left_out(options, measured, where)
  _options.join_processes(dataclasses.replace(options, workers=joined), joined)
  if jax.process_count() > 1:
    number, team = jax.process_count(), collectives.workers(jax.process_count())
  workers = options.workers or number
  options = dataclasses.replace(options, workers=workers)
  common = _groups.Common(
    **{x: y for x, y in vars(options).items() if hasattr(_groups.Common, x)}
  )
  task = _named(common) if options.step is None else _own(options.step)
  loss_fn, params, batch, state, layer_costs = task
  sizes = [(*jax.numpy.shape(x), 0)[0] for x in jax.tree.leaves(batch)]
  if not min(sizes, default=0):
    raise ValueError(f"`--step` must return a batch with samples, got {sizes}.")
  size = sum(x.nbytes for x in jax.tree.leaves(params))
  if team is not None:
    # A longer mean would overflow queues on the way and be sent again.
    link = advice.measure_link(team, num_bytes=size)
    # A mean waits for threads of its own, and messages of others do not.
    latency_s = statistics.median(map(_round_trip_s, range(20))) / 2
  choices = _CHOICES
  if options.methods:
    named = [_named_choice(x) for x in options.methods if x != "ssgd"]
    choices = (_CHOICES[0], *named)
  chains = {
    _label(name, more, options.interval): _chain(name, more, common)
    for name, more in choices
  }
  seconds = f"then measuring for up to about {options.limit_s:g} s"
  print(f"Compiling {len(chains)} methods, {seconds}.", flush=True)
  found = advice.advise(
    loss_fn, params, batch, chains, link,
    num_workers=workers,
    optimizer=_methods.optimizer_of(common, _run(common)),
    model_state=state,
    slowdown=options.slowdown,
    limit_s=options.limit_s,
    workers=team,
  )  # fmt: skip
  if options.process_id:
    return  # All processes measure the link, and the first one reports.
  console = _output.console()
  console.print(_times(found, workers))
  console.print(_rates(found))
  try:
    # A message takes the links of two machines.
    other = dataclasses.replace(link, latency_s=latency_s / 2)
    console.print(_others(found, other, workers, batch, size, layer_costs))
  except ImportError as error:
    print(f"Servers and pipelines are not shown. {error}")
  print(_verdict(found))
  name, more = choices[list(chains).index(found.best)]
  print("  " + _command(name, more, options))
  if output is not None:
    config = dataclasses.asdict(options)
    training.append_rows(
      output / "rows.jsonl",
      [
        training.make_row(
          config, 0, method=name, predicted_s=found.seconds(name),
          pays=found.pays(name), costs=costs._asdict(),
        )
        for name, costs in found.costs.items()
      ],
    )  # fmt: skip
    _output.finish(output, options)


def _round_trip_s(number: int) -> float:
  """Returns the seconds of a few bytes to the first process and back."""
  started_s = time.perf_counter()
  collectives.agree(f"round trip {number}", {})
  return time.perf_counter() - started_s


def _named(options: _groups.Common) -> tuple[Any, ...]:
  """Returns the parts of a model's step, as `jdist train` has it."""
  options = _workload.named(options)
  _workload.check(options)
  # Each process has a whole team of its own, to measure one worker of it.
  vmap = functools.partial(collectives.Workers, options.workers, "vmap", "w")
  workload = _workload.build(options, vmap)
  model, batches = workload.model(0), workload.batches(seed=0)
  batch = jax.tree.map(lambda x: x[0], next(batches.iterate(0)))
  layer_costs = functools.partial(
    pipeline.layer_costs,
    [_tables.cast_layer(x, options.dtype) for x in model.layers],
    inputs=workload.inputs(), source="timed",
  )  # fmt: skip
  loss_fn = workload.loss(model.apply)
  return loss_fn, model.params, batch, model.state, layer_costs


def _own(name: str) -> tuple[Any, ...]:
  """Calls MODULE:FUNCTION, which returns the parts of a step."""
  function = _options.load("--step", name, "MODULE:FUNCTION of a function")
  found = function() if callable(function) else function
  if not isinstance(found, tuple) or len(found) not in (3, 4):
    raise ValueError(
      "`--step` must return `loss_fn, params, batch` or `loss_fn, params, "
      f"batch, model_state` of one worker, got {type(found).__name__} from "
      f"{name}."
    )
  return (*(*found, None)[:4], None)


def _run(options: _groups.Common) -> methods.Run:
  # The run must be longer than any round, of which the last is cut short.
  # The rate has no effect on times.
  return _methods.run_of(options, 10**6, 0, optax.constant_schedule(0.1))


def _named_choice(name: str) -> tuple[str, dict[str, Any]]:
  """Returns a method with its defaults, in rounds of equal length."""
  growing = methods.registry[name].interval_policy == "growth"
  return name, {"interval_policy": "fixed"} if growing else {}


def _label(name: str, more: dict[str, Any], interval: int) -> str:
  rounds = f"H={interval}" if methods.registry[name].in_rounds else ""
  streamed = "streamed" if "stream" in more else ""
  return " ".join(filter(None, (name, rounds, more.get("codec"), streamed)))


def _chain(
  name: str, more: dict[str, Any], common: _groups.Common
) -> tuple[Callable[..., optax.GradientTransformation], int]:
  """Returns a function of the axis to a method's chain, and its round."""
  chosen = dataclasses.replace(common, **more)
  # Before its switch a method has no rounds.
  arguments = methods.registry[name].arguments
  own: Any = {"switch_step": 0} if "switch_step" in arguments else {}
  build = functools.partial(
    _methods.build_method, name, chosen, _run(chosen), **own
  )
  return build, common.interval if methods.registry[name].in_rounds else 1


def _command(name: str, more: dict[str, Any], options: _commands.Advise) -> str:
  """Returns the command that trains with a choice and the same options."""
  if options.step is not None:  # No command trains it.
    rounds = ["interval"] if methods.registry[name].in_rounds else []
    values = {x: getattr(options, x) for x in rounds} | more
    return f"jdist.methods.{name} with {values or 'its defaults'}"
  train = _options.with_preset(_commands.Train, options.preset)
  same = {x: y for x, y in vars(options).items() if hasattr(train, x)}
  left = {*_groups.ProcessOptions.__dataclass_fields__, "output"}
  chosen = {x: y for x, y in same.items() if x not in left} | more
  train = dataclasses.replace(train, **chosen, method=name)
  return _options.command_line(train)


def _times(found: advice.Advice, workers: int) -> Any:
  def line(name: str) -> list[str]:
    costs, (low, middle, high) = found.costs[name], found.seconds(name)
    extra_s = found.slowdown * statistics.median(costs.extra_s)
    return [
      name, f"{1e3 * middle:.4g}", f"{50 * (high - low) / middle:.0f}",
      f"{found.seconds(found.base)[1] / middle:.2f}x",
      f"{100 * found.exposed_s(name) / middle:.0f}",
      f"{costs.round_bytes / costs.interval / 1e3:,.1f}",
      f"{1e3 * extra_s:.3g}",
      "-" if name == found.base else "yes" if found.pays(name) else "no",
      _megabits(found.pays_below(name)),
    ]  # fmt: skip

  titles = (
    "method", "ms a step", "± %", "faster", "waits %", "kB a step", "adds ms",
    "pays", "below Mbit/s",
  )  # fmt: skip
  rate, latency_s = found.link.bandwidth_bits_per_s, found.link.latency_s
  return _output.table(
    f"N = {workers}, links of {rate / 1e6:.4g} Mbit/s and "
    f"{1e3 * latency_s:.3g} ms: predicted times, from measurements here",
    "± is half of a 90 % interval. Waits: the share of a step in which a "
    "worker waits for messages. Adds: what the method computes itself. Pays: "
    "faster by more than the spread. Below: the bandwidth below which the "
    "middle is faster. Accuracy is unknown here: see docs/methods.md.",
    {x: lambda *line, i=i: line[i] for i, x in enumerate(titles)},
    (tuple(line(name)) for name in found.costs),
  )


def _rates(found: advice.Advice) -> Any:
  def rate(part: float, name: str) -> str:
    return _megabits(found.rate_for(name, part))

  columns: dict[str, Callable[[str], str]] = {"method": str}
  for part in (0.5, 0.75, 0.9, 0.95, 0.99):
    columns[f"{100 * part:g} %"] = functools.partial(rate, part)
  return _output.table(
    "Mbit/s at which so much of a step is the model's own computation",
    "A dash: at no bandwidth, with this latency and what the method computes.",
    columns,
    found.costs,
  )


def _others(
  found: advice.Advice,
  link: cluster.Link,
  workers: int,
  batch: Any,
  num_bytes: int,
  layer_costs: Callable[..., list[pipeline.LayerCost]] | None,
) -> Any:
  """Returns a table of servers' protocols and, with layers, of pipelines."""
  samples = len(jax.tree.leaves(batch)[0])
  speeds = [1 / x for x in found.slowdowns][:workers]
  speeds += [1.0] * (workers - len(speeds))
  machines = cluster.workers(speeds, link=link)
  base_s = found.seconds(found.base)[1]

  def line(name: str, seconds: float, late: float) -> tuple[str, ...]:
    gain = f"{base_s / seconds:.2f}x"
    return name, f"{1e3 * seconds:,.1f}", gain, f"{late:.1f}"

  step_s = found.step_s / found.slowdown
  profile = cluster.Profile(
    step_s / samples, pull_bytes=num_bytes, push_bytes=num_bytes
  )
  batches, lines = server.FixedBatches(samples), []
  for name, protocol in (
    ("bsp", server.BSP(batches=batches)),
    ("asp", server.ASP(batches=batches)),
    ("dbs", server.dbs(workers * samples)),
  ):
    run = server.Simulation(machines, protocol, profile)
    run.run(samples=_SERVER_STEPS * workers * samples)
    late = run.summary()["staleness"]["mean_over_updates"]
    lines.append(line(name, run.now_s / _SERVER_STEPS, late))
  if layer_costs is not None:
    # Small programs take longer than their share of a large one: layers are
    # measured with the very micro-batch that the tables have.
    parts = math.gcd(samples, 4)
    part = jax.tree.map(lambda x: x[: samples // parts], batch)
    costs = layer_costs(part)
    for name in _PIPELINES:
      best, _ = pipeline.plan(
        costs, machines, workers * samples, samples=samples // parts,
        tables=(name,), num_microbatches=(workers * parts,),
        num_stages=(min(workers, len(costs)),), recompute=(False,),
      )  # fmt: skip
      seconds = workers * samples / best.samples_per_s
      lines.append(line(f"{best.num_stages} stages, {name}", seconds, 0.0))
  titles = "protocol or pipeline", "ms", "faster", "staleness"
  return _output.table(
    f"Other ways to train with {workers * samples} samples",
    "By the virtual clock, in float32, from this step and its layers: a server "
    "on one more machine, and a stage of the model on each machine. Faster: "
    f"than {found.base}. Staleness: updates since a gradient's parameters were "
    "sent. `jdist train --protocol` or `--stages` trains.",
    {x: lambda *line, i=i: line[i] for i, x in enumerate(titles)},
    lines,
  )


def _megabits(rate: float | None) -> str:
  if rate is None:
    return "-"
  return "any" if rate in (0, math.inf) else f"{float(f'{rate / 1e6:.3g}'):,g}"


def _verdict(found: advice.Advice) -> str:
  if found.best == found.base:
    return (
      "No: on this link no method is faster than synchronous SGD beyond the "
      "spread of the measurements."
    )
  gain = found.seconds(found.base)[1] / found.seconds(found.best)[1]
  return (
    f"Yes: {found.best} takes {gain:.2f} times less time than {found.base}."
  )
