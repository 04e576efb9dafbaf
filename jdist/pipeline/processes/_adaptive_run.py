"""A pipeline that is cut again during training when its machines change."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jdist import cluster, signatures
from jdist.pipeline.planning._plan import Plan
from jdist.pipeline.planning._replanner import Proposal, Replanner
from jdist.pipeline.processes import _device_part, _layer_moves
from jdist.pipeline.schedule._table import Action, Op, Table

PyTree = Any


@signatures.checked
class AdaptiveRun:
  """One process of a pipeline whose layers move to where they run fastest.

  After each call of `run` no work is in progress.  Then all processes exchange
  their timelines and feed the same seconds to a `Replanner` each, so that all
  of them reach the same decision without another message.  Layers move with
  their optimizer state; if throughput does not rise, they move back.  A process
  keeps its compiled programs.  The first run with new cuts compiles and is not
  measured.

  Attributes:
    process: The process with the current cuts.
    history: The proposals so far, each with the step after which it was made.
    stage_s: The seconds of both passes of a micro-batch in each stage, as
      medians over the last run.
    samples_per_s: The throughput of the last run.
  """

  def __init__(
    self,
    make_process: Callable[[Plan], Any],
    replanner: Replanner,
    optimizer: signatures.Optimizer,
  ):
    """Makes the process of the first plan.

    Args:
      make_process: Returns a `StageProcess` of a plan's cuts, with
        `timeline=True`, and always of the same layers and peers.
      replanner: A replanner with the same plan, costs and options in all
        processes.
      optimizer: An optimizer whose state has a part for each parameter, and
        otherwise counts only; or one that decides by all leaves.
    """
    self._make, self._replanner = make_process, replanner
    self._optimizer = optimizer
    self._processes: dict[Any, Any] = {}
    self._compiled: set[Any] = set()
    self.history: list[tuple[int, Proposal]] = []
    self.stage_s: list[float] = []
    self.samples_per_s = 0.0
    self.process = self._process_of(replanner.plan)

  @property
  def plan(self) -> Plan:
    """The current plan."""
    return self._replanner.plan

  def init_state(self, *args: Any, **options: Any) -> _device_part.ProcessState:
    """Makes the initial state, as `StageProcess.init_state` does."""
    return self.process.init_state(self._optimizer, *args, **options)

  def run(
    self, state: _device_part.ProcessState, batches: Sequence[PyTree]
  ) -> tuple[_device_part.ProcessState, list[dict[str, float]]]:
    """Runs the table as `StageProcess.run`, then moves layers if necessary.

    Args:
      state: The state from `init_state` or an earlier run.
      batches: The batches of one measurement.  Several runs of the table make
        it less noisy.

    Returns:
      The state, perhaps of other cuts, and loss and metrics of each iteration.
    """
    batches = list(batches)
    state, metrics = self.process.run(state, batches)
    # This also empties the timeline, so no later run counts these seconds.
    trace = self.process.trace()
    # The slowest device limits the pipeline.
    samples = len(batches) * len(jax.tree.leaves(batches[0])[0])
    self.samples_per_s = samples / _longest_s(trace)
    self.stage_s = stage_seconds(self.process.table, trace)
    # This run has compiled its programs if these cuts are new.
    key = self.plan.cuts, self.plan.nodes
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

  def _process_of(self, plan: Plan) -> Any:
    key = plan.cuts, plan.nodes
    if key not in self._processes:
      self._processes[key] = self._make(plan)
    return self._processes[key]


def stage_seconds(table: Table, trace: cluster.Trace) -> list[float]:
  """Returns the median seconds of both passes of a micro-batch in each stage.

  Time spent waiting for messages is not included.
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
    # A median, as a single hiccup of the machine must not move layers.
    found[stage] += statistics.median(seconds)
  return found


def _longest_s(trace: cluster.Trace) -> float:
  """Returns the longest time from a device's first action to its last."""
  # Each device is measured by its own clock, as clocks of several machines are
  # not aligned.
  times: dict[str, list[float]] = {}
  for span in trace:
    times.setdefault(span.resource, []).extend((span.start_s, span.end_s))
  return max(max(each) - min(each) for each in times.values())
