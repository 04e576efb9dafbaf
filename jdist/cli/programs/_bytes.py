"""`jdist bytes`: the bytes that a method sends, counted in three ways."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jdist import collectives, methods, models, profiling, reducers, transforms
from jdist.cli import _commands, _methods, _options, _output, _trained
from jdist.cli.programs import _overlap_inputs

# The program is read and never run, so that it need not be optimized.
_QUICKLY = {"xla_backend_optimization_level": 0}


@dataclasses.dataclass(frozen=True)
class Counted:
  """Bytes that one worker sends in a round, in a phase if a method has several.

  The codecs' count is not rounded up to whole bytes; it is None without a codec
  and in all phases but the last.
  """

  method: str
  phase: collectives.Phase | None
  interval: int
  coded: float | None
  traced: float
  compiled: float


def count(options: _commands.Bytes) -> None:
  """Counts the bytes of each method, and prints a table."""
  names = tuple(name for name in models.MODELS if name != "transformer")
  _options.check_name("--model", options.model, names)
  _methods.check("--methods", options, options.methods)
  collectives.make_cpu_devices(options.workers)
  model, _ = _overlap_inputs.image_model(options.model)
  # Only shard_map compiles to collectives; vmap would have none.
  workers = collectives.workers(options.workers, substrate="shard_map")
  # Wrong options are refused before anything is compiled.
  chains = {
    method: _chain(method, options, model, workers.axis)
    for method in options.methods
  }
  found = [
    one
    for method, optimizer in chains.items()
    for one in _count(method, options, model, workers, optimizer)
  ]
  _output.console().print(_table(found, options, model))


def _chain(
  method: str,
  options: _commands.Bytes,
  model: models.Model,
  axis: collectives.Axis,
) -> optax.GradientTransformationExtraArgs:
  common = _methods.common(options)
  rate = optax.constant_schedule(0.1)
  run = _methods.run_of(common, options.steps, options.warmup_steps, rate)
  networks = None
  if method == _methods.TRAINED:
    networks = _trained.counted_arguments(options.cut, options.model, model)
  return _methods.build_method(method, common, run, axis, networks=networks)


def _count(
  method: str,
  options: _commands.Bytes,
  model: models.Model,
  workers: collectives.Workers,
  optimizer: optax.GradientTransformationExtraArgs,
) -> list[Counted]:
  def step(params: Any, state: Any) -> Any:
    # Bytes do not depend on numbers: the parameters serve as gradients.
    updates, state = optimizer.update(
      params, state, params, loss=jnp.zeros((), jnp.float32)
    )
    return transforms.apply_updates(params, updates, state), state

  shapes = profiling.abstract_state(workers, optimizer, model.params)
  # Traced is one worker's part, and compiled are all workers' rows.
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
  # MP² has traffic in rounds, too, but its rounds have one step.
  rounds = methods.registry[method].in_rounds
  interval = options.interval if rounds and traced.bytes_per_round else 1
  coded = sum(bits.sent for bits in reduced) / 8 if reduced else None
  phases = _phases(traced)
  return [
    Counted(
      method=method,
      phase=phase if len(phases) > 1 else None,
      interval=interval,
      coded=coded if phase.stop is None else None,
      traced=_in_round(traced, interval, phase.start),
      compiled=_in_round(compiled, interval, phase.start),
    )
    for phase in phases
  ]


def _phases(traffic: collectives.Traffic) -> list[collectives.Phase]:
  """Splits the run wherever a phase begins or ends."""
  ends = {p.stop for p in traffic.phases} - {None}
  cuts: list[Any] = sorted({0, *(p.start for p in traffic.phases), *ends})
  return [
    collectives.Phase(start, stop)
    for start, stop in zip(cuts, [*cuts[1:], None], strict=True)
  ]


def _in_round(traffic: collectives.Traffic, interval: int, start: int) -> float:
  return traffic.sent_bytes(interval, 1, after_steps=start, after_rounds=start)


def _table(
  found: list[Counted], options: _commands.Bytes, model: models.Model
) -> Any:
  size = models.num_params(model)
  # The all-reduce of ssgd, in a ring.
  exact = 2 * 4 * size * (options.workers - 1) / options.workers
  columns: dict[str, Callable[[Counted], str]] = {"method": lambda x: x.method}
  if any(one.phase is not None for one in found):
    columns["when"] = lambda x: "always" if x.phase is None else str(x.phase)
  left = len(columns)
  columns |= {
    "round": lambda x: str(x.interval),
    "MB a round: coded": lambda x: (
      "-" if x.coded is None else _megabytes(x.coded)
    ),
    "traced": lambda x: _megabytes(x.traced),
    "compiled": lambda x: _megabytes(x.compiled),
    "MB a step": lambda x: _megabytes(x.traced / x.interval),
    "fewer than ssgd": lambda x: (
      f"{exact * x.interval / x.traced:,.1f}x" if x.traced else "-"
    ),
  }
  return _output.table(
    f"{options.model}, {size:,} parameters, N = {options.workers}: bytes that "
    "each worker sends",
    "Each worker receives as much. Coded: the codecs' own count. Traced and "
    "compiled count every collective as a ring or an all-to-all moves it: "
    "gathered payloads grow with the workers. Programs for CPUs widen sums of "
    "16-bit floats.",
    columns,
    found,
    left=left,
  )


def _megabytes(num_bytes: float) -> str:
  return f"{num_bytes / 1e6:,.4g}" if num_bytes >= 100 else "< 0.0001"
