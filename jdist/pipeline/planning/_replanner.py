"""The decision when a pipeline that runs is cut anew."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jdist import checks, cluster
from jdist.pipeline.planning import _bottleneck, _costs, _placement
from jdist.pipeline.planning._plan import Footprint, Plan


@dataclasses.dataclass(frozen=True)
class LayerMove:
  """A layer that goes to another machine, with its optimizer state.

  Attributes:
    layer: its number.
    source: the machine that has it.
    target: the machine that gets it.
  """

  layer: int
  source: str
  target: str


@dataclasses.dataclass(frozen=True)
class Proposal:
  """A plan to be taken at the next drained step.

  Attributes:
    plan: of all layers.
    moves: those that change their machine.
    returns: whether it is the plan before, since the last one was no faster.
  """

  plan: Plan
  moves: tuple[LayerMove, ...]
  returns: bool = False


class Replanner:
  r"""Follows measured seconds and proposes plans when machines have changed.

  Of each stage it keeps

  .. math:: e \leftarrow d \, e + (1 - d) \, t

  and where some e is further than `threshold` from what the machine's speed
  lets expect, `patience` times in a row, it takes the measured speeds and cuts
  the layers anew.  A plan that is better by `gain` is proposed.  Then it is on
  trial: after `patience` measurements it stays if samples a second rose over
  those since the drift was first seen, else the plan before comes back, and
  patience grows by `backoff`.

  It starts no process and moves no array.
  """

  def __init__(
    self,
    plan: Plan,
    costs: Sequence[_costs.LayerCost],
    machines: cluster.Cluster,
    *,
    footprint: Footprint | None = None,
    num_microbatches: int = 1,
    threshold: float = 0.2,
    decay: float = 0.5,
    patience: int = 3,
    backoff: float = 2.0,
    gain: float = 0.05,
    reorder: bool = True,
  ):
    """Starts with the plan that runs.

    Args:
      plan: that runs; a machine for each stage.
      costs: of each layer, for a micro-batch.
      machines: speeds as they were planned with, memory and links.
      footprint: what a stage takes of memory.
      num_microbatches: over which an optimizer's step is spread.
      threshold: of the drift of a stage's seconds, relative.
      decay: d, of the moving average.
      patience: measurements that must agree.
      backoff: by which patience grows after a plan that was no faster.
      gain: of the bottleneck, relative, for which layers are moved.
      reorder: whether machines may change their order, too.

    Raises:
      ValueError: when an argument is out of its range.
    """
    checks.check_int("patience", patience, 1)
    for name, value, low, high in (
      ("threshold", threshold, 0.0, float("inf")),
      ("decay", decay, 0.0, 1.0),
      ("backoff", backoff, 1.0, float("inf")),
      ("gain", gain, 0.0, 1.0),
    ):
      checks.check_number(name, value)
      if not low <= value < high:
        raise ValueError(f"`{name}` must be in [{low}, {high}), got {value}.")
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
    nodes = tuple(machines.node(x) for x in plan.nodes)
    self.machines = dataclasses.replace(machines, nodes=nodes)
    # The plan before one on trial, and its samples a second.
    self._before: tuple[Plan, float] | None = None
    self._restart()

  def _restart(self) -> None:
    self._stage_s: list[float] = []
    self._rate = 0.0
    self._count = 0

  @property
  def on_trial(self) -> bool:
    """Returns whether the plan is on trial."""
    return self._before is not None

  def drift(self) -> float:
    """Returns the largest relative drift of a stage's seconds."""
    return max(
      (
        abs(seconds * self.machines.node(name).speed / stage.compute_s - 1)
        for seconds, name, stage in zip(
          self._stage_s, self.plan.nodes, self.plan.stages, strict=False
        )
        if stage.compute_s
      ),
      default=0.0,
    )

  def observe(
    self, stage_s: Sequence[float], samples_per_s: float
  ) -> Proposal | None:
    """Takes a measurement, and returns what is to be done, if anything.

    Args:
      stage_s: of each stage of the plan, of both passes of a micro-batch, no
        waiting counted.
      samples_per_s: of the whole pipeline since the last measurement.

    Raises:
      ValueError: when there is no time for each stage.
    """
    if len(stage_s) != self.plan.num_stages or not all(x > 0 for x in stage_s):
      raise ValueError(
        "`stage_s` must have positive seconds for each of the "
        f"{self.plan.num_stages} stages, got {list(stage_s)}."
      )
    # What came before the first measurement is not known.
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
      # A new plan is compared with what came after the machines had changed.
      self._rate = samples_per_s
    return None if self._count < self.patience else self._replan()

  def _judge(self, before: Plan, rate: float) -> Proposal | None:
    """Keeps a plan on trial, or goes back."""
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
    """Takes the measured speeds, and proposes a plan if it is better."""
    speeds = {
      name: stage.compute_s / seconds if stage.compute_s else 1.0
      for name, stage, seconds in zip(
        self.plan.nodes, self.plan.stages, self._stage_s, strict=True
      )
    }
    self.machines = dataclasses.replace(
      self.machines,
      nodes=tuple(
        dataclasses.replace(x, speed=speeds[x.name])
        for x in self.machines.nodes
      ),
    )
    self._count = 0
    chain = _bottleneck.Chain(self._costs, self.machines, **self._options)
    now = chain.plan(self.plan.nodes, self.plan.cuts)
    found = _bottleneck.partition(
      self._costs, self.machines, nodes=self.plan.nodes, **self._options
    )
    less = 1 - self._gain
    if self._reorder:
      other = _placement.place(self._costs, self.machines, **self._options)
      if other.bottleneck_s < found.bottleneck_s * less:
        found = other
    if found.bottleneck_s >= now.bottleneck_s * less:
      return None
    self._before = self.plan, self._rate
    return self._take(found)

  def _take(self, plan: Plan, returns: bool = False) -> Proposal:
    moves = []
    for layer in range(len(self._costs)):
      source, target = (x.nodes[x.stage_of(layer)] for x in (self.plan, plan))
      if source != target:
        moves.append(LayerMove(layer, source, target))
    self.plan = plan
    self._restart()
    return Proposal(plan, tuple(moves), returns)
