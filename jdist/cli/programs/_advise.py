"""`jdist advise`: whether communicating less pays, on this machine and link."""

import dataclasses
import functools
import importlib
import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, NamedTuple

import jax
import optax

from jdist import advice, cluster, collectives, methods, training
from jdist.cli import _commands, _methods, _options, _output, _workload

_INT4 = {"codec": "int4", "feedback": "error"}
_STREAMED: dict[str, Any] = {"interval_policy": "fixed", "stream": True}
# The methods and their options; the others are compared with the first one.
_CHOICES: tuple[tuple[str, dict[str, Any]], ...] = (
  ("ssgd", {}),
  ("ssgd", _INT4),
  ("powersgd", {}),
  ("topk_sgd", {}),
  ("local_sgd", {}),
  ("diloco", _INT4),
  ("msdpu", _STREAMED),
  ("msdpu", _STREAMED | _INT4),
)
_UTILIZATIONS = (0.5, 0.75, 0.9, 0.95, 0.99)


class Task(NamedTuple):
  """One worker's loss, parameters, batch and batch statistics."""

  loss_fn: Callable[..., Any]
  params: Any
  batch: Any
  model_state: Any = None


def advise(options: _commands.Advise) -> None:
  """Measures a step, and prints what each method would take on the link."""
  link = cluster.Link(
    options.bandwidth_mbit_per_s * 1e6, options.latency_ms / 1e3
  )
  if options.coordinator_address is not None:
    # In a process of its own: afterwards this one is alone with its step.
    spawn = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(1, spawn) as pool:
      link = pool.submit(_measured, options).result()
  task = _named(options) if options.step is None else _own(options.step)
  commands, chains = {}, {}
  for name, more in _CHOICES:
    label, command, chain = _choice(options, name, more)
    commands[label], chains[label] = command, chain
  found = advice.advise(
    task.loss_fn,
    task.params,
    task.batch,
    chains,
    link,
    num_workers=options.workers,
    optimizer=_methods.optimizer_of(options, _run(options)),
    model_state=task.model_state,
    slowdown=options.slowdown,
    limit_s=options.limit_s,
  )
  if options.process_id:
    return  # All processes measure the link, and the first one reports.
  console = _output.console()
  console.print(_times(found, options))
  console.print(_rates(found))
  for line in _verdict(found, commands):
    print(line)
  if options.output is not None:
    output = _output.output_directory(options.output, "advise")
    training.append_rows(output / "rows.jsonl", _rows(options, found))
    _output.print_files(output)


def _measured(options: _commands.Advise) -> cluster.Link:
  _options.join_processes(options, options.workers)
  return advice.measure_link(collectives.workers(options.workers))


def _named(options: _commands.Advise) -> Task:
  """Returns the task of a model and data set, as `jdist train` has it."""
  options = _workload.named(options)
  _workload.check(options)
  vmap = functools.partial(
    collectives.workers, options.workers, substrate="vmap"
  )
  workload = _workload.build(options, vmap)
  model = workload.model(0)
  batch = jax.tree.map(
    lambda x: x[0], next(workload.batches(seed=0).iterate(0))
  )
  loss_fn = workload.loss(model.apply)
  return Task(loss_fn, model.params, batch, model.state)


def _own(name: str) -> Task:
  """Calls MODULE:FUNCTION, which returns the parts of a task."""
  module, colon, attribute = name.partition(":")
  try:
    if not colon:
      raise ValueError("there is no colon")
    function = getattr(importlib.import_module(module), attribute)
  except (ImportError, AttributeError, ValueError) as error:
    raise ValueError(
      "`--step` must be MODULE:FUNCTION of a function that can be imported, "
      f"got {name!r}: {error}."
    ) from None
  found = function() if callable(function) else function
  if not isinstance(found, tuple) or len(found) not in (3, 4):
    raise ValueError(
      "`--step` must return `loss_fn, params, batch` or `loss_fn, params, "
      f"batch, model_state` of one worker, got {type(found).__name__} from "
      f"{name}."
    )
  return Task(*found)


def _run(options: _commands.Advise) -> methods.Run:
  # The run must be longer than any round, of which the last is cut short.
  rate = optax.constant_schedule(options.learning_rate)
  return _methods.run_of(options, 1_000_000, 0, rate)


def _choice(
  options: _commands.Advise, name: str, more: dict[str, Any]
) -> tuple[str, str, tuple[Callable[..., Any], int]]:
  """Returns a choice's label, its command and its chain."""
  chosen = dataclasses.replace(options, **more)
  rounds = methods.registry[name].in_rounds
  interval = options.interval if rounds else 1
  parts = [name, f"H={interval}" if rounds else "", more.get("codec", "")]
  parts.append("streamed" if "stream" in more else "")
  words = ["jdist train", f"--method {name}"]
  if options.step is None:
    words.insert(1, f"--preset {options.preset} --model {options.model}")
  words += [f"--interval {interval}"] if rounds else []
  words += [
    f"--{key.replace('_', '-')}" + ("" if value is True else f" {value}")
    for key, value in more.items()
  ]

  def chain(axis: collectives.Axis) -> optax.GradientTransformation:
    return _methods.build_method(name, chosen, _run(chosen), axis)

  return " ".join(filter(None, parts)), " ".join(words), (chain, interval)


def _times(found: advice.Advice, options: _commands.Advise) -> Any:
  base_s = found.seconds(found.base)[1]

  def spread(name: str) -> str:
    low, middle, high = found.seconds(name)
    return f"{50 * (high - low) / middle:.0f}"

  def sent_kb(name: str) -> float:
    return found.costs[name].round_bytes / found.costs[name].interval / 1e3

  def extra_ms(name: str) -> float:
    return 1e3 * found.slowdown * statistics.median(found.costs[name].extra_s)

  columns: dict[str, Callable[[str], str]] = {
    "method": str,
    "ms a step": lambda x: f"{1e3 * found.seconds(x)[1]:.4g}",
    "± %": spread,
    "faster": lambda x: f"{base_s / found.seconds(x)[1]:.2f}x",
    "waits %": lambda x: f"{100 * found.exposed_share(x):.0f}",
    "kB a step": lambda x: f"{sent_kb(x):,.1f}",
    "adds ms": lambda x: f"{extra_ms(x):.3g}",
    "pays": lambda x: (
      "-" if x == found.base else "yes" if found.pays(x) else "no"
    ),
    "below Mbit/s": lambda x: _megabits(found.pays_below(x)),
  }
  rate, latency = found.link.bandwidth_bits_per_s, found.link.latency_s
  return _output.table(
    f"{options.workers} workers, links of {rate / 1e6:.4g} Mbit/s and "
    f"{1e3 * latency:.3g} ms: predicted times, from measurements here",
    "± is half of a 90 % interval. Waits: the share of a step in which a "
    "worker waits for messages. Adds: what the method computes itself. Below: "
    "the bandwidth below which it pays. Accuracy is unknown here: see "
    "docs/methods.md.",
    columns,
    found.costs,
  )


def _rates(found: advice.Advice) -> Any:
  def rate(name: str, part: float) -> str:
    return _megabits(found.rate_for(name, part))

  columns: dict[str, Callable[[str], str]] = {"method": str}
  columns |= {
    f"{100 * part:g} %": functools.partial(rate, part=part)
    for part in _UTILIZATIONS
  }
  return _output.table(
    "Mbit/s at which so much of a step is the model's own computation",
    "A dash: on no link, since the method itself computes too long.",
    columns,
    found.costs,
  )


def _megabits(rate: float | None) -> str:
  if rate is None:
    return "-"
  return "any" if rate in (0, math.inf) else f"{rate / 1e6:,.3g}"


def _verdict(found: advice.Advice, commands: dict[str, str]) -> Iterator[str]:
  best = found.best
  if best == found.base:
    yield (
      "No: on this link no method is faster than synchronous SGD beyond the "
      "spread of the measurements."
    )
  else:
    gain = found.seconds(found.base)[1] / found.seconds(best)[1]
    yield f"Yes: {best} takes {gain:.2f} times less time than {found.base}."
  yield f"  {commands[best]}"


def _rows(
  options: _commands.Advise, found: advice.Advice
) -> list[dict[str, Any]]:
  return [
    training.make_row(
      dataclasses.asdict(options),
      0,
      method=name,
      predicted_s=found.seconds(name),
      pays=found.pays(name),
      pays_below_bits_per_s=found.pays_below(name),
      costs=dataclasses.asdict(costs),
    )
    for name, costs in found.costs.items()
  ]
