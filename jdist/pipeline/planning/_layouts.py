"""Layouts: the machines of a table's devices, and the cuts of the layers."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

# The machine of each device in order, and the cuts.
Layout: TypeAlias = tuple[tuple[str, ...], tuple[int, ...]]
# The most layouts of a problem that is searched without gaps.
_MOST_LAYOUTS = 1000


def few_layouts(
  groups: Mapping[str, str], num_layers: int, chunks: int
) -> list[Layout]:
  """Returns all layouts, or none of a problem with too many.

  Args:
    groups: Each machine's group of interchangeable ones, which stay in their
      order: others have the same times.
    num_layers: The number of layers.
    chunks: The stages of a device.
  """
  every = (
    (order, cuts)
    for number in range(1, 1 + min(len(groups), num_layers // chunks))
    for order in itertools.permutations(groups, number)
    for cuts in itertools.combinations(
      range(1, num_layers), number * chunks - 1
    )
  )
  found = list(itertools.islice(every, _MOST_LAYOUTS + 1))
  if len(found) > _MOST_LAYOUTS:
    return []
  members: dict[str, list[str]] = {}
  for name, group in groups.items():
    members.setdefault(group, []).append(name)

  def first(order: tuple[str, ...]) -> bool:
    unused = {group: iter(own) for group, own in members.items()}
    return all(next(unused[groups[x]]) == x for x in order)

  return [x for x in found if first(x[0])]


def near_layouts(
  layout: Layout, names: Sequence[str], num_layers: int, chunks: int
) -> Iterator[Layout]:
  """Yields layouts that differ by one cut, two machines, or one stage."""
  order, cuts = layout
  edges = [0, *cuts, num_layers]
  for i in range(len(cuts)):
    for cut in (cuts[i] - 1, cuts[i] + 1):
      if edges[i] < cut < edges[i + 2]:
        yield order, (*cuts[:i], cut, *cuts[i + 1 :])
  for i, j in itertools.combinations(range(len(order)), 2):
    swapped = list(order)
    swapped[i], swapped[j] = order[j], order[i]
    yield tuple(swapped), cuts
  free = [x for x in names if x not in order]
  for i, name in itertools.product(range(len(order)), free):
    yield (*order[:i], name, *order[i + 1 :]), cuts
  if chunks == 1:
    for i, j in itertools.product(range(len(order)), range(len(cuts))):
      yield order[:i] + order[i + 1 :], cuts[:j] + cuts[j + 1 :]
