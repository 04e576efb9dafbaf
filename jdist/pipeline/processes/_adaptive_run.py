"""A pipeline that is cut anew while it trains, when its machines change."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import optax

from jdist import checks, cluster
from jdist.pipeline.planning import Plan, Proposal, Replanner
from jdist.pipeline.processes import _device_part, _layer_moves
from jdist.pipeline.schedule import Action, Op, Table

PyTree = Any


class _Process(_layer_moves.ProcessLike, Protocol):
  """A `StageProcess` with `timeline=True`."""

  def run(
    self, state: _device_part.ProcessState, batches: Sequence[PyTree]
  ) -> tuple[_device_part.ProcessState, list[dict[str, float]]]: ...

  def trace(self) -> cluster.Trace: ...


class AdaptiveRun:
  """One process of a pipeline whose layers move to where they are run fastest.

  After each call of `run` nothing is under way.  Then all processes have the
  timeline of all, and give the same seconds to a `Replanner` of their own: what
  it proposes, all of them do.  Layers move with their optimizer's state, see
  `move_layers`; where throughput did not rise they move back.  What a process
  has compiled it keeps.  The first run with new cuts compiles, and is not
  measured.

  Attributes:
    process: that runs.
    history: what was proposed, after which step.
    stage_s: of the last run, see `stage_seconds`.
    samples_per_s: of the last run, in the longest time of a device from its
      first action to its last.
  """

  def __init__(
    self,
    make_process: Callable[[Plan], _Process],
    replanner: Replanner,
    optimizer: optax.GradientTransformation,
  ):
    """Makes the process of the first plan.

    Args:
      make_process: returns a `StageProcess` of a plan's cuts, with
        `timeline=True`; always of the same layers and peers.
      replanner: with the same plan, costs and options in all processes.
      optimizer: whose state can be taken apart, see `move_layers`.
    """
    checks.check_function("make_process", make_process, "a plan")
    checks.check_optimizer("optimizer", optimizer)
    self._make, self._replanner = make_process, replanner
    self._optimizer = optimizer
    self._processes: dict[Any, _Process] = {}
    self._compiled: set[Any] = set()
    self.history: list[tuple[int, Proposal]] = []
    self.stage_s: list[float] = []
    self.samples_per_s = 0.0
    self.process = self._process_of(replanner.plan)

  @property
  def plan(self) -> Plan:
    """The plan that runs."""
    return self._replanner.plan

  def init_state(self, *args: Any, **options: Any) -> _device_part.ProcessState:
    """Makes the state at the run's beginning, see `StageProcess`."""
    return self.process.init_state(self._optimizer, *args, **options)

  def run(
    self, state: _device_part.ProcessState, batches: Sequence[PyTree]
  ) -> tuple[_device_part.ProcessState, list[dict[str, float]]]:
    """Runs the table as `StageProcess.run`, and then moves layers if need be.

    Args:
      state: of `init_state` or an earlier run.
      batches: of one measurement; those of a few tables, so that it says
        something.

    Returns:
      The state, perhaps of other cuts, and loss and metrics of each iteration.
    """
    batches = list(batches)
    state, metrics = self.process.run(state, batches)
    trace = self.process.trace()
    samples = len(batches) * len(jax.tree.leaves(batches[0])[0])
    self.samples_per_s = samples / _longest_s(trace)
    self.stage_s = stage_seconds(self.process.table, trace)
    key = _key(self.plan)
    if key not in self._compiled:
      self._compiled.add(key)
      return state, metrics
    proposal = self._replanner.observe(self.stage_s, self.samples_per_s)
    if proposal is not None:
      self.history.append((state.step, proposal))
      before, self.process = self.process, self._process_of(proposal.plan)
      state = _layer_moves.move_layers(
        state, before, self.process, self._optimizer
      )
    return state, metrics

  def _process_of(self, plan: Plan) -> _Process:
    key = _key(plan)
    if key not in self._processes:
      self._processes[key] = self._make(plan)
    return self._processes[key]


def stage_seconds(table: Table, trace: cluster.Trace) -> list[float]:
  """Returns the seconds of both passes of a micro-batch in each stage.

  Medians over a timeline; no waiting is counted.

  Args:
    table: that has run.
    trace: of `StageProcess.trace`.
  """
  parts: dict[tuple[int, Op], list[float]] = {}
  actions: dict[str, Action] = {str(x): x for x in table}
  for span in trace:
    action = actions[span.name]
    if action.op != Op.UPDATE:
      key = action.stage, action.op
      parts.setdefault(key, []).append(span.seconds)
  found = [0.0] * table.num_stages
  for (stage, _), seconds in parts.items():
    found[stage] += statistics.median(seconds)
  return found


def _longest_s(trace: cluster.Trace) -> float:
  """Returns the longest time from a device's first action to its last.

  Each by its own clock, as those of several machines are not aligned.
  """
  first: dict[str, float] = {}
  last: dict[str, float] = {}
  for span in trace:
    device = span.resource
    first[device] = min(span.start_s, first.get(device, span.start_s))
    last[device] = max(span.end_s, last.get(device, span.end_s))
  return max(last[device] - first[device] for device in first)


def _key(plan: Plan) -> tuple[tuple[int, ...], tuple[str, ...]]:
  return plan.cuts, plan.nodes
