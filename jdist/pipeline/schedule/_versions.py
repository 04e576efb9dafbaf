"""Versions of the parameters: which one each pass of a table reads."""

import collections
import dataclasses
from collections.abc import Mapping

from jdist.pipeline.schedule._actions import Action, GIVES_GRADIENT, Op
from jdist.pipeline.schedule._table import Table


@dataclasses.dataclass(frozen=True)
class Versions:
  """The versions of the parameters that a table reads and keeps.

  Attributes:
    read: by each action but updates, in the order of its device.
    held: how many each stage keeps at most, the newest included.
  """

  read: Mapping[Action, int]
  held: tuple[int, ...]

  def delays(self, table: Table) -> tuple[int, ...]:
    """Returns how many updates late the gradients of each stage are at most.

    The delay of a gradient of iteration k that was taken at version v is
    k - v.
    """
    most = [0] * table.num_stages
    for action, version in self.read.items():
      if action.op == Op.FORWARD:
        late = action.iteration - version
        most[action.stage] = max(most[action.stage], late)
    return tuple(most)


def read_versions(table: Table) -> Versions:
  """Follows each device's order and finds the version that each pass reads.

  What a version rule forbids, as a version that is not there yet, is found by
  `check`.
  """
  read: dict[Action, int] = {}
  held = [1] * table.num_stages
  for order in table.devices:
    newest: collections.Counter[int] = collections.Counter()
    # Versions that passes to come will read, by stage.
    kept: dict[int, collections.Counter[int]] = collections.defaultdict(
      collections.Counter
    )
    for action in order:
      stage = action.stage
      if action.op == Op.UPDATE:
        newest[stage] += 1
      else:
        read[action] = _version(table, read, action, newest[stage])
        # A split backward pass keeps nothing of the parameters but what its
        # weight part was given; only its input part reads them.
        if table.weights == "stashed":
          if action.op == Op.FORWARD:
            kept[stage][read[action]] += 1
          elif action.op in GIVES_GRADIENT:
            kept[stage][read[action]] -= 1
      held[stage] = max(held[stage], _num_held(table, kept, stage, newest))
  return Versions(read, tuple(held))


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
  # The oldest iteration that has not ended is the number of updates so far.
  return newest[stage] - oldest_read(table, newest[stage]) + 1
