"""Reads the collectives of a compiled program.

Works on the text of any optimized XLA program, so that what is claimed about
bytes can be held against what the compiler made of it.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

from jdist.collectives import _traffic

# `all-reduce-start` and `-done` are one operation; `-done` is not counted.
_KINDS: dict[str, _traffic.Kind] = {
  "all-reduce": "all-reduce",
  "all-gather": "all-gather",
  "reduce-scatter": "reduce-scatter",
  "all-to-all": "all-to-all",
  "ragged-all-to-all": "all-to-all",
  "collective-permute": "permute",
}
_BITS = {
  "pred": 8, "bf16": 16, "c64": 64, "c128": 128, "s1": 1, "u1": 1,
}  # fmt: skip
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_CALLED = re.compile(
  r"(to_apply|calls|body|condition|true_computation|false_computation"
  r"|branch_computations|called_computations)="
  r"(\{[^}]*\}|%?[\w.\-]+)"
)
_NAME = re.compile(r"%?([\w.\-]+)")


def read_collectives(program: Any) -> tuple[_traffic.Collective, ...]:
  """Lists the collectives of a compiled program.

  Args:
    program: a compiled function (`jitted.lower(...).compile()`) or the text of
      an optimized program.

  Returns:
    Every collective in textual order, with the bytes of its operands and the
    number of devices of one of its groups; `conditional` where it is reached
    through a conditional only.  A collective in a loop is listed once.

  >>> read_collectives('''
  ... ENTRY %main (x: f32[10]) -> f32[10] {
  ...   %x = f32[10]{0} parameter(0)
  ...   ROOT %r = f32[10]{0} all-reduce(%x), replica_groups=[1,8]<=[8]
  ... }''')
  (Collective(kind='all-reduce', payload_bytes=40, num_workers=8,
   conditional=False, count=1),)
  """
  text = program if isinstance(program, str) else program.as_text()
  computations = dict(_computations(text))
  entry = next(name for name, (is_entry, _) in computations.items() if is_entry)
  always = _reachable(computations, entry)
  types = {
    name: rest for _, lines in computations.values() for name, rest in lines
  }
  found = []
  for computation, (_, lines) in computations.items():
    for _, rest in lines:
      match = re.search(r"[)}\]] ([a-z\-]+)\(([^)]*)\)", rest)
      if match is None or match[1].removesuffix("-start") not in _KINDS:
        continue
      operands = (n for n in _NAME.findall(match[2]) if n in types)
      found.append(
        _traffic.Collective(
          _KINDS[match[1].removesuffix("-start")],
          sum(_num_bytes(types[name]) for name in operands),
          _group_size(rest),
          conditional=computation not in always,
        )
      )
  return tuple(found)


def _computations(
  text: str,
) -> Iterator[tuple[str, tuple[bool, list[tuple[str, str]]]]]:
  """Yields (name, (is entry, [(instruction, its right side)]))."""
  name, is_entry = "", False
  lines: list[tuple[str, str]] = []
  for line in text.splitlines():
    if not line.startswith(" ") and (match := _COMPUTATION.match(line)):
      name, is_entry, lines = match[2], bool(match[1]), []
    elif line.startswith("}") and name:
      yield name, (is_entry, lines)
      name = ""
    elif name and (match := _INSTRUCTION.match(line)):
      lines.append((match[1], match[2]))


def _reachable(computations: Any, entry: str) -> set[str]:
  """The computations that run whatever the conditionals decide."""
  seen: set[str] = set()
  todo = [entry]
  while todo:
    name = todo.pop()
    if name in seen or name not in computations:
      continue
    seen.add(name)
    for _, rest in computations[name][1]:
      if " conditional(" in rest:
        continue
      for _, called in _CALLED.findall(rest):
        todo.extend(_NAME.findall(called))
  return seen


def _num_bytes(right_side: str) -> int:
  """Bytes of an instruction's result, read from its type."""
  # The type is all that stands before the operation's name.
  type_text = re.split(r" [a-z\-]+\(", right_side, maxsplit=1)[0]
  bits = 0
  for dtype, dims in _SHAPE.findall(type_text):
    width = _BITS.get(dtype) or int((re.search(r"\d+", dtype) or ["0"])[0])
    bits += width * math.prod(int(d) for d in dims.split(",") if d)
  return -(-bits // 8)


def _group_size(right_side: str) -> int:
  if match := re.search(r"replica_groups=\[\d+,(\d+)\]", right_side):
    return int(match[1])
  if match := re.search(r"replica_groups=\{\{([\d,]*)\}", right_side):
    return len(match[1].split(","))
  # By names: replica_groups=mesh['worker'=2,'fsdp'=2] {'worker'}
  if match := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", right_side):
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", match[1]))
    names = re.findall(r"'([^']+)'", match[2])
    return math.prod(int(sizes[name]) for name in names)
  if match := re.search(r"source_target_pairs=\{(.*?)\}\}", right_side):
    return len(set(re.findall(r"\d+", match[1])))
  return 1
