"""Versions of the parameters: which one each pass of a table reads."""

import collections
import dataclasses
from collections.abc import Mapping

from jdist.pipeline.schedule._table import Action, GIVES_GRADIENT, Op, Table


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
