"""Simulations of a table on a cluster's virtual clock."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jdist import checks, cluster, signatures
from jdist.pipeline.planning import _costs
from jdist.pipeline.schedule import _checker
from jdist.pipeline.schedule._table import Action, Op, Table


@dataclasses.dataclass(frozen=True)
class PipelineTimes:
  """The times of a table on a cluster.

  Attributes:
    makespan_s: The time at which the last action ends.
    iteration_s: The time from one iteration's end to the next one's, while the
      pipeline is full.
    busy_s: The seconds of each device's actions.
    memory_bytes: The most memory of each device: all versions of the
      parameters, the optimizer's state, gradients, live micro-batches, and the
      needs of a pass.
    link_use: The part of the time for which each direction of a link was busy.
    edge_bytes: The bytes of an iteration's outputs that each stage sends to
      another device, and receives again as gradients.
    ends_s: The end of each iteration.
    starts_s: The start of each action.
    trace: The whole run, to draw.
  """

  makespan_s: float
  iteration_s: float
  busy_s: tuple[float, ...]
  memory_bytes: tuple[float, ...]
  link_use: Mapping[str, float]
  edge_bytes: tuple[float, ...]
  ends_s: tuple[float, ...]
  starts_s: Mapping[Action, float] = dataclasses.field(repr=False)
  trace: cluster.Trace = dataclasses.field(repr=False)

  @property
  def utilisation(self) -> tuple[float, ...]:
    """The part of an iteration for which each device works, once full."""
    whole = len(self.ends_s) * self.iteration_s
    return tuple(x / whole if whole else 0.0 for x in self.busy_s)

  @property
  def bubble(self) -> float:
    """The part of the makespan for which devices wait."""
    whole = len(self.busy_s) * self.makespan_s
    return 1.0 - sum(self.busy_s) / whole if whole else 0.0


@signatures.checked
def simulate(
  table: Table,
  costs: Sequence[_costs.LayerCost],
  machines: cluster.Cluster,
  *,
  nodes: Sequence[str] | None = None,
  optimizer_copies: signatures.NonNegativeFloat = 1.0,
) -> PipelineTimes:
  """Runs a table on a cluster's virtual clock.

  A device takes its actions in the table's order, each as soon as its inputs
  are available; sends are buffered and overlap the computation.  So it speaks
  for `StageProcess`.  In `OneProgram` devices wait for each other in ticks and
  run forward passes again: `OneProgram.times` forecasts that.

  Args:
    table: The table to run.
    costs: The cost of each stage.
    machines: The cluster's speeds, slow-downs and links.
    nodes: The machine of each of the table's devices; by default the first
      machines.
    optimizer_copies: The optimizer's state in sizes of the parameters: 1 for
      momentum, 2 for Adam.

  Raises:
    ValueError: If the table cannot run, numbers do not fit, or two machines
      have no connection.

  >>> from jdist import pipeline
  >>> table = pipeline.make_table("1f1b", 2, 4)
  >>> costs = [pipeline.LayerCost("a", 1.0, 2.0)] * 2
  >>> times = simulate(table, costs, cluster.workers([1.0, 1.0]))
  >>> times.makespan_s, round(times.bubble, 3)
  (15.0, 0.2)
  """
  if len(costs) != table.num_stages:
    raise ValueError(
      f"`costs` must be one for each of the table's {table.num_stages} stages, "
      f"got {len(costs)}."
    )
  wanted = len(table.devices)
  names = machines.names[:wanted] if nodes is None else tuple(nodes)
  _costs.check_there([machines.node(name) for name in names])
  if len(names) != wanted or len(set(names)) != wanted:
    raise ValueError(
      "`nodes` must name a machine of its own for each of the table's "
      f"{wanted} devices, got {', '.join(names)}."
    )
  # This also proves that the simulation ends.
  _checker.check_table(table)
  return run_table(table, costs, machines, names, optimizer_copies)


def run_table(
  table: Table,
  costs: Sequence[_costs.LayerCost],
  machines: cluster.Cluster,
  names: tuple[str, ...],
  optimizer_copies: float,
) -> PipelineTimes:
  """Simulates a table that can run, on the machine of each device."""
  run = _Run(table, costs, machines, names)
  ends = [0.0] * table.num_iterations
  busy = [0.0] * len(table.devices)
  for action, start in run.starts.items():
    end = run.ends[action]
    if action.op == Op.UPDATE:
      ends[action.iteration] = max(ends[action.iteration], end)
    busy[table.device_of[action.stage]] += end - start
  report = _checker.table_needs(table)
  makespan = max(run.ends.values())
  ways, uses = table.device_of, run.trace.utilisation().items()
  return PipelineTimes(
    makespan_s=makespan,
    iteration_s=_steady_s(ends, table.window),
    busy_s=tuple(busy),
    memory_bytes=device_bytes(table, costs, report, optimizer_copies),
    link_use={name: use for name, use in uses if name not in names},
    edge_bytes=tuple(
      table.num_microbatches * cost.sent_bytes
      for cost, one, other in zip(costs, ways, ways[1:], strict=False)
      if one != other
    ),
    ends_s=tuple(ends),
    starts_s=run.starts,
    trace=run.trace,
  )


def action_s(cost: _costs.LayerCost, op: Op) -> float:
  """Returns the seconds of a stage's action at speed 1."""
  seconds = {
    Op.FORWARD: cost.forward_s,
    Op.BACKWARD: cost.backward_s,
    Op.BACKWARD_INPUT: cost.input_s,
    Op.BACKWARD_WEIGHT: cost.weight_s,
    Op.UPDATE: cost.update_s,
  }[op]
  assert seconds is not None
  return seconds


class _Run:
  """A run of a table on SimPy's clock."""

  def __init__(
    self,
    table: Table,
    costs: Sequence[_costs.LayerCost],
    machines: cluster.Cluster,
    names: tuple[str, ...],
  ):
    simpy = checks.import_extra("simpy", "sim")
    self.environment = simpy.Environment()
    self.trace = cluster.Trace()
    self.starts: dict[Action, float] = {}
    self.ends: dict[Action, float] = {}
    self._table, self._costs, self._names = table, costs, names
    self._nodes = [machines.node(name) for name in names]
    # Two devices have one connection, which sends in order.
    self._network = cluster.Network(
      self.environment, machines.topology, self.trace, "first_come"
    )
    self._places = [0] * len(names)
    self._busy = [False] * len(names)
    # Actions that still wait for another device.  The check has shown that
    # results of the device itself precede them.
    self._waits = {table.sends_to(x) for x in table}
    for device in range(len(names)):
      self._advance(device)
    self.environment.run()

  def _advance(self, device: int, received: Action | None = None) -> None:
    """Starts the device's next action if the device and inputs are ready."""
    self._waits.discard(received)
    order = self._table.devices[device]
    if self._busy[device] or self._places[device] == len(order):
      return
    action = order[self._places[device]]
    if action in self._waits:
      return
    # A node's slow-downs may begin or end within the action.
    self._busy[device] = True
    self._places[device] += 1
    self.starts[action] = now = self.environment.now
    work = action_s(self._costs[action.stage], action.op)
    after = self._nodes[device].end_s(now, work) - now
    event = self.environment.timeout(after, action)
    event.callbacks.append(self._end)

  def _end(self, event: Any) -> None:
    action, now = event.value, self.environment.now
    self.ends[action] = now
    device, text = self._table.device_of[action.stage], str(action)
    start, name = self.starts[action], self._names[device]
    if now > start:
      self.trace.add(name, text, start, now, action.op.kind)
    # The send starts at once and does not occupy the device.
    self._busy[device] = False
    target = self._table.sends_to(action)
    if target is not None:
      other = self._table.device_of[target.stage]
      forward = action.op == Op.FORWARD
      # A gradient is as large as the output whose gradient it is.
      cost = self._costs[action.stage if forward else target.stage]
      sent: Any = self._network.send(
        name, self._names[other], cost.sent_bytes, name=text,
        kind="activation" if forward else "gradient",
      )  # fmt: skip
      sent.callbacks.append(lambda _: self._advance(other, target))
    self._advance(device)


def _steady_s(ends: Sequence[float], window: int) -> float:
  """Returns the seconds of an iteration while the pipeline is full."""
  # The first half fills the pipeline, and the last `window` iterations run
  # while it empties; neither shows the steady state.
  last = max(len(ends) - window, 0)
  first = last // 2
  if first == last:
    return ends[-1] / len(ends)
  return (ends[last] - ends[first]) / (last - first)


def device_bytes(
  table: Table,
  costs: Sequence[_costs.LayerCost],
  report: _checker.TableReport,
  optimizer_copies: float,
) -> tuple[float, ...]:
  """Returns the most bytes that each device holds at once."""
  saved = [cost.saved_bytes for cost in costs]
  most = _checker.most_saved(table, saved, table.device_of)
  found = []
  for device in range(len(table.devices)):
    # Parameters and temporaries are constant; saved micro-batches are not.
    own = [s for s, at in enumerate(table.device_of) if at == device]
    still = max((costs[s].working_bytes for s in own), default=0.0)
    for s in own:
      copies = report.versions[s] + optimizer_copies + 1
      still += costs[s].parameter_bytes * copies
    found.append(still + most[device])
  return tuple(found)
