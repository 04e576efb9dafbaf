"""A table in lock-step: which device does what in each tick."""

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np

from jdist import checks
from jdist.pipeline.schedule._table import Action, Op, start_times, Table

# Columns of a row: what a device computes in a tick, and what it receives.
# Each lane has an op or a flag, the chunk (which of the device's stages), the
# micro-batch, and the number of iterations since that of the newest one.
_LANES = ("forward", "backward", "activation", "gradient")
NUM_COLUMNS = 4 * len(_LANES)
FORWARD, BACKWARD, ACTIVATION, GRADIENT = range(0, NUM_COLUMNS, 4)


@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
  """A table in ticks, in which all devices act together.

  Attributes:
    rows: The work of each device in each tick, int32 [ticks, devices,
      NUM_COLUMNS].
    num_stages: The number of stages.
    num_microbatches: The number of micro-batches in an iteration.
    delay: W - 1: iteration k reads the parameters after k - W + 1 updates.
    behind: The number of steps between the one in which an iteration starts and
      the one at whose end its gradient is complete.
    slots: The most micro-batches that a stage keeps, from the arrival of their
      input to the end of their backward pass.
    gradient_slots: The most gradients from the next stage that a stage keeps.
    stash_slots: The most micro-batches between the two parts of a stage's
      backward pass.
    backward_actions: The kinds of backward passes that occur, with their
      stages.
  """

  rows: np.ndarray
  num_stages: int
  num_microbatches: int
  delay: int
  behind: int
  slots: int
  gradient_slots: int
  stash_slots: int
  backward_actions: frozenset[tuple[Op, int]]

  @property
  def num_devices(self) -> int:
    """The number of devices."""
    return self.rows.shape[1]

  @property
  def backward_ops(self) -> tuple[Op, ...]:
    """The kinds of backward passes that occur, in the order of their values."""
    return tuple(sorted({op for op, _ in self.backward_actions}))


def make_grid(table: Table, *, send_ticks: int = 1) -> Grid:
  """Puts a table that can run into ticks.

  It is synchronous, of one iteration, with stage s on device s modulo their
  number; or it has delayed weights and a stage on each device.  A result can be
  used `send_ticks` after its action: 2 if sends overlap the next tick.
  """
  if table.num_iterations == 1 and table.window == 1:
    return _synchronous(table, send_ticks)
  if table.weights != "delayed" or len(table.devices) != table.num_stages:
    raise ValueError(
      "`table` must be synchronous, or have delayed weights and a stage on "
      f"each device in one program, got {table}, weights {table.weights!r}. "
      "Run it with each stage in a process of its own."
    )
  if table.splits_backward:
    # All stages update together at the end of a step of one program.
    raise ValueError(
      "`table` must not overlap iterations without a delay in one program, "
      f"whose stages update together, got {table}. Run it with each stage in a "
      "process of its own, or take zb_h1."
    )
  return _continuous(table, send_ticks)


def _synchronous(table: Table, send_ticks: int) -> Grid:
  devices = len(table.devices)
  # Chunk and device follow from a stage's number, and all devices permute to
  # their neighbours alike: one program cannot have another placement.
  if table.device_of != tuple(s % devices for s in range(table.num_stages)):
    raise ValueError(
      "`table` must have stage s on device s modulo their number in one "
      f"program, got {table.device_of}. Processes of their own run any table."
    )
  starts = start_times(
    table, lambda x: float(x.op != Op.UPDATE), lambda _: float(send_ticks - 1)
  )
  ticks = {x: int(t) for x, t in starts.items() if x.op != Op.UPDATE}
  return _grid(ticks, table, max(ticks.values()) + 1, send_ticks, behind=None)


def _continuous(table: Table, send_ticks: int) -> Grid:
  r"""Puts a window without a flush into ticks; no device is ever idle.

  Stage s of S runs micro-batch m, counted through all iterations, with sends of
  L ticks, in the ticks

  .. math:: F: 2 m + L s \qquad B: 2 m + L (S - 1) + 1 + L (S - 1 - s)

  A step has the 2 M ticks of one iteration; at its end the gradient of an
  iteration that began `behind` steps earlier is complete.  So F and B of a
  device never meet: their ticks differ by an odd number.
  """
  s, m, late = table.num_stages, table.num_microbatches, send_ticks
  period = 2 * m
  behind = (2 * (m - 1) + 2 * late * (s - 1) + 1) // period
  # The parameters that an iteration reads must exist when it begins.
  remedy = "Take more micro-batches, or a larger window, if the table has one."
  checks.check_int("window", table.window, behind + 1, remedy=remedy)
  ticks = {}
  for stage, i in itertools.product(range(s), range(m)):
    ticks[Action(Op.FORWARD, stage, i)] = 2 * i + late * stage
    back = 2 * i + late * (s - 1) + 1 + late * (s - 1 - stage)
    ticks[Action(Op.BACKWARD, stage, i)] = back
  return _grid(ticks, table, period, late, behind=behind)


def _grid(
  ticks: dict[Action, int],
  table: Table,
  period: int,
  send_ticks: int,
  *,
  behind: int | None,
) -> Grid:
  """Writes rows; unless `behind` is None, they repeat every `period` ticks."""
  devices = len(table.devices)
  rows = np.zeros((period, devices, NUM_COLUMNS), np.int32)

  def put(lane: int, tick: int, op: int, action: Action) -> None:
    offset, tick = divmod(tick, period)
    cell = rows[tick, action.stage % devices, lane : lane + 4]
    assert not cell[0], f"two actions in one cell: {action}"
    cell[:] = op, action.stage // devices, action.microbatch, offset

  for action, tick in ticks.items():
    lane = FORWARD if action.op == Op.FORWARD else BACKWARD
    put(lane, tick, int(action.op), action)
    # The receiver stores a message at the end of the tick before its first use.
    stage, received = action.stage, tick + send_ticks - 1
    if action.op == Op.FORWARD and stage + 1 < table.num_stages:
      put(ACTIVATION, received, 1, action._replace(stage=stage + 1))
    elif action.op in (Op.BACKWARD, Op.BACKWARD_INPUT) and stage:
      put(GRADIENT, received, 1, action._replace(stage=stage - 1))
  slots = _slots(ticks, table, send_ticks, None if behind is None else period)
  counts = table.num_stages, table.num_microbatches, table.window - 1
  kinds = frozenset((x.op, x.stage) for x in ticks if x.op != Op.FORWARD)
  return Grid(rows, *counts, behind or 0, *slots, kinds)


def _slots(
  ticks: dict[Action, int], table: Table, send_ticks: int, period: int | None
) -> tuple[int, int, int]:
  """Returns how many slots hold all waiting inputs, gradients, and stashes.

  A micro-batch lies in the slot of its number modulo their count, from the tick
  in which its input is received to that of the last action that needs it.
  """
  inputs: dict[tuple[int, int], int] = {}
  gradients: dict[tuple[int, int], int] = {}
  stashes: dict[tuple[int, int], int] = {}
  ends: dict[tuple[int, int], int] = {}
  for action, tick in ticks.items():
    op, stage, i, _ = action
    if op == Op.FORWARD:
      # The first stage reads its input from the batch when it runs.
      inputs.setdefault((stage, i), tick)
      inputs[stage + 1, i] = tick + send_ticks - 1
      continue
    ends[stage, i] = max(ends.get((stage, i), 0), tick)
    if op != Op.BACKWARD_WEIGHT:
      stashes[stage, i] = tick
      gradients.setdefault((stage, i), tick)
      gradients[stage - 1, i] = tick + send_ticks - 1

  def most(starts: dict[tuple[int, int], int]) -> int:
    count = range(table.num_microbatches)
    return max(
      _span([starts[s, i] for i in count], [ends[s, i] for i in count], period)
      for s in range(table.num_stages)
    )

  return most(inputs), most(gradients), most(stashes)


def _span(starts: list[int], ends: list[int], period: int | None) -> int:
  """Returns the largest range of numbers whose intervals overlap.

  A ring needs as many slots as there are numbers from the least to the largest
  one that is alive, also if some between them are not.
  """
  if period is not None:  # Later iterations follow every `period` ticks.
    turns = range(2 + max(ends) // period)
    starts, ends = (
      [x + turn * period for turn in turns for x in times]
      for times in (starts, ends)
    )
  most = 1
  pairs = list(zip(starts, ends, strict=True))
  for start in starts:
    alive = [i for i, (a, b) in enumerate(pairs) if a <= start <= b]
    most = max(most, alive[-1] - alive[0] + 1)
  return most


@dataclasses.dataclass(frozen=True)
class TickTimes:
  """A step of a pipeline in one program.

  Attributes:
    ticks: The number of ticks.
    step_s: The seconds of all ticks.
    free_s: The seconds of all ticks if links take no time.
    compute_s: The seconds for which the busiest device computes.
    send_s: The seconds for which a link sends, in all ticks.
  """

  ticks: int
  step_s: float
  free_s: float
  compute_s: float
  send_s: float

  @property
  def exposed_s(self) -> float:
    """Seconds by which sends lengthen the step."""
    return self.step_s - self.free_s

  @property
  def hidden_share(self) -> float:
    """The part of sending that does not lengthen the step; 1 for no sends."""
    return 1.0 - self.exposed_s / self.send_s if self.send_s else 1.0


def tick_times(
  grid: Grid,
  seconds: Callable[[Op, int], float],
  send_s: float,
  *,
  late: bool,
  between_s: float = 0.0,
  all_wait: bool = False,
) -> TickTimes:
  """Adds up a step's ticks on devices that wait for each other.

  A device exchanges messages with both neighbours in every tick, whether they
  need them or not, both ways at once, and all three must have reached the tick.
  See `OneProgram.times` for the arguments.
  """
  checks.check_number("send_s", send_s)
  devices, passes = grid.num_devices, np.zeros(grid.rows.shape[:2])
  for column in (FORWARD, BACKWARD):
    for tick, device in np.argwhere(grid.rows[..., column]).tolist():
      op, chunk = grid.rows[tick, device, column : column + 2].tolist()
      passes[tick, device] += seconds(Op(op), chunk * devices + device)
  ring = grid.num_stages > devices
  apart = abs(np.subtract.outer(np.arange(devices), np.arange(devices)))
  waits = (apart <= 1) | (ring & (apart == devices - 1)) | all_wait

  def run(send_s: float) -> float:
    now = np.zeros(devices)
    for computes_s in passes:
      # Late sends have the results of the previous tick and overlap this one.
      # XLA schedules others for GPUs so that nothing hides the output's, which
      # ends last.
      begun = now if late else now + computes_s
      done = np.where(waits, begun, 0.0).max(1) + send_s
      now = np.maximum(now + computes_s, done) + between_s
    return float(np.max(now))

  send_s = 0.0 if devices == 1 else send_s
  return TickTimes(
    ticks=len(passes),
    step_s=run(send_s),
    # The run without sends shows what they add.
    free_s=run(0.0),
    compute_s=float(np.max((passes + between_s).sum(0))),
    send_s=len(passes) * send_s,
  )
