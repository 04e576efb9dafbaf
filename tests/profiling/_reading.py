"""Reads the groups of the collectives in a program's text, for tests.

Apart from `jdist.profiling._hlo`, so that neither hides the other's
mistakes.
"""

import math
import re

import numpy as np

_COLLECTIVE = re.compile(
  r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
  r"(?:-start)?\("
)


def groups(text: str) -> list[tuple[str, list[list[int]]]]:
  """(kind, groups of device numbers) of every collective of a program."""
  return [
    (match[1], _members(line))
    for line in text.splitlines()
    if (match := _COLLECTIVE.search(line))
  ]


def _members(line: str) -> list[list[int]]:
  if match := re.search(r"source_target_pairs=\{(\{.*?\})\}", line):
    return _lists(match[1])
  if match := re.search(r"replica_groups=\{(\{.*?\})\}", line):
    return _lists(match[1])
  if match := re.search(
    r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line
  ):
    shape, dims = _ints(match[1]), _ints(match[2])
    ids = np.arange(math.prod(dims)).reshape(dims)
    if match[3]:
      ids = ids.transpose(_ints(match[3]))
    return ids.reshape(shape).tolist()
  if match := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", match[1]))
    names = re.findall(r"'([^']+)'", match[2])
    ids = np.arange(math.prod(int(n) for n in sizes.values()))
    ids = ids.reshape([int(n) for n in sizes.values()])
    dims = [list(sizes).index(name) for name in names]
    ids = np.moveaxis(ids, dims, range(-len(dims), 0))
    return ids.reshape(-1, math.prod(ids.shape[-len(dims) :])).tolist()
  raise AssertionError(f"No groups in: {line}")


def _ints(text: str) -> list[int]:
  return [int(number) for number in text.split(",")]


def _lists(text: str) -> list[list[int]]:
  return [_ints(group) for group in re.findall(r"\{([\d,]+)\}", text)]
