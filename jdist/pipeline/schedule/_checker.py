"""The check of a table: that it is whole, runs to its end, and in how much."""

import collections
import dataclasses
from typing import Literal

from jdist import checks
from jdist.pipeline.schedule._actions import Action, GIVES_GRADIENT, Op
from jdist.pipeline.schedule._table import start_times, StuckError, Table
from jdist.pipeline.schedule._table_picture import draw_table
from jdist.pipeline.schedule._versions import read_versions

Sends = Literal["buffered", "blocking"]


class TableError(ValueError):
  """Reports what is wrong with a table, with a picture of the place.

  Attributes:
    problem: what is wrong, without the picture.
    picture: of the table up to the place; empty where there is none.
  """

  def __init__(self, problem: str, picture: str = ""):
    super().__init__(f"{problem}\n{picture}" if picture else problem)
    self.problem, self.picture = problem, picture


@dataclasses.dataclass(frozen=True)
class TableReport:
  """The needs of a table that can run.

  Attributes:
    blocking: whether it also runs when each send waits for its receiver.
    live: of each stage, the most micro-batches between their forward pass and
      the end of their backward pass.
    slots: of each stage, the most outputs of the stage in front, and gradients
      of the one behind, that wait there, in unit times.
    versions: of each stage, the most versions of the parameters.
    delays: of each stage, by how many updates its gradients are late at most.
  """

  blocking: bool
  live: tuple[int, ...]
  slots: tuple[tuple[int, int], ...]
  versions: tuple[int, ...]
  delays: tuple[int, ...]


def check_table(
  table: Table,
  *,
  sends: Sends = "buffered",
  max_live: int | None = None,
  max_versions: int | None = None,
) -> TableReport:
  """Proves that a table can run, and counts what it needs.

  Each action is there once, on one device for each stage; updates follow their
  gradients; each pass finds the version of the parameters that its rule names;
  no devices wait for each other.

  Args:
    table: to be checked.
    sends: `"buffered"`, where a device goes on once it has sent; `"blocking"`,
      where it waits until the receiver takes it.
    max_live: the most micro-batches that a stage may keep.
    max_versions: the most versions of the parameters that a stage may keep.

  Returns:
    What it needs.

  Raises:
    TableError: a `ValueError` with a picture, when one of them does not hold.
  """
  checks.check_choice("sends", sends, ("buffered", "blocking"))
  _check_whole(table)
  _check_order(table)
  try:
    starts = start_times(table, lambda x: float(x.op != Op.UPDATE))
  except StuckError as stuck:
    raise _error(
      table,
      "the devices wait for each other: "
      + "; ".join(_waits(table, x, stuck) for x in stuck.waiting),
    ) from None
  waiting = _blocked(table)
  if sends == "blocking" and waiting:
    raise _error(
      table,
      "with blocking sends the devices wait for each other: "
      + "; ".join(waiting)
      + ". Buffered sends let it run",
    )
  versions = read_versions(table)
  report = TableReport(
    not waiting,
    _live(table),
    _slots(table, starts),
    versions.held,
    versions.delays(table),
  )
  for name, limit, found in (
    ("max_live", max_live, report.live),
    ("max_versions", max_versions, report.versions),
  ):
    if limit is not None and max(found) > limit:
      stage = found.index(max(found))
      raise _error(
        table,
        f"stage {stage} keeps {found[stage]}, and `{name}` is {limit}",
      )
  return report


def _error(table: Table, problem: str) -> TableError:
  return TableError(
    f"Table {table.name!r} cannot run: {problem}.", draw_table(table)
  )


def _check_whole(table: Table) -> None:
  counts = collections.Counter(table)
  wanted = set(table.expected())
  for action, count in counts.items():
    if not 0 <= action.stage < table.num_stages:
      raise TableError(
        f"Table {table.name!r} cannot run: {action} is of a stage beyond the "
        f"{table.num_stages} of `num_stages`."
      )
    if action not in wanted:
      whole = action.op == Op.BACKWARD and action.stage in table.splits_backward
      raise _error(
        table,
        f"{action} does not belong to it"
        + (
          ": the stage has backward passes in two parts, I and W"
          if whole
          else f", which has {table.num_microbatches} micro-batches and "
          f"{table.num_iterations} iterations"
        ),
      )
    if count > 1:
      raise _error(table, f"{action} is there {count} times")
  missing = next((x for x in table.expected() if x not in counts), None)
  if missing is not None:
    raise _error(table, f"{missing} is missing")
  for device, order in enumerate(table.devices):
    for action in order:
      if table.device_of[action.stage] != device:
        raise _error(
          table,
          f"{action} is on device {device}, and its stage lies on device "
          f"{table.device_of[action.stage]}",
        )


def _check_order(table: Table) -> None:
  """Checks what the order on one device alone decides."""
  for device, order in enumerate(table.devices):
    updates: collections.Counter[int] = collections.Counter()
    done: set[Action] = set()
    for action in order:
      for need in table.needs(action):
        if table.device_of[need.stage] == device and need not in done:
          raise _error(table, f"{action} comes before {need}, which it needs")
      stage, iteration = action.stage, action.iteration
      if action.op == Op.UPDATE:
        if updates[stage] != iteration:
          raise _error(
            table, f"{action} comes before the update of iteration "
            f"{updates[stage]}",
          )  # fmt: skip
        updates[stage] += 1
      elif table.weights == "delayed":
        wanted = max(0, iteration - table.window + 1)
        if updates[stage] < wanted:
          raise _error(
            table,
            f"{action} reads version {wanted} of the parameters, and version "
            f"{updates[stage]} is the newest (window {table.window})",
          )
      done.add(action)


def _waits(table: Table, action: Action, stuck: StuckError) -> str:
  device = table.device_of[action.stage]
  missing = [str(x) for x in table.needs(action) if x not in stuck.starts]
  return f"device {device} with {action} for {' and '.join(missing)}"


def _blocked(table: Table) -> list[str]:
  """Returns who waits for whom when a send ends with its receipt.

  A device receives what an action needs right before it, and sends what it
  gives right after it.
  """
  programs: list[list[tuple[str, Action, Action]]] = []
  for device, order in enumerate(table.devices):
    program = []
    for action in order:
      for need in table.needs(action):
        if table.device_of[need.stage] != device:
          program.append(("receive", need, action))
      target = table.sends_to(action)
      if target is not None:
        program.append(("send", action, target))
    programs.append(program)
  places = [0] * len(programs)
  todo = list(range(len(programs)))
  while todo:
    device = todo.pop()
    if places[device] == len(programs[device]):
      continue
    kind, source, target = programs[device][places[device]]
    other = table.device_of[(target if kind == "send" else source).stage]
    if places[other] == len(programs[other]):
      continue
    # A send and its receipt are never on one device.
    if programs[other][places[other]][1:] == (source, target):
      places[device] += 1
      places[other] += 1
      todo += [device, other]
  return [
    f"device {device} to {program[place][0]} {program[place][1]}"
    for device, (program, place) in enumerate(
      zip(programs, places, strict=True)
    )
    if place < len(program)
  ]


def _live(table: Table) -> tuple[int, ...]:
  live, most = [0] * table.num_stages, [0] * table.num_stages
  for action in table:
    stage = action.stage
    split = stage in table.splits_backward
    if action.op == Op.FORWARD:
      live[stage] += 1
    elif action.op == (Op.BACKWARD_WEIGHT if split else Op.BACKWARD):
      live[stage] -= 1
    most[stage] = max(most[stage], live[stage])
  return tuple(most)


def _slots(
  table: Table, starts: dict[Action, float]
) -> tuple[tuple[int, int], ...]:
  events: dict[tuple[int, int], list[tuple[float, int]]] = (
    collections.defaultdict(list)
  )
  for action, start in starts.items():
    target = table.sends_to(action)
    if target is not None:
      key = target.stage, int(target.op in GIVES_GRADIENT)
      events[key] += [(start + 1, 1), (starts[target] + 1, -1)]
  found = []
  for stage in range(table.num_stages):
    pair = []
    for direction in range(2):
      now = most = 0
      # Those that leave make room for those that come at the same time.
      for _, change in sorted(events[stage, direction]):
        now += change
        most = max(most, now)
      pair.append(most)
    found.append((pair[0], pair[1]))
  return tuple(found)
