"""A pipeline that is cut again during training when its machines change.

`Replanner` decides, and `AdaptiveRun` moves layers by `layer_moves`.
Copy it to change its rules: which drift is worth a move depends on machines.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import layer_moves
import optax

from jdist import cluster, pipeline
from jdist.pipeline.planning import _bottleneck

PyTree = Any


@dataclasses.dataclass(frozen=True)
class LayerMove:
  """A layer that moves to another machine, with its optimizer state.

  Attributes:
    layer: The number of the layer.
    source: The machine that has it.
    target: The machine that receives it.
  """

  layer: int
  source: str
  target: str


@dataclasses.dataclass(frozen=True)
class Proposal:
  """A plan to change to at the next drained step.

  Attributes:
    plan: The new plan.
    moves: The layers that change their machine.
    returns: Whether this restores the previous plan, as the last one was no
      faster.
  """

  plan: pipeline.Plan
  moves: tuple[LayerMove, ...]
  returns: bool = False


class Replanner:
  r"""Follows measured seconds and proposes plans when machines have changed.

  For each stage it keeps a moving average of its seconds t,

  .. math:: e \leftarrow d \, e + (1 - d) \, t

  If some e differs by more than `threshold` from the expectation for the
  machine's speed, `patience` times in a row, the layers are cut again for the
  measured speeds, and a plan that is better by `gain` is proposed.  That plan
  is on trial: it stays if, after `patience` measurements, the throughput is
  higher than when the drift was first seen.  Otherwise the previous plan is
  restored, and patience grows by the factor `backoff`.

  This class only decides: it starts no process and moves no array.
  """

  def __init__(
    self,
    plan: pipeline.Plan,
    costs: Sequence[pipeline.LayerCost],
    machines: cluster.Cluster,
    *,
    footprint: pipeline.Footprint | None = None,
    num_microbatches: int = 1,
    threshold: float = 0.2,
    decay: float = 0.5,
    patience: int = 3,
    backoff: float = 2.0,
    gain: float = 0.05,
    reorder: bool = True,
  ):
    """Starts with the current plan.

    Args:
      plan: The current plan, with a machine for each stage.
      costs: The cost of each layer, for a micro-batch.
      machines: The machines with the speeds that the plan assumes.
      footprint: The memory that a stage needs.
      num_microbatches: The number of micro-batches in an iteration, over which
        an optimizer's step is spread.
      threshold: The least relative drift of a stage's seconds.
      decay: The weight d of the past in the moving average.
      patience: The number of measurements that must agree.
      backoff: The growth of patience after a plan that was no faster.
      gain: The least relative gain of the bottleneck for which layers move.
      reorder: Whether machines may also change their order.

    Raises:
      ValueError: If an argument is out of its range.
    """
    if backoff < 1.0:
      raise ValueError(f"`backoff` must be at least 1, got {backoff}.")
    for name, value in (("decay", decay), ("gain", gain)):
      if not 0 <= value < 1:
        raise ValueError(f"`{name}` must be in [0, 1), got {value}.")
    if len(plan.nodes) != plan.num_stages:
      raise ValueError(
        "`plan` must have a machine of its own for each of its "
        f"{plan.num_stages} stages, got {len(plan.nodes)} machines."
      )
    self.plan = plan
    self.patience = patience
    self._first_patience = patience
    self._costs = costs
    self._options: dict[str, Any] = {
      "footprint": footprint, "num_microbatches": num_microbatches
    }  # fmt: skip
    self._threshold, self._decay = threshold, decay
    self._backoff, self._gain, self._reorder = backoff, gain, reorder
    # Machines without a stage cannot be measured and take no part.
    nodes = tuple(machines.node(x) for x in plan.nodes)
    self.machines = dataclasses.replace(machines, nodes=nodes)
    # The plan before the one on trial, and its samples per second.
    self._before: tuple[pipeline.Plan, float] | None = None
    self._restart()

  def _restart(self) -> None:
    self._stage_s: list[float] = []
    self._rate = 0.0
    self._count = 0

  def drift(self) -> float:
    """Returns the largest relative drift of a stage's seconds."""
    found = [0.0]
    # Before the first measurement there are no seconds.
    for seconds, name, stage in zip(
      self._stage_s, self.plan.nodes, self.plan.stages, strict=False
    ):
      if stage.compute_s:
        speed = self.machines.node(name).speed
        found.append(abs(seconds * speed / stage.compute_s - 1))
    return max(found)

  def observe(
    self, stage_s: Sequence[float], samples_per_s: float
  ) -> Proposal | None:
    """Takes a measurement and returns a proposal if the plan should change.

    Args:
      stage_s: The seconds of both passes of a micro-batch in each stage,
        without waiting.
      samples_per_s: The throughput of the whole pipeline since the last
        measurement.

    Raises:
      ValueError: If there is not a positive time for each stage.
    """
    if len(stage_s) != self.plan.num_stages or not all(x > 0 for x in stage_s):
      raise ValueError(
        "`stage_s` must have positive seconds for each of the "
        f"{self.plan.num_stages} stages, got {list(stage_s)}."
      )
    # The first measurement has no past to average with.
    decay = self._decay if self._stage_s else 0.0
    old = self._stage_s or stage_s
    self._stage_s = [
      decay * a + (1 - decay) * b for a, b in zip(old, stage_s, strict=True)
    ]
    self._rate = decay * self._rate + (1 - decay) * samples_per_s
    if self._before is not None:
      return self._judge(*self._before)
    self._count = self._count + 1 if self.drift() > self._threshold else 0
    if self._count == 1:
      # A new plan is compared with the throughput after the change of the
      # machines: before it no plan for the changed machines can be judged.
      self._rate = samples_per_s
    return None if self._count < self.patience else self._replan()

  def _judge(self, before: pipeline.Plan, rate: float) -> Proposal | None:
    """Keeps a plan on trial, or restores the previous one."""
    self._count += 1
    if self._count < self.patience:
      return None
    self._before = None
    if self._rate > rate:
      self.patience = self._first_patience
      self._count = 0
      return None
    self.patience = round(self.patience * self._backoff)
    return self._take(before, returns=True)

  def _replan(self) -> Proposal | None:
    """Plans for the measured speeds, and proposes a plan if it is better."""
    speeds = {
      name: stage.compute_s / seconds if stage.compute_s else 1.0
      for name, stage, seconds in zip(
        self.plan.nodes, self.plan.stages, self._stage_s, strict=True
      )
    }
    nodes = [
      dataclasses.replace(x, speed=speeds[x.name]) for x in self.machines.nodes
    ]
    self.machines = dataclasses.replace(self.machines, nodes=tuple(nodes))
    self._count = 0
    # The current plan is judged by the measured speeds, too.
    chain = _bottleneck.Chain(self._costs, self.machines, **self._options)
    now = chain.plan(self.plan.nodes, self.plan.cuts)
    found = pipeline.partition(
      self._costs, self.machines, nodes=self.plan.nodes, **self._options
    )
    less = 1 - self._gain
    if self._reorder:
      other = pipeline.place(self._costs, self.machines, **self._options)
      # Another order moves whole stages, so it must be clearly better.
      if other.bottleneck_s < found.bottleneck_s * less:
        found = other
    if found.bottleneck_s >= now.bottleneck_s * less:
      return None
    self._before = self.plan, self._rate
    return self._take(found)

  def _take(self, plan: pipeline.Plan, returns: bool = False) -> Proposal:
    moves = []
    for layer in range(len(self._costs)):
      source, target = (x.nodes[x.stage_of(layer)] for x in (self.plan, plan))
      if source != target:
        moves.append(LayerMove(layer, source, target))
    self.plan = plan
    self._restart()
    return Proposal(plan, tuple(moves), returns)


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
    make_process: Callable[[pipeline.Plan], Any],
    replanner: Replanner,
    optimizer: optax.GradientTransformation,
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
  def plan(self) -> pipeline.Plan:
    """The current plan."""
    return self._replanner.plan

  def init_state(self, *args: Any, **options: Any) -> pipeline.ProcessState:
    """Makes the initial state, as `StageProcess.init_state` does."""
    return self.process.init_state(self._optimizer, *args, **options)

  def run(
    self, state: pipeline.ProcessState, batches: Sequence[PyTree]
  ) -> tuple[pipeline.ProcessState, list[dict[str, float]]]:
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
      state = layer_moves.move_layers(
        state, before, self.process, self._optimizer
      )
    return state, metrics

  def _process_of(self, plan: pipeline.Plan) -> Any:
    key = plan.cuts, plan.nodes
    if key not in self._processes:
      self._processes[key] = self._make(plan)
    return self._processes[key]


def stage_seconds(table: pipeline.Table, trace: cluster.Trace) -> list[float]:
  """Returns the median seconds of both passes of a micro-batch in each stage.

  Time spent waiting for messages is not included.
  """
  parts: dict[tuple[int, pipeline.Op], list[float]] = {}
  actions: dict[str, pipeline.Action] = {str(x): x for x in table}
  for span in trace:
    action = actions[span.name]
    if action.op != pipeline.Op.UPDATE:
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
