"""Counts the bytes that a step sends, from the traced step.

So the count holds for any composition and on any substrate: under `vmap`
nothing is sent, and the count is that of N machines.  The collectives of a
compiled program are read by `profiling.read_collectives`; tests compare both.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jdist.collectives import _axis, _phases

Kind = Literal[
  "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "permute"
]


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective operation of one worker.

  Attributes:
    kind: the operation.
    payload_bytes: bytes of this worker's operands.
    num_workers: the number of workers that take part.
    conditional: whether it stands in a conditional, and so does not run in
      every step.
    count: how often it runs when it does (the length of a loop).
    phase: the steps in which its branch of the conditional is taken, if known;
      None for a branch that is taken once a round.
  """

  kind: Kind
  payload_bytes: int
  num_workers: int
  conditional: bool = False
  count: int = 1
  phase: _phases.Phase | None = None

  @property
  def wire_bytes(self) -> float:
    """Bytes that one worker sends: N workers in a ring, payload b.

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
      "all-reduce": 2 * (n - 1) / n,
      "all-gather": n - 1,
      "reduce-scatter": (n - 1) / n,
      "all-to-all": (n - 1) / n,
      "permute": 1,
    }
    return float(factor[self.kind] * b)


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
  def phases(self) -> tuple[_phases.Phase, ...]:
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
    steps: int,
    rounds: int,
    *,
    after_steps: int = 0,
    after_rounds: int = 0,
  ) -> float:
    """Counts the bytes that a worker sends in steps, some of which end rounds.

    The steps and rounds of the run before them determine the phase.
    """
    sent = steps * self.bytes_per_step + rounds * self.bytes_per_round
    for phase in self.phases:
      if phase.unit == "step":
        times = phase.times(steps, after=after_steps)
      else:
        times = phase.times(rounds, after=after_rounds)
      sent += times * self._bytes_of(phase=phase)
    return sent

  def _bytes_of(self, **place: Any) -> float:
    return math.fsum(
      c.wire_bytes
      for c in self.collectives
      if all(getattr(c, name) == value for name, value in place.items())
    )


# The primitives' names in the supported versions of JAX.
_KINDS: dict[str, Kind] = {
  "psum": "all-reduce",
  "psum_invariant": "all-reduce",
  "pmax": "all-reduce",
  "pmin": "all-reduce",
  "all_gather": "all-gather",
  "all_gather_invariant": "all-gather",
  "reduce_scatter": "reduce-scatter",
  "all_to_all": "all-to-all",
  "ppermute": "permute",
}


def traffic(
  step: Callable[..., Any],
  *args: Any,
  axis: _axis.Axis,
  num_workers: int,
  inner_axes: Mapping[str, int] | None = None,
) -> Traffic:
  """Counts the collectives over the workers in one worker's step.

  Collectives over other axes of the user's mesh are not counted; those over
  the workers that run on each device of such an axis count for each.

  Args:
    step: one worker's step.
    *args: its arguments, arrays or `jax.ShapeDtypeStruct`, without a leading
      axis of workers.  Nothing is computed.
    axis: the axis of the step's collectives.
    num_workers: the number of machines, one a worker.
    inner_axes: the mesh's other axes, which a step's own `shard_map` may name,
      and their sizes.

  >>> from jdist import collectives
  >>> step = lambda x: collectives.mean(x, "worker")
  >>> gradient = jax.ShapeDtypeStruct((1000,), "float32")
  >>> traffic(step, gradient, axis="worker", num_workers=8).bytes_per_step
  7000.0
  """
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
  traced = jax.make_jaxpr(
    jax.shard_map(
      step,
      mesh=mesh,
      in_specs=PartitionSpec(),
      out_specs=PartitionSpec(),
      axis_names=set(names),
      check_vma=False,  # It is traced only, so that types do not matter.
    )
  )(*args)
  sizes = dict(zip(names, shape, strict=True))
  return Traffic(tuple(_walk(traced.jaxpr, sizes, _Place(), 1, inner)))


def communicates(function: Callable[..., Any], *args: Any) -> bool:
  """Returns whether a function has a collective, traced where it is called.

  Args:
    function: a function of one worker, called inside `Workers.jit`.
    *args: its arguments.

  >>> from jdist import collectives
  >>> step = lambda x: communicates(lambda x: collectives.mean(x, "worker"), x)
  >>> found = []
  >>> _ = jax.vmap(lambda x: found.append(step(x)) or x, axis_name="worker")(
  ...   jax.numpy.ones(2)
  ... )
  >>> found
  [True]
  """
  return _has_collective(jax.make_jaxpr(function)(*args).jaxpr)


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
    conditional: whether it is in a conditional.
    rare: whether that is one whose branch names no phase.
    phase: the phase of the branch around it, counted in steps of the run.
    before: the place of the innermost conditional, until its branch names a
      phase.
  """

  conditional: bool = False
  rare: bool = False
  phase: _phases.Phase | None = None
  before: "_Place | None" = None

  def branch(self) -> "_Place":
    """Returns the place inside a conditional that stands here."""
    return _Place(True, True, self.phase, self)

  def named(self, name: str) -> "_Place":
    """Returns the place inside a branch of a name, which may say its phase."""
    said = _phases.phases_in(name)
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
) -> Iterator[Collective]:
  for eqn in jaxpr.eqns:
    name = eqn.primitive.name
    # The name stack is empty again at the start of a branch.
    place = around.named(str(eqn.source_info.name_stack))
    if name in _KINDS:
      axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
      axes = (axes,) if isinstance(axes, str) else axes
      group = math.prod(sizes.get(axis, 1) for axis in axes)
      if group > 1:
        avals = [var.aval for var in eqn.invars]
        payload = sum(math.prod(x.shape) * x.dtype.itemsize for x in avals)
        kind, phase = _KINDS[name], place.phase
        yield Collective(kind, payload, group, place.conditional, count, phase)
    inside = place.branch() if name == "cond" else place
    times = count * eqn.params["length"] if name == "scan" else count
    if name == "shard_map":  # It runs on each of a worker's devices.
      manual = eqn.params["newly_manual_axes"]
      times *= math.prod(n for axis, n in inner.items() if axis in manual)
    for body in _bodies(eqn):
      yield from _walk(body, sizes, inside, times, inner)
