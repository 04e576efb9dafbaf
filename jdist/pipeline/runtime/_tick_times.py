"""The forecast of a grid's ticks; devices wait for their neighbours."""

import dataclasses
from collections.abc import Callable

import numpy as np

from jdist.pipeline.runtime import _grid
from jdist.pipeline.schedule._table import Op


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
  grid: _grid.Grid,
  seconds: Callable[[Op, int], float],
  send_s: float,
  *,
  late: bool,
  between_s: float = 0.0,
) -> TickTimes:
  """Adds up a step's ticks on devices that wait for their neighbours only.

  A device exchanges messages with both neighbours in every tick, whether they
  need them or not, both ways at once, and all three must have reached the tick.
  See `OneProgram.times` for the arguments.
  """
  # This form of the comparison refuses NaN, too.
  if not send_s >= 0:
    raise ValueError(f"`send_s` must be at least 0, got {send_s}.")
  passes = np.zeros((2, *grid.rows.shape[:2]))
  for lane, column in enumerate((_grid.FORWARD, _grid.BACKWARD)):
    for tick, device in np.argwhere(grid.rows[..., column]).tolist():
      op, chunk = grid.rows[tick, device, column : column + 2].tolist()
      stage = chunk * grid.num_devices + device
      passes[lane, tick, device] = seconds(Op(op), stage)
  ring = grid.num_stages > grid.num_devices
  sends = [0.0 if grid.num_devices == 1 else x for x in (0.0, send_s)]
  # The run without sends shows what they add.
  free_s, step_s = (_run(passes, x, between_s, late, ring) for x in sends)
  return TickTimes(
    ticks=len(grid.rows),
    step_s=step_s,
    free_s=free_s,
    compute_s=float(np.max((passes.sum(0) + between_s).sum(0))),
    send_s=len(grid.rows) * sends[1],
  )


def _run(
  passes: np.ndarray, send_s: float, between_s: float, late: bool, ring: bool
) -> float:
  now = np.zeros(passes.shape[2])

  def sent(ready: np.ndarray) -> np.ndarray:
    """Returns when sends that begin when devices are ready are done."""
    if ring:
      before, after = np.roll(ready, 1), np.roll(ready, -1)
    else:
      before = np.append(ready[:1], ready[:-1])
      after = np.append(ready[1:], ready[-1:])
    return np.maximum(np.maximum(before, after), ready) + send_s

  for forward, backward in zip(*passes, strict=True):
    if late:
      # The results of the previous tick are sent while this one computes.
      done = sent(now)
      now = np.maximum(now + forward + backward, done)
    else:
      # XLA schedules such programs for GPUs like this: the forward pass hides
      # the gradient's send, and nothing hides the output's.
      gradient = sent(now + backward)
      now = now + backward + forward
      now = np.maximum(gradient, sent(now))
    now = now + between_s
  return float(np.max(now))
