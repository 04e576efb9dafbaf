"""A pipeline's schedule as a table: the order of actions on each device."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import get_args, Literal

from jdist import checks
from jdist.pipeline.schedule._actions import (
  Action,
  GIVES_GRADIENT,
  GIVES_WEIGHTS,
  Op,
)

Weights = Literal["delayed", "stashed", "newest"]
_WEIGHTS = get_args(Weights)


@dataclasses.dataclass(frozen=True)
class Table:
  r"""The order in which each device of a pipeline acts.

  Version v of a stage's parameters has had the updates of iterations 0 to
  v - 1.  The forward and backward passes of iteration k read the version that
  `weights` names:

  * `"delayed"`: version :math:`\max(0, k - W + 1)` with the `window` W, in
    both passes; a window of 1 is synchronous.
  * `"stashed"`: the newest in the forward pass, kept for the backward pass.
  * `"newest"`: the newest in each pass, so that they may differ.

  Attributes:
    name: of the schedule.
    devices: the actions of each device, in order.
    num_stages: of the model; a device may hold several.
    num_microbatches: of an iteration.
    num_iterations: in the table.
    window: iterations that may be under way at once, W.
    weights: as above.

  Raises:
    ValueError: when an argument is out of its range.  Whether the order can
      run is what `check` reports.
  """

  name: str
  devices: tuple[tuple[Action, ...], ...]
  num_stages: int
  num_microbatches: int
  num_iterations: int = 1
  window: int = 1
  weights: Weights = "delayed"

  def __post_init__(self) -> None:
    for field in (
      "num_stages",
      "num_microbatches",
      "num_iterations",
      "window",
    ):
      checks.check_int(field, getattr(self, field), 1)
    checks.check_choice("weights", self.weights, _WEIGHTS)
    if not self.devices:
      raise ValueError("`devices` must be one at least, got none.")

  def __iter__(self) -> Iterator[Action]:
    """Goes through the actions of all devices, one device after the other."""
    return (action for order in self.devices for action in order)

  def __str__(self) -> str:
    counts = {
      "device": len(self.devices),
      "stage": self.num_stages,
      "micro-batch": self.num_microbatches,
      "iteration": self.num_iterations,
    }
    return f"{self.name}: " + ", ".join(
      f"{n} {name}{(n != 1) * ('es' if name.endswith('h') else 's')}"
      for name, n in counts.items()
    )

  @functools.cached_property
  def device_of(self) -> tuple[int, ...]:
    """The device of each stage, the first that acts on it; -1 for none."""
    found = [-1] * self.num_stages
    for device, order in reversed(list(enumerate(self.devices))):
      for action in order:
        if 0 <= action.stage < self.num_stages:
          found[action.stage] = device
    return tuple(found)

  @functools.cached_property
  def splits_backward(self) -> frozenset[int]:
    """The stages whose backward pass is in two parts."""
    return frozenset(x.stage for x in self if x.op == Op.BACKWARD_INPUT)

  def needs(self, action: Action) -> list[Action]:
    """Returns the actions that must have ended before one begins.

    Those that only the order on its own device decides, as which version of
    the parameters is there, are not among them.
    """
    op, stage, microbatch, iteration = action
    if op == Op.FORWARD:
      return [action._replace(stage=stage - 1)] if stage else []
    if op in GIVES_GRADIENT:
      found = [Action(Op.FORWARD, stage, microbatch, iteration)]
      if stage + 1 < self.num_stages:
        found.append(self.gradient_of(stage + 1, microbatch, iteration))
      return found
    if op == Op.BACKWARD_WEIGHT:
      return [action._replace(op=Op.BACKWARD_INPUT)]
    if op == Op.UPDATE:
      split = stage in self.splits_backward
      last = Op.BACKWARD_WEIGHT if split else Op.BACKWARD
      return [
        Action(last, stage, i, iteration) for i in range(self.num_microbatches)
      ]
    return []

  def sends_to(self, action: Action) -> Action | None:
    """Returns the action of another device that waits for one, if any."""
    op, stage, microbatch, iteration = action
    found = None
    if op == Op.FORWARD and stage + 1 < self.num_stages:
      found = action._replace(stage=stage + 1)
    elif op in GIVES_GRADIENT and stage:
      found = self.gradient_of(stage - 1, microbatch, iteration)
    if found is None or self.device_of[found.stage] == self.device_of[stage]:
      return None
    return found

  def gradient_of(self, stage: int, microbatch: int, iteration: int) -> Action:
    """Returns the action that gives the gradient of a stage's input."""
    split = stage in self.splits_backward
    op = Op.BACKWARD_INPUT if split else Op.BACKWARD
    return Action(op, stage, microbatch, iteration)

  def expected(self) -> Iterator[Action]:
    """Goes through all actions that a whole table has, each once."""
    for iteration in range(self.num_iterations):
      for stage in range(self.num_stages):
        ops = [Op.FORWARD, Op.BACKWARD]
        if stage in self.splits_backward:
          ops = [Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT]
        for microbatch in range(self.num_microbatches):
          for op in ops:
            yield Action(op, stage, microbatch, iteration)
        yield Action(Op.UPDATE, stage, 0, iteration)


def with_updates(
  order: Iterable[Action], num_microbatches: int
) -> tuple[Action, ...]:
  """Adds to an order the update of a stage after its last gradients."""
  found: list[Action] = []
  done: collections.Counter[tuple[int, int]] = collections.Counter()
  for action in order:
    found.append(action)
    if action.op in GIVES_WEIGHTS:
      key = action.stage, action.iteration
      done[key] += 1
      if done[key] == num_microbatches:
        found.append(Action(Op.UPDATE, action.stage, 0, action.iteration))
  return tuple(found)


class StuckError(Exception):
  """Reports that an order cannot go on.

  Attributes:
    waiting: the next action of each device that has not come to its end.
    starts: when the actions before have begun.
  """

  def __init__(self, waiting: list[Action], starts: Mapping[Action, float]):
    super().__init__(", ".join(map(str, waiting)))
    self.waiting, self.starts = waiting, starts


def start_times(
  table: Table,
  seconds: Callable[[Action], float],
  send_s: Callable[[Action], float] = lambda _: 0.0,
) -> dict[Action, float]:
  """Computes when each action begins, with links that are never busy.

  Args:
    table: the order on each device.
    seconds: that an action takes.
    send_s: from the end of an action until another device has its output.

  Returns:
    The seconds of each action's start, in an order in which they can run.

  Raises:
    StuckError: when devices wait for each other.
  """
  starts: dict[Action, float] = {}
  ready: dict[Action, float] = {}  # When others have an action's output.
  free = [0.0] * len(table.devices)
  places = [0] * len(table.devices)
  waiting_for: dict[Action, list[int]] = collections.defaultdict(list)
  todo = collections.deque(range(len(table.devices)))
  while todo:
    device = todo.popleft()
    order = table.devices[device]
    while places[device] < len(order):
      action = order[places[device]]
      needs = table.needs(action)
      missing = next((x for x in needs if x not in starts), None)
      if missing is not None:
        waiting_for[missing].append(device)
        break
      start = free[device]
      for need in needs:
        away = table.device_of[need.stage] != device
        end = starts[need] + seconds(need)
        start = max(start, ready[need] if away else end)
      starts[action] = start
      free[device] = end = start + seconds(action)
      ready[action] = end + send_s(action)
      places[device] += 1
      todo.extend(waiting_for.pop(action, ()))
  waiting = [
    order[place]
    for order, place in zip(table.devices, places, strict=True)
    if place < len(order)
  ]
  if waiting:
    raise StuckError(waiting, starts)
  return starts
