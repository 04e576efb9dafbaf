"""The schedule of a compiled program: what runs while what is being sent.

XLA's GPU programs are scheduled: their text is the order in which the host
gives work to the device.  A collective begins at its `-start` and is waited
for at its `-done`; what stands between hides it.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any, Literal

from jdist.collectives import _hlo, _programs, _traffic

# Instructions that make no kernel: names, views and constants.
_FREE = frozenset({
  "parameter", "constant", "tuple", "get-tuple-element", "bitcast",
  "after-all", "partition-id", "replica-id", "opt-barrier", "domain",
})  # fmt: skip

_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Event:
  """One thing that the program does, in its place in the order.

  Attributes:
    kind: `"compute"`, or the `"start"` or `"done"` of a collective.
    name: the instruction's; a start and its done have the start's name.
    operation: XLA's name of it.
    flops: floating point operations of a computation.
    num_bytes: memory that a computation reads and writes.
    collective: what a start sends; None for others.
  """

  kind: Literal["compute", "start", "done"]
  name: str
  operation: str
  flops: int = 0
  num_bytes: int = 0
  collective: _traffic.Collective | None = None


def read_schedule(program: Any) -> tuple[Event, ...]:
  """Reads the order in which a compiled program computes and sends.

  A collective that is not split into start and done is both at once: nothing
  runs beside it.  Of a conditional the branch that sends most is read, or
  computes most if none sends: the step that ends a round.  A loop is read as
  often as it runs.

  Args:
    program: a compiled function (`jitted.lower(...).compile()`) or its text.

  Returns:
    The events in order.

  >>> [event.kind for event in read_schedule('''
  ... ENTRY %main (x: f32[8], w: f32[8,8]) -> f32[8] {
  ...   %x = f32[8]{0} parameter(0)
  ...   %w = f32[8,8]{1,0} parameter(1)
  ...   %s = f32[8]{0} all-reduce-start(%x), replica_groups={{0,1}}
  ...   %y = f32[8]{0} dot(%x, %w), lhs_contracting_dims={0}
  ...   %d = f32[8]{0} all-reduce-done(%s)
  ...   ROOT %z = f32[8]{0} add(%d, %y)
  ... }''')]
  ['start', 'compute', 'done', 'compute']
  """
  parsed = _hlo.parse(program)
  return tuple(_walk(parsed, parsed.entry, conditional=False))


def _walk(
  program: _hlo.Program, computation: str, *, conditional: bool
) -> Iterator[Event]:
  for instruction in program.computations[computation]:
    operation = instruction.operation
    if operation in _FREE:
      continue
    if operation == "conditional":
      branches = [
        tuple(_walk(program, name, conditional=True))
        for name in instruction.called
        if name in program.computations
      ]
      yield from max(branches, key=_weight, default=())
    elif operation == "while":
      body = re.search(r"body=%?([\w.\-]+)", instruction.attributes)
      turns = re.search(
        r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes
      )
      if body is not None:
        once = tuple(_walk(program, body[1], conditional=conditional))
        for _ in range(int(turns[1]) if turns else 1):
          yield from once
    elif operation == "call":
      for name in instruction.called:
        yield from _walk(program, name, conditional=conditional)
    else:
      yield from _events(program, instruction, conditional=conditional)


def _weight(events: tuple[Event, ...]) -> tuple[float, int]:
  sent = math.fsum(e.collective.wire_bytes for e in events if e.collective)
  return sent, sum(e.flops + e.num_bytes for e in events)


def _events(
  program: _hlo.Program, instruction: _hlo.Instruction, *, conditional: bool
) -> Iterator[Event]:
  operation, name = instruction.operation, instruction.name
  if operation.endswith("-done"):
    started = program.instructions.get(next(iter(instruction.operands), ""))
    if started is not None and _sends(program, started):
      yield Event("done", started.name, operation)
    return
  if _sends(program, instruction):
    sender = _sender(program, instruction)
    collective = _programs.as_collective(
      program, sender, conditional=conditional
    )
    yield Event("start", name, sender.operation, collective=collective)
    if not operation.endswith("-start"):
      yield Event("done", name, operation)
    return
  if operation.endswith("-start"):
    return  # A copy engine's work beside the kernels.
  yield Event(
    "compute",
    name,
    operation,
    flops=_flops(program, instruction),
    num_bytes=instruction.result_bytes
    + sum(shape.num_bytes for shape in program.operands(instruction)),
  )


def _sends(program: _hlo.Program, instruction: _hlo.Instruction) -> bool:
  sender = _sender(program, instruction)
  return sender.operation.removesuffix("-start") in _programs.KINDS


def _sender(
  program: _hlo.Program, instruction: _hlo.Instruction
) -> _hlo.Instruction:
  """The collective itself, where a generic `async-start` wraps it."""
  if instruction.operation != "async-start":
    return instruction
  for name in instruction.called:
    for inner in program.computations.get(name, ()):
      if inner.operation in _programs.KINDS:
        return inner
  return instruction


def _flops(program: _hlo.Program, instruction: _hlo.Instruction) -> int:
  """Two for each multiply and add of products and convolutions.

  What else a kernel computes is bounded by the memory it moves.
  """
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
  # `lhs_contracting_dims={1}`, in a library call `"...":["1"]`.
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
  """Every output sample meets every weight of one output feature.

  The three convolutions of a layer (forward, by input, by filter) cost the
  same: the gradient has the output's shape.
  """
  labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
  if labels is None or len(operands) < 2:
    return 0
  target = instruction.attributes
  if "BackwardFilter" in target:
    output, weights = operands[1], instruction.result[0]
  elif "BackwardInput" in target:
    output, weights = operands[0], operands[1]
  else:
    output, weights = instruction.result[0], operands[1]
  features = weights.dims[labels[1].index("o")]
  return 2 * output.size * (weights.size // max(features, 1))
