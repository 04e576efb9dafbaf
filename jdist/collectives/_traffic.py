"""Counts the bytes that a step sends, from the traced step.

So the count holds for any composition and on any substrate: under `vmap`
nothing is sent, and the count is that of N machines.  The collectives of a
compiled program are read by `profiling.read_collectives`; tests compare both.

A method with a warm-up sends other bytes in each branch of a conditional on the
step.  A branch states its steps in its name, which JAX keeps in the traced
step, the compiled program and the profile.
"""

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jdist import checks, signatures
from jdist.collectives import _axis

_NAME = re.compile(r"jdist_phase_from_(\d+)_to_(\d+|end)")
# The name of a branch in the names of a compiled program.
_BRANCH = re.compile(r"/branch_\d+_fun")
Kind = Literal[
  "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "permute"
]  # The kinds of collectives that send messages.
# The primitives' names in the supported versions of JAX.
_KINDS: dict[str, Kind] = {
  "psum": "all-reduce", "psum_invariant": "all-reduce", "pmax": "all-reduce",
  "pmin": "all-reduce", "all_gather": "all-gather",
  "all_gather_invariant": "all-gather", "reduce_scatter": "reduce-scatter",
  "all_to_all": "all-to-all", "ppermute": "permute",
}  # fmt: skip


@signatures.checked
@dataclasses.dataclass(frozen=True)
class Phase:
  """The steps in which a branch of a conditional is taken.

  Attributes:
    start: The first step, from 0.
    stop: The first step after the phase; None for a phase without end.
    unit: Whether steps are counted, or rounds, for a conditional at a round's
      end.
  """

  start: signatures.NonNegativeInt
  stop: signatures.NonNegativeInt | None = None
  unit: Literal["step", "round"] = "step"

  @classmethod
  def of(cls, path: str) -> "Phase | None":
    """Reads the phase of an operation off its full name in a compiled program.

    >>> Phase.of("jit(step)/cond/branch_0_fun/jdist_phase_from_2_to_5/psum")
    Phase(start=2, stop=5, unit='step')
    """
    said = phases_in(path)
    if not said:
      return None
    rare = len(_BRANCH.findall(path)) > len(said)
    found = dataclasses.replace(said[0], unit="round" if rare else "step")
    for inner in said[1:]:
      found = inner.inside(found)
    return found

  def times(self, count: int, *, after: int = 0) -> int:
    """Counts the steps of the phase among `count` that follow `after` others.

    >>> Phase(2, 5).times(4), Phase(2, 5).times(4, after=4), Phase(2).times(9)
    (2, 1, 7)
    """
    last = after + count
    if self.stop is not None:
      last = min(last, self.stop)
    return max(0, last - max(after, self.start))

  def inside(self, outer: "Phase") -> "Phase":
    """Counts this phase, which begins with the outer one, in the run's steps.

    >>> Phase(2).inside(Phase(10, 14)), Phase(0, 3).inside(Phase(10, 12))
    (Phase(start=12, stop=14, unit='step'), \
Phase(start=10, stop=12, unit='step'))
    """
    stops = [] if outer.stop is None else [outer.stop]
    if self.stop is not None:
      stops.append(outer.start + self.stop)
    start = outer.start + self.start
    return Phase(start, min(stops) if stops else None, outer.unit)

  def __str__(self) -> str:
    """Prints for instance `steps 1-4` or `from step 5 on`, from 1.

    >>> print(Phase(0, 4), Phase(4, None, "round"), sep=", ")
    steps 1-4, from round 5 on
    """
    if self.stop is None:
      return f"from {self.unit} {self.start + 1:,} on"
    if self.stop == self.start + 1:
      return f"{self.unit} {self.stop:,}"
    return f"{self.unit}s {self.start + 1:,}-{self.stop:,}"


def phase(
  start: int, stop: int | None = None
) -> contextlib.AbstractContextManager[None]:
  """States when a conditional's branch is taken, for the count of bytes.

  Times are counted where the conditional is reached: in steps of the run, in
  rounds at a round's end, and inside a branch with a phase in that branch's
  steps.  A wrapper that skips steps (`optax.apply_if_finite`) shifts the count.

  Args:
    start: The first time, from 0.
    stop: The time of its end, after `start`; None for a phase without end.

  >>> step = lambda x, is_first: jax.lax.cond(is_first, warm, go_on, x)
  >>> def warm(x):
  ...   with phase(0, 1):
  ...     return 2 * x
  >>> def go_on(x):
  ...   with phase(1):
  ...     return x
  >>> step(3.0, True).item()
  6.0
  """
  Phase(start, stop)
  if stop is not None and stop <= start:
    raise ValueError(
      f"`stop` must be above `start`, {start}, or None, got {stop}: this "
      "branch would never be entered."
    )
  end = "end" if stop is None else stop
  return jax.named_scope(f"jdist_phase_from_{start}_to_{end}")


def phases_in(name: str) -> tuple[Phase, ...]:
  """Reads the phases in a name that JAX made, the outermost first."""
  return tuple(
    Phase(int(start), None if stop == "end" else int(stop))
    for start, stop in _NAME.findall(name)
  )


@signatures.checked
@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective operation of one worker.

  Attributes:
    kind: The operation.
    payload_bytes: Bytes of this worker's operands.
    num_workers: The number of workers that take part.
    conditional: Whether it stands in a conditional, and so does not run in
      every step.
    count: How often it runs when it does (the length of a loop).
    phase: The steps in which its branch of the conditional is taken, if known;
      None for a branch that is taken once a round.
    depth: The number of collectives, this one included, on the longest way of
      data to it in a traced step. Compilers merge those of one kind and depth.
  """

  kind: Kind
  payload_bytes: signatures.NonNegativeInt
  num_workers: signatures.PositiveInt
  conditional: bool = False
  count: int = 1
  phase: Phase | None = None
  depth: int = 1

  @property
  def wire_bytes(self) -> float:
    """Bytes that one of N workers sends in a ring, for a payload of b bytes.

    | kind | bytes sent |
    |---|---|
    | all-reduce | 2 (N-1)/N b |
    | all-gather | (N-1) b |
    | reduce-scatter, all-to-all | (N-1)/N b |
    | permute | b |

    It receives as much.

    >>> Collective("all-reduce", 1000, num_workers=8).wire_bytes
    1750.0
    """
    n, b = self.num_workers, self.payload_bytes * self.count
    if n == 1:
      return 0.0
    factor = {
      "all-reduce": 2 * (n - 1) / n, "all-gather": n - 1,
      "reduce-scatter": (n - 1) / n, "all-to-all": (n - 1) / n, "permute": 1,
    }  # fmt: skip
    return float(factor[self.kind] * b)


@signatures.explained
@dataclasses.dataclass(frozen=True)
class Traffic:
  """The collectives of one worker's step, and their bytes."""

  collectives: tuple[Collective, ...]

  @property
  def bytes_per_step(self) -> float:
    """Bytes that a worker sends in every step, whatever the phase."""
    return self._bytes_of(conditional=False)

  @property
  def bytes_per_round(self) -> float:
    """Bytes that it sends in addition in the steps that end a round."""
    return self._bytes_of(conditional=True, phase=None)

  @property
  def phases(self) -> tuple[Phase, ...]:
    """The phases in which something is sent, in order."""
    found = {c.phase for c in self.collectives if c.phase is not None}
    return tuple(
      sorted(
        # A phase inside a shorter one may never be reached.
        (p for p in found if p.stop is None or p.stop > p.start),
        key=lambda p: (p.start, p.stop is None, p.stop, p.unit),
      )
    )

  def sent_bytes(
    self,
    steps: signatures.NonNegativeInt,
    rounds: signatures.NonNegativeInt,
    *,
    after_steps: signatures.NonNegativeInt = 0,
    after_rounds: signatures.NonNegativeInt = 0,
  ) -> float:
    """Counts the bytes that a worker sends in steps, some of which end rounds.

    The steps and rounds of the run before them determine the phase.
    """
    sent = steps * self.bytes_per_step + rounds * self.bytes_per_round
    for phase in self.phases:
      spans = {"step": (steps, after_steps), "round": (rounds, after_rounds)}
      count, after = spans[phase.unit]
      sent += phase.times(count, after=after) * self._bytes_of(phase=phase)
    return sent

  def _bytes_of(self, **place: Any) -> float:
    return math.fsum(
      c.wire_bytes
      for c in self.collectives
      if all(getattr(c, name) == value for name, value in place.items())
    )


def traffic(
  step: Callable[..., Any],
  *args: Any,
  axis: _axis.Axis,
  num_workers: int,
  inner_axes: Mapping[str, int] | None = None,
) -> Traffic:
  """Counts the collectives over the workers in one worker's step.

  Collectives over other axes of the user's mesh are not counted, nor are those
  that no result depends on, which a compiled step has not; those over the
  workers that run on each device of such an axis count for each.

  Args:
    step: One worker's step.
    *args: One worker's arguments or their `jax.ShapeDtypeStruct`s.
    axis: The axis of the step's collectives.
    num_workers: The number of machines, one a worker.
    inner_axes: The mesh's other axes, which a step's own `shard_map` may name,
      and their sizes.

  >>> from jdist import collectives
  >>> step = lambda x: collectives.mean(x, "worker")
  >>> gradient = jax.ShapeDtypeStruct((1000,), "float32")
  >>> traffic(step, gradient, axis="worker", num_workers=8).bytes_per_step
  7000.0
  """
  checks.check_function("step", step, "its arguments", len(args))
  checks.check_int("num_workers", num_workers, 1)
  names = (axis,) if isinstance(axis, str) else tuple(axis or ())
  if not names:
    return Traffic(())
  shape = (1,) * (len(names) - 1) + (num_workers,)
  inner = dict(inner_axes or {})
  mesh = AbstractMesh(
    (*shape, *inner.values()),
    (*names, *inner),
    axis_types=(AxisType.Auto,) * (len(names) + len(inner)),
  )
  sharded = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=PartitionSpec(),
    out_specs=PartitionSpec(),
    axis_names=set(names),
    check_vma=False,  # It is traced only, so that types do not matter.
  )
  traced = _used(sharded, *args)
  sizes = dict(zip(names, shape, strict=True))
  return Traffic(tuple(_walk(traced, sizes, _Place(), 1, inner, {})))


def communicates(function: Callable[..., Any], *args: Any) -> bool:
  """Returns whether a function has a collective, traced where it is called.

  Args:
    function: a function of one worker, called inside `Workers.jit`.
    *args: Its arguments.

  >>> from jdist import collectives
  >>> step = lambda x: communicates(lambda x: collectives.mean(x, "worker"), x)
  >>> found = []
  >>> _ = jax.vmap(lambda x: found.append(step(x)) or x, axis_name="worker")(
  ...   jax.numpy.ones(2)
  ... )
  >>> found
  [True]
  """
  checks.check_function("function", function, "its arguments", len(args))
  return _has_collective(_used(function, *args))


def _used(function: Callable[..., Any], *args: Any) -> Any:
  """Traces what a compiled function runs: all that its results depend on."""
  jaxpr = jax.make_jaxpr(function)(*args).jaxpr
  return partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]


def _has_collective(jaxpr: Any) -> bool:
  return any(
    eqn.primitive.name in _KINDS or any(map(_has_collective, _bodies(eqn)))
    for eqn in jaxpr.eqns
  )


def _bodies(eqn: Any) -> Iterator[Any]:
  """Returns the jaxprs among an equation's parameters."""
  for value in eqn.params.values():
    for body in value if isinstance(value, list | tuple) else (value,):
      # A closed jaxpr holds a jaxpr; either may be a parameter.
      body = getattr(body, "jaxpr", body)
      if hasattr(body, "eqns"):
        yield body


class _Place(NamedTuple):
  """The place of an equation in a program.

  Attributes:
    conditional: Whether it is in a conditional.
    rare: Whether that is one whose branch names no phase.
    phase: The phase of the branch around it, counted in steps of the run.
    before: The place of the innermost conditional, until its branch names a
      phase.
  """

  conditional: bool = False
  rare: bool = False
  phase: Phase | None = None
  before: "_Place | None" = None

  def branch(self) -> "_Place":
    """Returns the place inside a conditional that stands here."""
    return _Place(True, True, self.phase, self)

  def named(self, name: str) -> "_Place":
    """Returns the place inside a branch of a name, which may say its phase."""
    said = phases_in(name)
    if self.before is None or not said:
      return self
    around = self.before
    phase = dataclasses.replace(
      said[-1], unit="round" if around.rare else "step"
    )
    if around.phase is not None:
      phase = phase.inside(around.phase)
    return _Place(True, around.rare, phase)


def _walk(
  jaxpr: Any,
  sizes: dict[str, int],
  around: _Place,
  count: int,
  inner: Mapping[str, int],
  depths: dict[int, int],
) -> Iterator[Collective]:
  for eqn in jaxpr.eqns:
    name = eqn.primitive.name
    given = [depths.get(id(x), 0) for x in eqn.invars]
    depth = max(given, default=0)
    # The name stack is empty again at the start of a branch.
    place = around.named(str(eqn.source_info.name_stack))
    if name in _KINDS:
      axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
      axes = (axes,) if isinstance(axes, str) else axes
      group = math.prod(sizes.get(axis, 1) for axis in axes)
      if group > 1:
        avals = [var.aval for var in eqn.invars]
        payload = sum(math.prod(x.shape) * x.dtype.itemsize for x in avals)
        depth, where = depth + 1, (place.conditional, count, place.phase)
        yield Collective(_KINDS[name], payload, group, *where, depth)
    inside = place.branch() if name == "cond" else place
    times = count * eqn.params["length"] if name == "scan" else count
    if name == "shard_map":  # It runs on each of a worker's devices.
      manual = eqn.params["newly_manual_axes"]
      times *= math.prod(n for axis, n in inner.items() if axis in manual)
    ends = []
    for body in _bodies(eqn):
      # The number of a conditional's branch comes before its operands.
      own = given[-len(body.invars) :]
      depths.update(zip(map(id, body.invars), own, strict=False))
      yield from _walk(body, sizes, inside, times, inner, depths)
      if len(body.outvars) == len(eqn.outvars):
        ends.append([depths.get(id(x), 0) for x in body.outvars])
    for var, *of in zip(eqn.outvars, *ends, strict=True):
      depths[id(var)] = max(of, default=depth)
