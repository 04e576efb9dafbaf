"""A pipeline's schedule as a table: the order of actions on each device."""

import collections
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from jdist import checks, signatures

Weights = Literal["delayed", "stashed", "newest"]

# A table of so many is made in seconds and simulated in a minute.
_MOST_PASSES = 100_000


class Op(enum.IntEnum):
  """Kinds of work that a table schedules on a device.

  `BACKWARD` is the whole backward pass.  A zero-bubble table splits it into
  `BACKWARD_INPUT`, the gradient of the stage's input, and `BACKWARD_WEIGHT`,
  the gradients of its parameters.
  """

  IDLE = 0
  FORWARD = 1
  BACKWARD = 2
  BACKWARD_INPUT = 3
  BACKWARD_WEIGHT = 4
  UPDATE = 5

  @property
  def letter(self) -> str:
    """The letter F, B, I, W or U of the text form, and a dot for idle."""
    return ".FBIWU"[self]

  @property
  def kind(self) -> str:
    """The kind of the op's spans in a trace, which decides their colour."""
    kinds = ("idle", "forward", "backward", "backward", "weight", "update")
    return kinds[self]


# Ops that produce the gradient which the previous stage waits for.
GIVES_GRADIENT = (Op.BACKWARD, Op.BACKWARD_INPUT)
# Ops that produce gradients of the stage's own parameters.
GIVES_WEIGHTS = (Op.BACKWARD, Op.BACKWARD_WEIGHT)


class Action(NamedTuple):
  """One entry of a table.

  Attributes:
    op: The kind of work.
    stage: The stage of the model, from 0.
    microbatch: The micro-batch of the iteration, from 0; 0 for an update.
    iteration: The optimizer step, from 0, which all stages share.
  """

  op: Op
  stage: int
  microbatch: int = 0
  iteration: int = 0

  def __str__(self) -> str:
    """Returns the text form, for example `F2/1@3` in stage 1, iteration 3."""
    number = "" if self.op == Op.UPDATE else str(self.microbatch)
    where = f"/{self.stage}"
    when = f"@{self.iteration}" if self.iteration else ""
    return f"{self.op.letter}{number}{where}{when}"


@signatures.explained
@signatures.checked
@dataclasses.dataclass(frozen=True)
class Table:
  r"""The order in which each device of a pipeline acts.

  Version v of a stage's parameters includes the updates of iterations 0 to
  v - 1.  The passes of iteration k read the version that `weights` names:

  * `"delayed"`: Both passes read version :math:`\max(0, k - W + 1)` with the
    `window` W; a window of 1 is synchronous.
  * `"stashed"`: The forward pass reads the newest version and keeps it for the
    backward pass.
  * `"newest"`: Each pass reads the newest version, so the two may differ.

  Attributes:
    name: The name of the schedule.
    devices: The actions of each device, in order.
    num_stages: The number of stages; a device may hold several.
    num_microbatches: The number of micro-batches in an iteration.
    num_iterations: The number of iterations in the table.
    window: The number W of iterations that may be in progress at once.
    weights: The version rule, as above.

  Raises:
    ValueError: If an argument is out of its range.  Whether the order can run
      is the question of `check_table`.
  """

  name: str
  devices: tuple[tuple[Action, ...], ...]
  num_stages: signatures.PositiveInt
  num_microbatches: signatures.PositiveInt
  num_iterations: signatures.PositiveInt = 1
  window: signatures.PositiveInt = 1
  weights: Weights = "delayed"

  def __post_init__(self) -> None:
    if not self.devices:
      raise ValueError("`devices` must be one at least, got none.")

  def __iter__(self) -> Iterator[Action]:
    """Iterates over all actions, one device after the other."""
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
    """The first device that acts on each stage; -1 for a stage without one."""
    found = [-1] * self.num_stages
    # Devices are visited in reverse, so that the first one remains.
    for device, order in reversed(list(enumerate(self.devices))):
      for action in order:
        # A table read from a file may name stages that do not exist;
        # `check_table` reports them.
        if 0 <= action.stage < self.num_stages:
          found[action.stage] = device
    return tuple(found)

  @functools.cached_property
  def splits_backward(self) -> frozenset[int]:
    """The stages whose backward pass is split into two parts."""
    return frozenset(x.stage for x in self if x.op == Op.BACKWARD_INPUT)

  def last_backward(self, stage: int) -> Op:
    """Returns the op after which a stage has a micro-batch's gradients."""
    checks.check_int("stage", stage, 0, self.num_stages - 1)
    return Op.BACKWARD_WEIGHT if stage in self.splits_backward else Op.BACKWARD

  def needs(self, action: Action) -> list[Action]:
    """Returns the actions whose results an action needs.

    Constraints between actions of one device, such as which version of the
    parameters exists, are not included: the device's order decides them.
    """
    op, stage, *rest = action
    checks.check_int("stage", stage, 0, self.num_stages - 1)
    if op == Op.FORWARD:
      return [Action(op, stage - 1, *rest)] if stage else []
    if op in GIVES_GRADIENT:
      found = [Action(Op.FORWARD, stage, *rest)]
      if stage + 1 < self.num_stages:
        found.append(self._gradient_of(action, stage + 1))
      return found
    if op == Op.BACKWARD_WEIGHT:
      return [Action(Op.BACKWARD_INPUT, stage, *rest)]
    if op == Op.UPDATE:
      last, counts = self.last_backward(stage), range(self.num_microbatches)
      return [Action(last, stage, i, action.iteration) for i in counts]
    return []

  def sends_to(self, action: Action) -> Action | None:
    """Returns the action on another device that waits for one, if any."""
    op, stage, *rest = action
    checks.check_int("stage", stage, 0, self.num_stages - 1)
    found = None
    if op == Op.FORWARD and stage + 1 < self.num_stages:
      found = Action(op, stage + 1, *rest)
    elif op in GIVES_GRADIENT and stage:
      found = self._gradient_of(action, stage - 1)
    # Between two stages of one device no message is necessary.
    if found is None or self.device_of[found.stage] == self.device_of[stage]:
      return None
    return found

  def _gradient_of(self, action: Action, stage: int) -> Action:
    """Returns the same micro-batch's gradient of another stage's input."""
    split = stage in self.splits_backward
    op = Op.BACKWARD_INPUT if split else Op.BACKWARD
    return Action(op, stage, action.microbatch, action.iteration)

  def expected(self) -> Iterator[Action]:
    """Yields every action of a complete table once."""
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
  """Inserts each stage's update right after its last gradients."""
  found: list[Action] = []
  done: collections.Counter[tuple[int, int]] = collections.Counter()
  # A later update would gain nothing, and passes of the next iteration may need
  # it.
  for action in order:
    found.append(action)
    if action.op in GIVES_WEIGHTS:
      key = action.stage, action.iteration
      done[key] += 1
      if done[key] == num_microbatches:
        found.append(Action(Op.UPDATE, action.stage, 0, action.iteration))
  return tuple(found)


class StuckError(Exception):
  """Reports that devices wait for each other.

  Attributes:
    waiting: The next action of each device that has not finished.
    starts: The start times of the actions that did run.
  """

  def __init__(self, waiting: list[Action], starts: Mapping[Action, float]):
    super().__init__(", ".join(map(str, waiting)))
    self.waiting, self.starts = waiting, starts


def start_times(
  table: Table,
  seconds: Callable[[Action], float],
  send_s: Callable[[Action], float] = lambda _: 0.0,
) -> dict[Action, float]:
  """Computes when each action starts, assuming links without contention.

  Other devices have an action's output `send_s` after its end.  Actions are
  listed in an order in which they can run.

  Raises:
    StuckError: If devices wait for each other.
  """
  starts: dict[Action, float] = {}
  # The time at which other devices have an action's output.
  ready: dict[Action, float] = {}
  free = [0.0] * len(table.devices)
  places = [0] * len(table.devices)
  waiting_for: dict[Action, list[int]] = collections.defaultdict(list)
  # Each device runs as far as it can; an action that finishes wakes the devices
  # that wait for it.  Every action is visited once, so this is linear in the
  # size of the table, where a loop over ticks would not be.
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


@dataclasses.dataclass(frozen=True)
class Versions:
  """The versions of the parameters that a table reads and keeps.

  Attributes:
    read: The version that each pass reads.
    held: The most versions that each stage keeps, the newest included.
    delays: By how many updates the gradients of each stage are late at most.
      A gradient of iteration k taken at version v is k - v updates late.
  """

  read: Mapping[Action, int]
  held: tuple[int, ...]
  delays: tuple[int, ...]


def read_versions(table: Table) -> Versions:
  """Follows each device's order and finds the version that each pass reads.

  A version that does not exist yet is not an error here: `check_table` reports
  it.
  """
  read: dict[Action, int] = {}
  held, delays = [1] * table.num_stages, [0] * table.num_stages
  for order in table.devices:
    newest: collections.Counter[int] = collections.Counter()
    # For each stage, how many later passes still need a stashed version.
    kept: dict[int, collections.Counter[int]] = collections.defaultdict(
      collections.Counter
    )
    for action in order:
      stage = action.stage
      if action.op == Op.UPDATE:
        newest[stage] += 1
      else:
        read[action] = _version(table, read, action, newest[stage])
        if action.op == Op.FORWARD:
          late = action.iteration - read[action]
          delays[stage] = max(delays[stage], late)
        # The weight part of a split backward pass needs no parameters: the
        # input part stashes what it reads, and so ends the version's use.
        if table.weights == "stashed":
          if action.op == Op.FORWARD:
            kept[stage][read[action]] += 1
          elif action.op in GIVES_GRADIENT:
            kept[stage][read[action]] -= 1
      held[stage] = max(held[stage], _num_held(table, kept, stage, newest))
  return Versions(read, tuple(held), tuple(delays))


def oldest_read(table: Table, iteration: int) -> int:
  """Returns the version that an iteration reads under the `"delayed"` rule."""
  return max(0, iteration - table.window + 1)


def _version(
  table: Table, read: Mapping[Action, int], action: Action, newest: int
) -> int:
  if table.weights == "delayed":
    return oldest_read(table, action.iteration)
  if table.weights == "stashed" and action.op != Op.FORWARD:
    return read.get(action._replace(op=Op.FORWARD), newest)
  return newest


def _num_held(
  table: Table,
  kept: Mapping[int, collections.Counter[int]],
  stage: int,
  newest: Mapping[int, int],
) -> int:
  if table.weights == "stashed":
    return len({v for v, n in kept[stage].items() if n} | {newest[stage]})
  if table.weights == "newest" or newest[stage] == table.num_iterations:
    return 1
  # Iterations finish in order, so the oldest unfinished one has the number of
  # updates so far; the versions from the one that it reads must be kept.
  return newest[stage] - oldest_read(table, newest[stage]) + 1


def check_passes(
  num_stages: int, num_microbatches: int, num_iterations: int
) -> None:
  """Raises a ValueError unless a table can be made of so many passes."""
  checks.check_int("num_stages", num_stages, 1)
  checks.check_int("num_microbatches", num_microbatches, 1)
  checks.check_int("num_iterations", num_iterations, 1)
  if num_stages * num_microbatches * num_iterations > _MOST_PASSES:
    raise ValueError(
      "`num_stages` times `num_microbatches` times the iterations must be at "
      f"most {_MOST_PASSES:,}, got {num_stages} times {num_microbatches} times "
      f"{num_iterations}. A table lists every pass: take fewer."
    )
