"""The proof that a table can run, and the count of its slots."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Literal

from jdist import signatures
from jdist.pipeline.schedule._table import (
  Action,
  oldest_read,
  Op,
  read_versions,
  start_times,
  StuckError,
  Table,
)
from jdist.pipeline.schedule._text_form import draw_table

Sends = Literal["buffered", "blocking"]


class TableError(ValueError):
  """Reports why a table cannot run, with a drawing of the place.

  The command line prints the two apart: `problem` on one line, and `picture`,
  which may be empty, with its own layout.
  """

  def __init__(self, problem: str, picture: str):
    super().__init__(f"{problem}\n{picture}" if picture else problem)
    self.problem, self.picture = problem, picture


@dataclasses.dataclass(frozen=True)
class TableReport:
  """The needs of a table that can run.

  Attributes:
    blocking: Whether it also runs if each send waits for its receiver.
    live: For each stage, the most micro-batches between their forward pass and
      the end of their backward pass.
    versions: For each stage, the most versions of the parameters.
    delays: For each stage, by how many updates its gradients are late at most.
  """

  blocking: bool
  live: tuple[int, ...]
  versions: tuple[int, ...]
  delays: tuple[int, ...]


@signatures.checked
def check_table(
  table: Table,
  *,
  sends: Sends = "buffered",
  max_live: int | None = None,
  max_versions: int | None = None,
) -> TableReport:
  """Proves that a table can run, and counts what it needs.

  Each action appears once, and a stage's actions are all on one device; updates
  follow their gradients; each pass finds the version of the parameters that its
  rule names; devices never wait for each other in a circle.

  Args:
    table: The table to check.
    sends: `"buffered"` if a device continues after a send at once;
      `"blocking"` if it waits until the receiver takes the message.
    max_live: The most micro-batches that a stage may keep.
    max_versions: The most versions of the parameters that a stage may keep.

  Raises:
    ValueError: If a condition does not hold; the message draws the place.
  """
  # Later checks rely on earlier ones.
  _check_whole(table)
  _check_order(table)
  try:
    start_times(table, lambda x: float(x.op != Op.UPDATE))
  except StuckError as stuck:
    waits = "; ".join(_waits(table, x, stuck) for x in stuck.waiting)
    raise _error(table, f"the devices wait for each other: {waits}") from None
  waiting = _blocked(table)
  if sends == "blocking" and waiting:
    raise _error(
      table,
      "with blocking sends the devices wait for each other: "
      + "; ".join(waiting)
      + ". Buffered sends let it run",
    )
  report = table_needs(table, not waiting)
  for name, limit, found in (
    ("max_live", max_live, report.live),
    ("max_versions", max_versions, report.versions),
  ):
    if limit is not None and max(found) > limit:
      stage = found.index(max(found))
      raise _error(
        table, f"stage {stage} keeps {found[stage]}, and `{name}` is {limit}"
      )
  return report


def table_needs(table: Table, blocking: bool = False) -> TableReport:
  """Counts what a table needs, without the proof that it can run."""
  held, delays = (1,) * table.num_stages, (0,) * table.num_stages
  if table.weights != "delayed" or table.window > 1:
    versions = read_versions(table)
    held, delays = versions.held, versions.delays
  stages = range(table.num_stages)
  most = most_saved(table, [1] * len(stages), stages)
  live = tuple(int(most[stage]) for stage in stages)
  return TableReport(blocking, live, held, delays)


def _error(table: Table, problem: str) -> TableError:
  # A stage that does not exist cannot be drawn.
  drawn = all(0 <= x.stage < table.num_stages for x in table)
  return TableError(
    f"Table {table.name!r} cannot run: {problem}.",
    draw_table(table) if drawn else "",
  )


def _check_whole(table: Table) -> None:
  counts = collections.Counter(table)
  wanted = set(table.expected())
  for action, count in counts.items():
    if not 0 <= action.stage < table.num_stages:
      raise _error(
        table,
        f"{action} is of a stage beyond the {table.num_stages} of `num_stages`",
      )
    if action not in wanted:
      why = (
        f", which has {table.num_microbatches} micro-batches and "
        f"{table.num_iterations} iterations"
      )
      # The likeliest mistake in a table written by hand deserves its own words.
      if action.op == Op.BACKWARD and action.stage in table.splits_backward:
        why = ": the stage has backward passes in two parts, I and W"
      raise _error(table, f"{action} does not belong to it{why}")
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
  """Checks the constraints between actions of one device."""
  for device, order in enumerate(table.devices):
    updates: collections.Counter[int] = collections.Counter()
    done: set[Action] = set()
    for action in order:
      for need in table.needs(action):
        if table.device_of[need.stage] == device and need not in done:
          # `start_times` would also get stuck here, but name no culprit.
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
        wanted = oldest_read(table, iteration)
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
  """Returns which devices are stuck if a send ends only with its receipt.

  A device receives an action's inputs right before the action and sends its
  result right after it.
  """
  # A message is an action, and the one that waits for it.
  programs: list[collections.deque[tuple[Action, Action]]] = []
  for device, order in enumerate(table.devices):
    program: collections.deque[tuple[Action, Action]] = collections.deque()
    for action in order:
      for need in table.needs(action):
        if table.device_of[need.stage] != device:
          program.append((need, action))
      target = table.sends_to(action)
      if target is not None:
        program.append((action, target))
    programs.append(program)
  todo = list(range(len(programs)))
  while todo:
    device = todo.pop()
    if not programs[device]:
      continue
    message = programs[device][0]
    ends = [table.device_of[x.stage] for x in message]
    # A send and its receipt are on different devices and complete together, so
    # a device can only proceed when both have reached the same message.
    if all(programs[x] and programs[x][0] == message for x in ends):
      for end in ends:
        programs[end].popleft()
      todo += ends
  stuck = []
  for device, program in enumerate(programs):
    if program:
      source = program[0][0]
      kind = "send" if table.device_of[source.stage] == device else "receive"
      stuck.append(f"device {device} to {kind} {source}")
  return stuck


def most_saved(
  table: Table, sizes: Sequence[float], owners: Sequence[int]
) -> dict[int, float]:
  """Returns the most that is saved at once for backward passes, by owner.

  A stage saves its size for a micro-batch, and is its own owner, or its device.
  """
  # One device runs all passes of a stage, so its order alone decides.
  live, most = (collections.defaultdict[int, float](int) for _ in range(2))
  last = [table.last_backward(stage) for stage in range(table.num_stages)]
  for op, stage, *_ in table:
    own = owners[stage]
    if op == Op.FORWARD:
      live[own] += sizes[stage]
      most[own] = max(most[own], live[own])
    elif op == last[stage]:
      live[own] -= sizes[stage]
  return most
