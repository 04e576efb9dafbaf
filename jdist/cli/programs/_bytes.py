"""`jdist bytes`: what a method sends, counted in three ways."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist import (
  collectives,
  methods,
  models,
  profiling,
  reducers,
  transforms,
)
from jdist.cli import _commands, _methods, _options, _output, _trained
from jdist.cli.programs import _abstract_model

# The program is read and never run: machine code need not be good.
_QUICKLY = {"xla_backend_optimization_level": 0}


@dataclasses.dataclass(frozen=True)
class Counted:
  """Bytes that one worker sends in a round, in a phase of a method.

  The codecs' count, `told`, is not rounded up to whole bytes; it is None where
  numbers are sent as they are, and of all phases but the last.
  """

  method: str
  phase: collectives.Phase | None  # None when all of the run is alike.
  interval: int
  told: float | None
  traced: float
  compiled: float  # For CPUs.


def count(options: _commands.Bytes) -> None:
  """Counts, and prints a table."""
  _options.check_names(
    "--methods", options.methods, "methods", methods.registry
  )
  names = tuple(name for name in models.NAMES if name != "transformer")
  _options.check_name("--model", options.model, names)
  _methods.check_used(_methods.common(options), options.methods)
  collectives.make_cpu_devices(options.workers)
  model, _ = _abstract_model.image_model(options.model)
  found = [
    one for method in options.methods for one in _count(method, options, model)
  ]
  dense = 4 * models.num_params(model)
  baseline = 2 * dense * (options.workers - 1) / options.workers
  _output.console().print(_table(found, baseline, options, model))


def _count(
  method: str, options: _commands.Bytes, model: models.Model
) -> list[Counted]:
  workers = collectives.workers(options.workers, substrate="shard_map")
  optimizer = optax.with_extra_args_support(
    _chain(method, options, workers.axis, model)
  )

  def step(params: Any, state: Any) -> Any:
    # Bytes do not depend on numbers: the parameters are their own gradients.
    updates, state = optimizer.update(
      params, state, params, loss=jnp.zeros((), jnp.float32)
    )
    return transforms.apply_updates(params, updates, state), state

  shapes = profiling.abstract_state(workers, optimizer, model.params)
  rows = (shapes.params, shapes.opt_state)
  one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)
  with reducers.reductions() as reduced:
    traced = collectives.traffic(
      step, *one, axis=workers.axis, num_workers=options.workers
    )
  program = (
    workers.jit(step, donate_argnums=(0, 1)).lower(*rows).compile(_QUICKLY)
  )
  compiled = collectives.Traffic(profiling.read_collectives(program))
  # MP² has rounds, too, of a step each.
  rounds = methods.registry[method].in_rounds
  interval = options.interval if rounds and traced.bytes_per_round else 1
  told = sum(bits.sent for bits in reduced) / 8 if reduced else None
  phases = _stretches(traced)
  return [
    Counted(
      method=method,
      phase=phase if len(phases) > 1 else None,
      interval=interval,
      told=told if phase.stop is None else None,
      traced=_in_round(traced, interval, phase.start),
      compiled=_in_round(compiled, interval, phase.start),
    )
    for phase in phases
  ]


def _chain(
  method: str,
  options: _commands.Bytes,
  axis: collectives.Axis,
  model: models.Model,
) -> optax.GradientTransformation:
  common = _methods.common(options)
  run = _methods.run_of(
    common,
    options.steps,
    options.warmup_steps,
    optax.constant_schedule(0.1),
  )
  networks = None
  if method == "mp2":
    networks = _trained.counted_arguments(options.cut, options.model, model)
  return _methods.build_method(method, common, run, axis, networks=networks)


def _stretches(traffic: collectives.Traffic) -> list[collectives.Phase]:
  """The run cut wherever a phase begins or ends."""
  ends = {p.stop for p in traffic.phases} - {None}
  cuts: list[Any] = sorted({0, *(p.start for p in traffic.phases), *ends})
  return [
    collectives.Phase(start, stop)
    for start, stop in zip(cuts, [*cuts[1:], None], strict=True)
  ]


def _in_round(traffic: collectives.Traffic, interval: int, start: int) -> float:
  return traffic.sent_bytes(interval, 1, after_steps=start, after_rounds=start)


def _table(
  found: list[Counted],
  baseline: float,
  options: _commands.Bytes,
  model: models.Model,
) -> Any:
  from rich import table

  grid = table.Table(
    title=f"{options.model}, {models.num_params(model):,} parameters, "
    f"{options.workers} workers: what each one sends",
    caption="Each worker receives as much. Traced and compiled count every "
    "collective as a ring or an all-to-all moves it: gathered payloads grow "
    "with the workers. Programs for CPUs widen sums of 16-bit floats.",
    title_justify="left",
    caption_justify="left",
  )
  phases = any(one.phase is not None for one in found)
  grid.add_column("method", no_wrap=True)
  if phases:
    grid.add_column("when", no_wrap=True)
  grid.add_column("round", justify="right")
  for name in ("MB a round: told", "traced", "compiled"):
    grid.add_column(name, justify="right", no_wrap=not phases)
  grid.add_column("MB a step", justify="right", no_wrap=not phases)
  grid.add_column("fewer than ssgd", justify="right")
  for one in found:
    step = one.traced / one.interval
    when = "always" if one.phase is None else str(one.phase)
    grid.add_row(
      one.method,
      *([when] if phases else []),
      str(one.interval),
      "-" if one.told is None else _megabytes(one.told),
      _megabytes(one.traced),
      _megabytes(one.compiled),
      _megabytes(step),
      f"{baseline / step:,.1f}x" if step else "-",
    )
  return grid


def _megabytes(num_bytes: float) -> str:
  # Without exponents, which a narrow column would cut off.
  return f"{num_bytes / 1e6:,.4g}" if num_bytes >= 100 else "< 0.0001"
