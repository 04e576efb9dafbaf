"""Tables in lock-step: which device does what in each tick."""

import dataclasses

import numpy as np

from jdist.pipeline.schedule import (
  Action,
  check_table,
  Op,
  start_times,
  Table,
)

# Columns of a row: what a device does in a tick, and what comes to it.  Each
# has a flag or an op, the chunk (which of the device's stages), the
# micro-batch, and by how many iterations it lies behind the newest.
_LANES = ("forward", "backward", "activation", "gradient")
NUM_COLUMNS = 4 * len(_LANES)
FORWARD, BACKWARD, ACTIVATION, GRADIENT = range(0, NUM_COLUMNS, 4)


@dataclasses.dataclass(frozen=True, eq=False)
class Grid:
  """A table in ticks, in which all devices act together.

  Attributes:
    rows: int32 [ticks, devices, NUM_COLUMNS].
    num_stages: of the model.
    num_microbatches: of an iteration.
    delay: W - 1: iteration k reads the parameters after k - W + 1 updates.
    behind: iterations from an iteration's first tick to the step at whose end
      its gradient is whole.
    slots: the most micro-batches that a stage keeps, from the arrival of its
      input to the end of its backward pass.
    gradient_slots: likewise, of gradients that came from the next stage.
  """

  rows: np.ndarray
  num_stages: int
  num_microbatches: int
  delay: int
  behind: int
  slots: int
  gradient_slots: int

  @property
  def num_devices(self) -> int:
    """The number of devices."""
    return self.rows.shape[1]

  @property
  def backward_actions(self) -> frozenset[tuple[int, int]]:
    """The kinds of backward passes that there are, with their stages."""
    found = set()
    for device in range(self.num_devices):
      cells = self.rows[:, device, BACKWARD : BACKWARD + 2]
      for op, chunk in np.unique(cells[cells[:, 0] > 0], axis=0):
        found.add((int(op), int(chunk) * self.num_devices + device))
    return frozenset(found)

  @property
  def backward_ops(self) -> tuple[Op, ...]:
    """The kinds of backward passes that there are."""
    return tuple(sorted({Op(op) for op, _ in self.backward_actions}))

  @property
  def utilisation(self) -> float:
    """The part of the devices' ticks in which they work."""
    busy = (self.rows[..., FORWARD] > 0) | (self.rows[..., BACKWARD] > 0)
    return float(busy.mean())


def make_grid(table: Table, *, send_ticks: int = 1) -> Grid:
  """Puts a table into ticks: its own, or those of a window without a flush.

  Args:
    table: with a flush, or with delayed weights and a stage on each device.
    send_ticks: as of `synchronous_grid`.

  Raises:
    ValueError: when the table does not fit into ticks.
  """
  if table.num_iterations == 1 and table.window == 1:
    return synchronous_grid(table, send_ticks=send_ticks)
  if table.weights != "delayed" or len(table.devices) != table.num_stages:
    raise ValueError(
      "`table` must be synchronous, or have delayed weights and a stage on "
      f"each device in one program, got {table}, weights {table.weights!r}. "
      "Run it with each stage in a process of its own."
    )
  return continuous_grid(
    table.num_stages,
    table.num_microbatches,
    window=table.window,
    send_ticks=send_ticks,
  )


def synchronous_grid(table: Table, *, send_ticks: int = 1) -> Grid:
  """Puts a synchronous table of one iteration into ticks.

  Args:
    table: with a window of 1; a stage s lies on device s modulo their number.
    send_ticks: ticks from an action to the first in which its output is there:
      1, or 2 where sends run beside the next tick's actions.

  Raises:
    ValueError: when the table is another.
  """
  check_table(table)
  devices = len(table.devices)
  if table.num_iterations != 1 or table.window != 1:
    raise ValueError(
      f"`table` must be one synchronous iteration, got {table}, window "
      f"{table.window}. An asynchronous one is run by `continuous_grid`."
    )
  if table.device_of != tuple(s % devices for s in range(table.num_stages)):
    raise ValueError(
      "`table` must have stage s on device s modulo their number in one "
      f"program, got {table.device_of}. Processes of their own run any table."
    )
  starts = start_times(
    table,
    lambda x: float(x.op != Op.UPDATE),
    lambda _: float(send_ticks - 1),
  )
  ticks = {x: int(t) for x, t in starts.items() if x.op != Op.UPDATE}
  return _grid(
    ticks, table, max(ticks.values()) + 1, send_ticks, delay=0, repeats=False
  )


def continuous_grid(
  num_stages: int,
  num_microbatches: int,
  *,
  window: int | None = None,
  send_ticks: int = 1,
) -> Grid:
  r"""Puts iterations without a flush into ticks: every device always works.

  Of stage s of S, micro-batch m, counted through all iterations, and sends of
  L ticks,

  .. math:: F: 2 m + L s \qquad B: 2 m + L (S - 1) + 1 + L (S - 1 - s)

  A step is the 2 M ticks of an iteration; at its end the gradient of an
  iteration that began `behind` steps before is whole.

  Args:
    num_stages: S, a device each.
    num_microbatches: M, of an iteration.
    window: W > `behind`; the least one if None.
    send_ticks: L, as of `synchronous_grid`.

  Raises:
    ValueError: when the window is too small.
  """
  s, m, late = num_stages, num_microbatches, send_ticks
  period = 2 * m
  last = 2 * (m - 1) + 2 * late * (s - 1) + 1
  behind = last // period
  window = behind + 1 if window is None else window
  if window <= behind:
    raise ValueError(
      f"`window` must be at least {behind + 1} for {s} stages, {m} "
      f"micro-batches and sends of {late} ticks, got {window}. Take more "
      "micro-batches, or a larger window, where the table has one."
    )
  ticks = {}
  for stage in range(s):
    for i in range(m):
      ticks[Action(Op.FORWARD, stage, i)] = 2 * i + late * stage
      back = 2 * i + late * (s - 1) + 1 + late * (s - 1 - stage)
      ticks[Action(Op.BACKWARD, stage, i)] = back
  # One iteration's actions, which later ones repeat every `period` ticks.
  table = Table("continuous", ((),) * s, s, m, window=window)
  return _grid(
    ticks, table, period, late, delay=window - 1, behind=behind, repeats=True
  )


def _grid(
  ticks: dict[Action, int],
  table: Table,
  period: int,
  send_ticks: int,
  *,
  delay: int,
  repeats: bool,
  behind: int = 0,
) -> Grid:
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
    stage, came = action.stage, tick + send_ticks - 1
    if action.op == Op.FORWARD and stage + 1 < table.num_stages:
      put(ACTIVATION, came, 1, action._replace(stage=stage + 1))
    elif action.op in (Op.BACKWARD, Op.BACKWARD_INPUT) and stage:
      put(GRADIENT, came, 1, action._replace(stage=stage - 1))
  slots, gradient_slots = _slots(
    ticks, table, send_ticks, period if repeats else None
  )
  return Grid(
    rows,
    table.num_stages,
    table.num_microbatches,
    delay,
    behind,
    slots,
    gradient_slots,
  )


def _slots(
  ticks: dict[Action, int], table: Table, send_ticks: int, period: int | None
) -> tuple[int, int]:
  """Returns how many consecutive micro-batches wait at once, of both kinds.

  A micro-batch lies in the slot of its number modulo their count, from the
  tick in which it comes to that of the last action that needs it.
  """
  inputs: dict[tuple[int, int], int] = {}
  gradients: dict[tuple[int, int], int] = {}
  ends: dict[tuple[int, int], int] = {}
  for action, tick in ticks.items():
    op, stage, i, _ = action
    if op == Op.FORWARD:
      inputs.setdefault((stage, i), tick)
      inputs[stage + 1, i] = tick + send_ticks - 1
      continue
    ends[stage, i] = max(ends.get((stage, i), 0), tick)
    if op != Op.BACKWARD_WEIGHT:
      gradients.setdefault((stage, i), tick)
      gradients[stage - 1, i] = tick + send_ticks - 1
  numbers = range(table.num_microbatches)
  stages = range(table.num_stages)

  def most(starts: dict[tuple[int, int], int]) -> int:
    return max(
      _span(
        [starts[s, i] for i in numbers], [ends[s, i] for i in numbers], period
      )
      for s in stages
    )

  return most(inputs), most(gradients)


def _span(starts: list[int], ends: list[int], period: int | None) -> int:
  """Returns the most numbers, from the least to the largest, alive at once."""
  if period is not None:  # Later iterations follow every `period` ticks.
    turns = range(2 + max(ends) // period)
    starts, ends = (
      [x + turn * period for turn in turns for x in times]
      for times in (starts, ends)
    )
  most = 1
  for start in starts:
    alive = [
      i
      for i, (a, b) in enumerate(zip(starts, ends, strict=True))
      if a <= start <= b
    ]
    most = max(most, alive[-1] - alive[0] + 1)
  return most
