"""The timeline of a compiled program: kernels and collectives in order.

The text of a GPU program is the order in which the host launches work. A
collective begins at its `-start`, and the device waits for it at its `-done`,
so that the kernels in between hide it.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

from jdist import checks, collectives
from jdist.profiling import _hlo

# Names, views and constants launch no kernel.
_FREE = frozenset({
  "parameter", "constant", "tuple", "get-tuple-element", "bitcast",
  "after-all", "partition-id", "replica-id", "opt-barrier", "domain",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Event:
  """A kernel, or the start or the done of a collective.

  Attributes:
    kind: `"compute"`, or the `"start"` or `"done"` of a collective.
    name: The instruction's name. A start and its done both have the start's.
    flops: Two for each multiply and add of products and convolutions.
    num_bytes: The memory that a kernel reads and writes. An array that it only
      slices or changes in place counts with the slice.
    collective: The collective of a start; None for other events.
  """

  kind: Literal["compute", "start", "done"]
  name: str
  flops: int = 0
  num_bytes: int = 0
  collective: collectives.Collective | None = None


def read_timeline(
  program: Any, *, branch: Literal["sends", "idles"] = "sends"
) -> tuple[Event, ...]:
  """Reads the order in which a compiled program computes and sends.

  A collective that is not split into start and done, or is marked to run in
  line, gives both events at once. The events of a loop occur once per turn.

  Args:
    program: A compiled function (`jitted.lower(...).compile()`) or its text.
    branch: The branch of a conditional. "sends" (default) takes the one that
      sends most, or computes most if none sends, as in a step that ends a
      round. "idles" takes the one that does least, as in the steps before.
  """
  checks.check_choice("branch", branch, ("sends", "idles"))
  parsed = _hlo.parse(program)
  choose = max if branch == "sends" else min
  return tuple(_walk(parsed, parsed.entry, choose, conditional=False))


def _walk(
  program: _hlo.Program,
  computation: str,
  choose: Callable[..., tuple[Event, ...]],
  *,
  conditional: bool,
) -> Iterator[Event]:
  for instruction in program.computations[computation]:
    operation = instruction.operation
    if operation == "conditional":
      branches = [
        tuple(_walk(program, name, choose, conditional=True))
        for name in instruction.called
        if name in program.computations
      ]
      yield from choose(branches, key=_weight, default=())
    elif operation == "while":
      body = instruction.body
      once = tuple(_walk(program, body, choose, conditional=conditional))
      yield from once * instruction.turns
    elif operation == "call":
      for name in instruction.called:
        yield from _walk(program, name, choose, conditional=conditional)
    else:
      yield from _events(program, instruction, conditional=conditional)


def _weight(events: tuple[Event, ...]) -> tuple[float, int]:
  # Sending decides first, since a branch that sends ends a round.
  sent = math.fsum(e.collective.wire_bytes for e in events if e.collective)
  return sent, sum(e.flops + e.num_bytes for e in events)


def _events(
  program: _hlo.Program, instruction: _hlo.Instruction, *, conditional: bool
) -> Iterator[Event]:
  operation, name = instruction.operation, instruction.name
  if operation in _FREE:
    return
  if operation.endswith("-done"):
    # The done of a copy, or of a collective in line, is no event: only started
    # collectives are waited for.
    started = program.instructions.get(next(iter(instruction.operands), ""))
    if started is not None and _sends(program, started) and not _waits(started):
      yield Event("done", started.name)
    return
  if _sends(program, instruction):
    collective = _hlo.as_collective(
      program, _sender(program, instruction), conditional=conditional
    )
    yield Event("start", name, collective=collective)
    if not operation.endswith("-start") or _waits(instruction):
      yield Event("done", name)
    return
  if operation.endswith("-start"):
    # A copy engine works in parallel to the kernels.
    return
  yield Event(
    "compute", name, flops=_flops(program, instruction),
    num_bytes=_moved_bytes(program, instruction),
  )  # fmt: skip


def _sends(program: _hlo.Program, instruction: _hlo.Instruction) -> bool:
  sender = _sender(program, instruction)
  return sender.operation.removesuffix("-start") in _hlo.KINDS


def _waits(instruction: _hlo.Instruction) -> bool:
  """Returns whether the compiler runs a start in line with the kernels."""
  return '"is_sync":true' in instruction.attributes


def _sender(
  program: _hlo.Program, instruction: _hlo.Instruction
) -> _hlo.Instruction:
  """Returns the collective itself, where an `async-start` wraps it."""
  if instruction.operation != "async-start":
    return instruction
  for name in instruction.called:
    for inner in program.computations.get(name, ()):
      if inner.operation in _hlo.KINDS:
        return inner
  return instruction


def _moved_bytes(program: _hlo.Program, instruction: _hlo.Instruction) -> int:
  """Counts the memory that a kernel reads and writes."""
  if instruction.operation == "fusion":
    for name in instruction.called:
      if body := program.computations.get(name):
        return _moved_in_fusion(body)
  known = [x for x in instruction.operands if x in program.instructions]
  operands = [program.instructions[x].result_bytes for x in known]
  if instruction.operation in _SLICES:
    return 2 * instruction.result_bytes
  if (part := _PARTS.get(instruction.operation)) is not None:
    return 2 * sum(operands[part : part + 1])
  result = instruction.result
  if instruction.operation == "custom-call":
    # The further results of a library call are scratch memory.
    result = result[:1]
  return sum(shape.num_bytes for shape in result) + sum(operands)


# These read only as much of their first operand as they return.
_SLICES = frozenset({"slice", "dynamic-slice", "gather"})
# These change their first operand in place, by the operand of this number.
_PARTS = {"dynamic-update-slice": 1, "scatter": 2}
_VIEWS = frozenset({"bitcast", "reshape", "get-tuple-element"})


def _moved_in_fusion(body: tuple[_hlo.Instruction, ...]) -> int:
  # Intermediate values stay in registers: only parameters are read from memory,
  # and only the root is written.
  by_name = {inner.name: inner for inner in body}
  users: dict[str, list[_hlo.Instruction]] = {name: [] for name in by_name}
  for inner in body:
    for name in set(inner.operands) & by_name.keys():
      users[name].append(inner)

  def read(inner: _hlo.Instruction) -> int:
    """Counts the bytes that are read of a value, at most all of it."""
    total = 0
    for user in users[inner.name]:
      first = user.operands[0] == inner.name
      if user.operation in _VIEWS:
        total += read(user)
      elif first and user.operation in _SLICES:
        total += user.result_bytes
      elif not (first and user.operation in _PARTS):
        return inner.result_bytes
    return min(total, inner.result_bytes)

  def written(inner: _hlo.Instruction) -> int:
    operands = [by_name[name] for name in inner.operands if name in by_name]
    if inner.operation == "tuple":
      return sum(written(operand) for operand in operands)
    if inner.operation in _VIEWS and operands:
      return written(operands[0])
    part = _PARTS.get(inner.operation, len(operands))
    if part < len(operands):
      return operands[part].result_bytes
    return inner.result_bytes

  return written(body[-1]) + sum(
    read(inner) for inner in body if inner.operation == "parameter"
  )


def _flops(program: _hlo.Program, instruction: _hlo.Instruction) -> int:
  """Counts two for each multiply and add of products and convolutions."""
  operation = instruction.operation
  operands = program.operands(instruction)
  if operation == "fusion":
    return sum(
      _flops(program, inner)
      for name in instruction.called
      for inner in program.computations.get(name, ())
    )
  if operation == "dot" or "__cublas$" in instruction.attributes:
    return _dot_flops(instruction, operands)
  if operation == "convolution" or "__cudnn$conv" in instruction.attributes:
    return _convolution_flops(instruction, operands)
  return 0


def _dot_flops(
  instruction: _hlo.Instruction, operands: tuple[_hlo.Shape, ...]
) -> int:
  # XLA's own product has `lhs_contracting_dims={1}`, and a library call has
  # `"lhs_contracting_dimensions":["1"]`.
  match = re.search(
    r'lhs_contracting_dim(?:ension)?s"?[=:][{\[]([\d,"]*)',
    instruction.attributes,
  )
  if match is None or not operands:
    return 0
  dims = [int(d) for d in re.findall(r"\d+", match[1])]
  contracted = math.prod(operands[0].dims[d] for d in dims)
  return 2 * instruction.result[0].size * contracted


def _convolution_flops(
  instruction: _hlo.Instruction, operands: tuple[_hlo.Shape, ...]
) -> int:
  """Counts every weight of an output feature for each entry of the output.

  The gradients by input and by filter cost the same as the layer itself.
  """
  labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
  if labels is None or len(operands) < 2:
    return 0
  # In a gradient the layer's output is an operand, not the result.
  target = instruction.attributes
  if "BackwardFilter" in target:
    output, weights = operands[1], instruction.result[0]
  elif "BackwardInput" in target:
    output, weights = operands[0], operands[1]
  else:
    output, weights = instruction.result[0], operands[1]
  features = weights.dims[labels[1].index("o")]
  return 2 * output.size * (weights.size // max(features, 1))
