"""The loop of a pipeline's step in a scheduled GPU program."""

import dataclasses
from typing import Any

from jdist.profiling import _hlo
from jdist.profiling._timeline import _events, _walk, Event


@dataclasses.dataclass(frozen=True)
class Loop:
  """A loop of a compiled program with conditionals.

  Attributes:
    turns: The number of turns.
    events: The events of a turn, without its conditionals.
    branches: The events of every branch, for each conditional in order.
    around: For each send, the number of conditionals that run between its start
      and its done.
  """

  turns: int
  events: tuple[Event, ...]
  branches: tuple[tuple[tuple[Event, ...], ...], ...]
  around: tuple[int, ...]


def read_loop(program: Any) -> Loop:
  """Reads the loop with conditionals of a compiled program, as pipelines have.

  A conditional within a branch counts with the branch that computes most.

  Args:
    program: A compiled function (`jitted.lower(...).compile()`) or its text.

  Raises:
    ValueError: If no loop, or more than one, has conditionals.
  """
  parsed = _hlo.parse(program)
  whole = [x for name in parsed.always() for x in parsed.computations[name]]
  found = []
  for loop in whole:
    # Only a loop has a body.
    body = parsed.computations.get(loop.body, ())
    if any(x.operation == "conditional" for x in body):
      found.append(loop)
  if len(found) != 1:
    raise ValueError(
      "`program` must have one loop with conditionals, as a pipeline's step "
      f"has, got {len(found)}."
    )
  (loop,) = found
  events: list[Event] = []
  branches = []
  starts: dict[str, int] = {}
  around: dict[str, int] = {}
  for instruction in parsed.computations[loop.body]:
    if instruction.operation == "conditional":
      branches.append(
        tuple(
          tuple(_walk(parsed, name, max, conditional=True))
          for name in instruction.called
          if name in parsed.computations
        )
      )
      continue
    for event in _events(parsed, instruction, conditional=False):
      events.append(event)
      if event.kind == "start":
        starts[event.name] = len(branches)
      elif event.kind == "done":
        around[event.name] = len(branches) - starts[event.name]
  sends = tuple(around[name] for name in starts)
  return Loop(loop.turns, tuple(events), tuple(branches), sends)
