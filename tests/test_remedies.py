"""Errors say how to do better: argument, rule and value, and then a remedy.

Tables of refusals pin the rule alone, so a remedy could be lost unseen.
"""

import ast
import collections
import pathlib
import re

import jdist

_PACKAGE = pathlib.Path(jdist.__file__).parent
# Errors of one sentence in these rooms, whose rule says already what to do. A
# new one has a remedy, or is counted here deliberately.
_ONE_SENTENCE = {
  "channel": 1, "cluster": 20, "codecs": 1, "collectives": 11, "reducers": 5,
  "server": 23, "storage": 2,
}  # fmt: skip


def _text(node):
  """Returns the text of an expression, with {} for what is put in."""
  if isinstance(node, ast.Constant):
    return str(node.value)
  if isinstance(node, ast.JoinedStr):
    return "".join(
      str(x.value) if isinstance(x, ast.Constant) else "{}" for x in node.values
    )
  if isinstance(node, ast.BinOp):
    return _text(node.left) + _text(node.right)
  return "{}. {}"  # A message that is made elsewhere.


def _sentences(source):
  """Yields the number of sentences of each ValueError."""
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "ValueError":
      yield len(re.findall(r"[.:;] (?=\S)", _text(node.args[0]))) + 1


def test_sentences_are_counted():
  assert list(
    _sentences(
      "raise ValueError('`a` must be 1.')\n"
      "raise ValueError(f'`a` must be 1, got {a:.3g}. Take 1.')\n"
      "raise ValueError(text)\n"
    )
  ) == [1, 2, 2]


def test_no_remedy_is_lost():
  found = collections.Counter()
  for room in _ONE_SENTENCE:
    for path in (_PACKAGE / room).rglob("*.py"):
      found[room] += sum(x == 1 for x in _sentences(path.read_text()))
  assert found <= collections.Counter(_ONE_SENTENCE)
