"""Parser of the text of an optimized XLA program, and its collectives.

JAX returns the text for every platform, even if a program was compiled without
the devices it is for.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import Any

from jdist import checks, collectives

# The width of other types is the number in their name.
_BITS = {
  "pred": 8, "bf16": 16, "c64": 64, "c128": 128, "s1": 1, "u1": 1,
}  # fmt: skip
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
# The operation's name follows the result's type, which ends in ) } or ]. Its
# operands contain no parenthesis, and attributes follow them.
_OPERATION = re.compile(r"[)}\]] ([a-z][a-z\d\-]*)\(([^)]*)\)(.*)$")
# The attributes that name computations which an instruction runs.
_CALLED = re.compile(
  r"(to_apply|calls|body|condition|true_computation|false_computation"
  r"|branch_computations|called_computations)="
  r"(\{[^}]*\}|%?[\w.\-]+)"
)
_NAME = re.compile(r"%?([\w.\-]+)")
# XLA notes the number of turns of a loop if it could derive it.
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Shape:
  """The type of an array, with XLA's name of the dtype."""

  dtype: str
  dims: tuple[int, ...]

  @property
  def size(self) -> int:
    """The number of elements."""
    return math.prod(self.dims)

  @property
  def num_bytes(self) -> int:
    """The number of bytes, for a packed layout."""
    # Float8 types have further digits in their names: the first ones count.
    digits = re.search(r"\d+", self.dtype)
    width = _BITS.get(self.dtype) or int(digits[0] if digits else 0)
    return -(-self.size * width // 8)


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One line of a program."""

  name: str
  operation: str
  # A tuple has several arrays.
  result: tuple[Shape, ...]
  operands: tuple[str, ...]
  # The rest of the line, after the operands.
  attributes: str = dataclasses.field(repr=False)

  @property
  def result_bytes(self) -> int:
    """The bytes of all arrays of the result."""
    return sum(shape.num_bytes for shape in self.result)

  @property
  def called(self) -> tuple[str, ...]:
    """The names of the computations that the instruction runs."""
    return tuple(
      name
      for _, names in _CALLED.findall(self.attributes)
      for name in _NAME.findall(names)
    )

  @property
  def body(self) -> str:
    """The computation that a loop runs in each turn."""
    found = re.search(r"body=%?([\w.\-]+)", self.attributes)
    return found[1] if found else ""

  @property
  def turns(self) -> int:
    """The number of turns of a loop, or 1 if it is not known."""
    found = _TURNS.search(self.attributes)
    return int(found[1]) if found else 1


@dataclasses.dataclass(frozen=True)
class Program:
  """A program: its entry, and the ordered instructions of computations."""

  entry: str
  computations: dict[str, tuple[Instruction, ...]]

  @functools.cached_property
  def instructions(self) -> dict[str, Instruction]:
    """Every instruction by its name, which XLA makes unique in a program."""
    return {i.name: i for each in self.computations.values() for i in each}

  def operands(self, instruction: Instruction) -> tuple[Shape, ...]:
    """Returns the types of an instruction's operands."""
    return tuple(
      shape
      for name in instruction.operands
      if name in self.instructions
      for shape in self.instructions[name].result
    )

  def always(self) -> frozenset[str]:
    """Returns the computations that run outside of conditionals."""
    seen: set[str] = set()
    todo = [self.entry]
    while todo:
      name = todo.pop()
      if name in seen or name not in self.computations:
        continue
      seen.add(name)
      for instruction in self.computations[name]:
        if instruction.operation != "conditional":
          todo.extend(instruction.called)
    return frozenset(seen)


def parse(program: Any) -> Program:
  """Reads a compiled function (`jitted.lower(...).compile()`) or its text."""
  if not isinstance(program, str) and not hasattr(program, "as_text"):
    raise ValueError(
      "`program` must be a compiled function or the text of one, got "
      f"{checks.show(program)}. Pass `jitted.lower(...).compile()`."
    )
  text = program if isinstance(program, str) else program.as_text()
  found: dict[str, list[Instruction]] = {}
  name = entry = ""
  for line in text.splitlines():
    if not line.startswith(" ") and (match := _COMPUTATION.match(line)):
      name, found[match[2]] = match[2], []
      entry = name if match[1] else entry
    # A closing brace in the first column ends a computation, while nested ones
    # belong to attributes.
    elif line.startswith("}"):
      name = ""
    elif name and (match := _INSTRUCTION.match(line)):
      found[name].extend(_instruction(match[1], match[2]))
  if not entry:
    raise ValueError(
      "`program` must be a compiled function or the text of one, got "
      f"{text[:60]!r}, which has no ENTRY. Pass `jitted.lower(...).compile()`."
    )
  return Program(entry, {name: tuple(x) for name, x in found.items()})


def _instruction(name: str, right_side: str) -> Iterator[Instruction]:
  """Yields the instruction of a line, if it holds one."""
  match = _OPERATION.search(right_side)
  if match is None:
    return
  types = right_side[: match.start() + 1]
  yield Instruction(
    name=name,
    operation=match[1],
    result=tuple(
      Shape(dtype, tuple(int(d) for d in dims.split(",") if d))
      for dtype, dims in _SHAPE.findall(types)
    ),
    # XLA numbers the operands of long tuples by comments like /*index=5*/.
    operands=tuple(_NAME.findall(re.sub(r"/\*.*?\*/", "", match[2]))),
    attributes=match[3],
  )


# `all-reduce-start` and `-done` are one operation, which counts at its start.
KINDS: dict[str, collectives.Kind] = {
  "all-reduce": "all-reduce", "all-gather": "all-gather",
  "reduce-scatter": "reduce-scatter", "all-to-all": "all-to-all",
  "ragged-all-to-all": "all-to-all", "collective-permute": "permute",
}  # fmt: skip


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
   conditional=False, count=1, phase=None, depth=1),)
  """
  parsed = parse(program)
  always = parsed.always()
  return tuple(
    as_collective(parsed, instruction, conditional=computation not in always)
    for computation, instructions in parsed.computations.items()
    for instruction in instructions
    if instruction.operation.removesuffix("-start") in KINDS
  )


def as_collective(
  program: Program, instruction: Instruction, *, conditional: bool
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
