"""Collectives of a compiled program, for comparison with those of a trace."""

import math
import re
from typing import Any

from jdist import collectives
from jdist.profiling import _hlo

# `all-reduce-start` and `-done` are one operation, which counts at its start.
KINDS: dict[str, collectives.Kind] = {
  "all-reduce": "all-reduce",
  "all-gather": "all-gather",
  "reduce-scatter": "reduce-scatter",
  "all-to-all": "all-to-all",
  "ragged-all-to-all": "all-to-all",
  "collective-permute": "permute",
}


def read_collectives(program: Any) -> tuple[collectives.Collective, ...]:
  """Lists the collectives of a compiled program in textual order.

  Each has the bytes of its operands and the number of devices of one of its
  groups. It is `conditional` if it is reached through a conditional only, and
  then has the `phase` that its branch names. A collective in a loop is listed
  once.

  Args:
    program: A compiled function (`jitted.lower(...).compile()`) or its text.

  >>> read_collectives('''
  ... ENTRY %main (x: f32[10]) -> f32[10] {
  ...   %x = f32[10]{0} parameter(0)
  ...   ROOT %r = f32[10]{0} all-reduce(%x), replica_groups=[1,8]<=[8]
  ... }''')
  (Collective(kind='all-reduce', payload_bytes=40, num_workers=8,
   conditional=False, count=1, phase=None),)
  """
  parsed = _hlo.parse(program)
  always = parsed.always()
  return tuple(
    as_collective(parsed, instruction, conditional=computation not in always)
    for computation, instructions in parsed.computations.items()
    for instruction in instructions
    if instruction.operation.removesuffix("-start") in KINDS
  )


def as_collective(
  program: _hlo.Program, instruction: _hlo.Instruction, *, conditional: bool
) -> collectives.Collective:
  """Reads a collective instruction."""
  return collectives.Collective(
    KINDS[instruction.operation.removesuffix("-start")],
    sum(shape.num_bytes for shape in program.operands(instruction)),
    _group_size(instruction.attributes),
    conditional=conditional,
    phase=_phase(instruction.attributes) if conditional else None,
  )


def _phase(attributes: str) -> collectives.Phase | None:
  match = re.search(r'op_name="([^"]*)"', attributes)
  return None if match is None else collectives.Phase.of(match[1])


def _group_size(attributes: str) -> int:
  # XLA writes groups in three ways. The short form has the number of groups and
  # their size: replica_groups=[1,8]<=[8].
  if match := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
    return int(match[1])
  # The long form lists the devices: replica_groups={{0,1},{2,3}}.
  if match := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
    return len(match[1].split(","))
  # The form by names has a mesh: replica_groups=mesh['worker'=2,'fsdp'=2]
  # {'worker'}.
  if match := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", attributes):
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", match[1]))
    names = re.findall(r"'([^']+)'", match[2])
    return math.prod(int(sizes[name]) for name in names)
  # A permute has pairs instead, in which a device may occur twice.
  if match := re.search(r"source_target_pairs=\{(.*?)\}\}", attributes):
    return len(set(re.findall(r"\d+", match[1])))
  return 1
