"""Searches of cuts and machines by the simulated time of a table."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias, TypeVar

# What is searched: a choice of the plan, with its simulated rate.
_Found = TypeVar("_Found")
# The machine of each device in order, and the cuts.
Layout: TypeAlias = tuple[tuple[str, ...], tuple[int, ...]]
# A problem with at most as many layouts is searched without gaps.
_MOST_LAYOUTS = 1000
# The actions of all simulated tables together that a local search may take.
_MOST_ACTIONS = 60_000


def refine(
  start: tuple[Layout, float],
  names: Sequence[str],
  num_layers: int,
  chunks: int,
  num_actions: int,
  evaluate: Callable[[Layout, float], tuple[_Found, float] | None],
) -> _Found | None:
  """Returns the fastest layout of a candidate's table that the search finds.

  The least bottleneck decides the time of a full pipeline, but not of one that
  fills and empties in each iteration, and not of messages that wait for each
  other.  A small problem is searched exactly; otherwise cuts move by a layer,
  machines are exchanged and stages merged as long as the simulation gets
  faster.

  Args:
    start: The layout from which a local search starts, and its rate.
    names: The names of all machines.
    num_layers: The number of layers.
    chunks: The number of stages on each device.
    num_actions: The size of the table, which bounds a local search.
    evaluate: Simulates a layout and returns what is searched, with its rate;
      None if it does not fit into memory, or cannot exceed the given rate.

  Returns:
    The fastest that is faster than the start; None if there is none.
  """
  (here, rate), best = start, None
  every = _all_layouts(names, num_layers, chunks)
  layouts = list(itertools.islice(every, _MOST_LAYOUTS + 1))
  if len(layouts) <= _MOST_LAYOUTS:
    for layout in layouts:
      found = evaluate(layout, rate)
      if found is not None and found[1] > rate:
        best, rate = found
    return best
  left = _MOST_ACTIONS // num_actions
  seen: set[Layout] = set()
  improved = True
  while improved:
    improved = False
    for layout in _neighbours(here, names, num_layers, chunks):
      if layout in seen:
        continue
      if not left:
        return best
      seen.add(layout)
      found = evaluate(layout, rate)
      left -= 1
      if found is not None and found[1] > rate:
        (best, rate), here, improved = found, layout, True
        break
  return best


def _all_layouts(
  names: Sequence[str], num_layers: int, chunks: int
) -> Iterator[Layout]:
  for number in range(1, min(len(names), num_layers // chunks) + 1):
    for order in itertools.permutations(names, number):
      for cuts in itertools.combinations(
        range(1, num_layers), number * chunks - 1
      ):
        yield order, cuts


def _neighbours(
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
  for i in range(len(order)):
    for name in names:
      if name not in order:
        yield (*order[:i], name, *order[i + 1 :]), cuts
  if chunks == 1:
    for i, j in itertools.product(range(len(order)), range(len(cuts))):
      yield order[:i] + order[i + 1 :], cuts[:j] + cuts[j + 1 :]
