"""Tables by list scheduling: each device takes the best action that it can."""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Sequence

from jdist import checks, signatures
from jdist.pipeline.schedule._table import Action, check_passes, Op, Table


@signatures.checked
@dataclasses.dataclass(frozen=True)
class StageTimes:
  """The times of a stage from which an order is chosen, >= 0, in any unit.

  Attributes:
    forward: The time of a micro-batch's forward pass.
    backward: The time of its whole backward pass, or of the input part if the
      table splits it.
    weight: The time of the weight part if the backward pass is split.
    send: The time until the next stage has the output, and until this one has
      the gradient in return.
  """

  forward: signatures.NonNegativeFloat = 1.0
  backward: signatures.NonNegativeFloat = 1.0
  weight: signatures.NonNegativeFloat = 1.0
  send: signatures.NonNegativeFloat = 0.0


def live_for_full_use(times: Sequence[StageTimes]) -> list[int]:
  r"""Returns how many micro-batches each stage keeps if no stage ever waits.

  .. math:: \left\lceil \frac{\sum_{j \ge s} (f_j + b_j) + 2 \sum_{j \ge s}^{S
    - 2} c_j}{\max_j (f_j + b_j)} \right\rceil

  This is the time from a stage's forward pass to its backward pass, divided by
  the time of the slowest stage; :math:`S - s` for equal stages and free links.
  The weight part of a split backward pass does not count, as a micro-batch that
  waits for its weight part occupies the same room.
  """
  period = max(x.forward + x.backward for x in times) or 1.0
  return [_count(trip, period) for trip in _trips(times)]


def live_to_fill(times: Sequence[StageTimes]) -> list[int]:
  r"""Returns how many forward passes start before the first backward pass.

  .. math:: \left\lceil \frac{\sum_{j \ge s} (f_j + b_j) - b_s + 2 \sum_{j \ge
    s}^{S - 2} c_j}{\max_j f_j} \right\rceil

  A stage that keeps so many micro-batches always has a forward pass to run
  while the first gradient is on its way; :math:`2 (S - s) - 1` for equal stages
  and free links, the warm-up of ZB-H2.
  """
  slowest = max(x.forward for x in times) or 1.0
  return [
    _count(trip - x.backward, slowest)
    for trip, x in zip(_trips(times), times, strict=True)
  ]


def _trips(times: Sequence[StageTimes]) -> list[float]:
  """Returns the time from each stage's forward pass through its backward."""
  sends = [2 * x.send for x in times[:-1]] + [0.0]
  rest = [x.forward + x.backward + y for x, y in zip(times, sends, strict=True)]
  return list(itertools.accumulate(rest[::-1]))[::-1]


def _count(trip: float, period: float) -> int:
  # Without the margin rounding could add a micro-batch to an exact quotient.
  return max(1, math.ceil(trip / period - 1e-9))


def list_schedule(
  name: str,
  times: Sequence[StageTimes],
  num_microbatches: int,
  *,
  num_iterations: int,
  window: int = 1,
  max_live: Sequence[int] | None,
  default: Callable[[Sequence[StageTimes]], list[int]],
  max_saved: int | None = None,
  split: bool = False,
  device_of: Sequence[int] | None = None,
) -> Table:
  """Makes a table: backward before forward, the oldest iteration first.

  A free device takes a backward pass if one is ready.  Otherwise it takes a
  forward pass if its stage keeps fewer than `max_live` micro-batches and the
  version of the parameters exists; else the weight part of a split backward
  pass, which nothing waits for but the update.  No stage keeps more than
  `max_saved` micro-batches between their forward pass and their weight part, by
  default the most of `max_live`; that is by default what `default` makes of the
  times.  Stage s is on device `device_of[s]`, by default on one of its own.
  """
  check_arguments(times, max_live, num_microbatches, num_iterations)
  live = default(times) if max_live is None else max_live
  most_saved = max(live) if max_saved is None else max_saved
  devices = [*range(len(times))] if device_of is None else [*device_of]
  held: list[list[int]] = [[] for _ in range(1 + max(devices))]
  # A device prefers the stages that are nearer to the loss.
  for s in reversed(range(len(times))):
    held[devices[s]].append(s)
  ops = Op.FORWARD, Op.BACKWARD, Op.BACKWARD_WEIGHT
  forward, backward, weight = counts = [[0] * len(times) for _ in ops]
  # Only a split backward pass has a part that may wait.
  weight = weight if split else backward
  # An iteration's update follows its last gradients, so it needs no event. It
  # lets the forward passes of one iteration more begin.
  allowed = [window * num_microbatches for _ in times]
  # These lists hold when each stage's inputs and gradients are available.
  # Micro-batches pass through a stage in order, so a count names them.
  inputs: list[list[float]] = [[] for _ in times]
  gradients: list[list[float]] = [[] for _ in times]
  inputs[0] = [0.0] * (num_microbatches * num_iterations)
  free = [0.0] * len(held)
  orders: list[list[Action]] = [[] for _ in held]
  wakes = [(0.0, device) for device in range(len(held))]

  def choose(device: int, now: float) -> tuple[Op, int] | None:
    # A backward pass frees memory and lets the stages in front continue.
    for s in held[device]:
      b = backward[s]
      if b < len(gradients[s]) and gradients[s][b] <= now:
        return Op.BACKWARD, s
    for s in held[device]:
      f = forward[s]
      if (
        f < len(inputs[s])
        and f < allowed[s]
        and f - backward[s] < live[s]
        and f - weight[s] < most_saved
        and inputs[s][f] <= now
      ):
        return Op.FORWARD, s
    for s in held[device]:
      if weight[s] < backward[s]:
        return Op.BACKWARD_WEIGHT, s
    return None

  # Events are handled in the order of time, and of devices at equal times, so
  # that the table depends on its arguments only.
  while wakes:
    now, device = heapq.heappop(wakes)
    if free[device] > now:
      continue
    chosen = choose(device, now)
    if chosen is None:
      continue
    op, s = chosen
    done = counts[ops.index(op)]
    iteration, microbatch = divmod(done[s], num_microbatches)
    done[s] += 1
    if op == Op.FORWARD:
      end = now + times[s].forward
      if s + 1 == len(times):
        gradients[s].append(end)
      else:
        inputs[s + 1].append(end + times[s].send)
        heapq.heappush(wakes, (end + times[s].send, devices[s + 1]))
    elif op == Op.BACKWARD_WEIGHT:
      end = now + times[s].weight
    else:
      end = now + times[s].backward
      if s:
        gradients[s - 1].append(end + times[s - 1].send)
        heapq.heappush(wakes, (end + times[s - 1].send, devices[s - 1]))
      op = Op.BACKWARD_INPUT if split else op
    orders[device].append(Action(op, s, microbatch, iteration))
    if done is weight and microbatch + 1 == num_microbatches:
      allowed[s] += num_microbatches
      orders[device].append(Action(Op.UPDATE, s, 0, iteration))
    free[device] = end
    heapq.heappush(wakes, (end, device))
  return Table(
    name,
    tuple(map(tuple, orders)),
    len(times),
    num_microbatches,
    num_iterations,
    window,
  )


@signatures.checked
def greedy(
  times: Sequence[StageTimes],
  num_microbatches: int,
  *,
  num_iterations: int = 1,
  max_live: Sequence[signatures.PositiveInt] | None = None,
  split: bool = False,
) -> Table:
  """Makes a synchronous table for stages and links of unequal times.

  Args:
    times: The times of each stage, in any unit.
    num_microbatches: The number of micro-batches in an iteration.
    num_iterations: The number of iterations in the table, one after the other.
    max_live: How many micro-batches each stage may keep.  The default is the
      number that keeps the slowest stage busy.
    split: Whether backward passes are split into two parts (zero bubble), whose
      times are `backward` and `weight`.
  """
  return list_schedule(
    "greedy", times, num_microbatches, num_iterations=num_iterations,
    max_live=max_live, default=live_for_full_use, split=split,
  )  # fmt: skip


def check_arguments(
  times: Sequence[StageTimes], max_live: Sequence[int] | None, *passes: int
) -> None:
  """Raises a ValueError for arguments from which no table can be made."""
  if not checks.check_list("times", times, "StageTimes"):
    raise ValueError("`times` must be one stage's at least, got none.")
  check_passes(len(times), *passes)
  if max_live is not None and len(max_live) != len(times):
    raise ValueError(
      f"`max_live` must have a number for each of the {len(times)} stages, got "
      f"{list(max_live)}."
    )
