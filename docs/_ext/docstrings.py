"""Docstrings as reStructuredText: tables, columns, and marks that are none."""

import re
from collections.abc import Iterator

_SECTION = re.compile(r"[A-Z]\w+( \w+)?:$")
# Code, roles and strong text keep their marks.
# Defaults that have no expression, and classes and functions, as Python shows
# them.
_FACTORY = re.compile(r"<factory>|<function [\w.<>]*<lambda>>")
_SHOWN = re.compile(r"<(?:class|function) '?(?:\w+\.)*(\w+)'?>")
_KEPT = re.compile(r"(``.*?``|:\w+:`[^`]*`|`[^`]*`_{0,2}|\*\*[^*]+\*\*)")


def name_defaults(signature: str) -> str:
  """Returns a signature whose defaults are expressions, which Sphinx reads.

  One that it cannot read stands on the page as it is, with the private paths of
  its types.

  >>> name_defaults("(a: f = <function m.g>, b: list = <factory>)")
  '(a: f = g, b: list = ...)'
  """
  return _SHOWN.sub(r"\1", _FACTORY.sub("...", signature))


def to_rest(lines: list[str]) -> list[str]:
  r"""Returns the lines of a docstring without what Sphinx would misread.

  A table of Markdown becomes a `list-table`, an indented block of the
  description becomes a literal block, and single `|` and `*`, as in `|x|`, are
  escaped.

  >>> to_rest(["Scales by |x|.", "", "| a |", "|---|", "| 1 |"])[:3]
  ['Scales by \\|x\\|.', '', '.. list-table::']
  """
  found: list[str] = []
  described, number = True, 0
  while number < len(lines):
    line = lines[number]
    described &= not (_SECTION.match(line) or line.lstrip().startswith(">>>"))
    blank = not (found and found[-1].strip())
    block = _block(lines, number)
    if blank and line.startswith("|"):
      table = [x for x in block if x.startswith("|")]
      found += _list_table(table)
      number += len(table)
    elif (
      blank and described and line.startswith("  ") and not _directive(found)
    ):
      found += ["::", "", *block, ""]
      number += len(block)
    elif line.startswith(".. "):
      directive = [line, *_indented(lines, number + 1)]
      found += directive
      number += len(directive)
    else:
      found.append(line if ">>>" in line or not line else _escape(line))
      number += 1
  return found


def _block(lines: list[str], start: int) -> list[str]:
  """Returns the lines up to one that is blank and ends an indented block."""
  end = start
  while end < len(lines) and (
    lines[end].startswith(("|", " ")) or not lines[end].strip()
  ):
    end += 1
  return lines[start:end]


def _indented(lines: list[str], start: int) -> Iterator[str]:
  for line in lines[start:]:
    if line.strip() and not line.startswith(" "):
      return
    yield line


def _directive(found: list[str]) -> bool:
  before = [line for line in found if line.strip()]
  return bool(before) and before[-1].startswith((".. ", "   "))


def _list_table(table: list[str]) -> list[str]:
  rows = [[x.strip() for x in row.strip("|").split("|")] for row in table]
  lines = [".. list-table::", "   :header-rows: 1", ""]
  for row in [rows[0], *rows[2:]]:
    marks = ["   * - ", *["     - "] * (len(row) - 1)]
    lines += [
      f"{mark}{_escape(cell)}" for mark, cell in zip(marks, row, strict=True)
    ]
  return [*lines, ""]


def _escape(line: str) -> str:
  parts = _KEPT.split(line)
  for i in range(0, len(parts), 2):
    text = re.sub(r"(?<!\\)\|", r"\\|", parts[i])
    # An emphasis has two marks; a single one is a product or an unpacking.
    marks = text.removeprefix("* ")  # An item of a list.
    if marks.count("*") % 2 or "[*" in text:
      text = text[: len(text) - len(marks)] + marks.replace("*", r"\*")
    parts[i] = text
    # A role that a letter follows needs an escaped space as its end.
    if i and re.match(r"\w", text):
      parts[i] = rf"\ {text}"
  return "".join(parts)
