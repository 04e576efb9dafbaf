"""Comments and sentences of the library's prose."""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator

from house import _sources

# A sentence ends with a mark before a capital letter; what an entry of a list
# of arguments says begins after its colon.
_SENTENCE = re.compile(r"(?<=[.!?:])\s+(?=[A-Z])|(?<=:)\s+(?=of\b)")
_OF = re.compile(r"([-*] )?[Oo]f\b")


@functools.cache
def count_lines(source: _sources.Source) -> tuple[int, int]:
  """Returns the lines of comments and of code; docstrings count as neither."""
  comments, code = set(), set()
  skipped = {
    tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
  }  # fmt: skip
  docstrings = _docstring_lines(source.tree)
  for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
    lines = range(token.start[0], token.end[0] + 1)
    if token.type == tokenize.COMMENT:
      # Directives for a linter or a formatter explain nothing.
      if not re.match(r"#\s*(noqa|type:|fmt:|pragma)", token.string):
        comments.add(token.start[0])
    elif token.type not in skipped:
      code.update(lines)
  return len(comments), len(code - docstrings)


def _docstring_lines(tree: ast.Module) -> set[int]:
  found: set[int] = set()
  kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
  for node in _sources.nodes(tree):
    if isinstance(node, kinds) and node.body:
      # In a class each string below an attribute is its docstring, as well.
      strings = node.body if isinstance(node, ast.ClassDef) else node.body[:1]
      for one in strings:
        if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant):
          found.update(range(one.lineno, (one.end_lineno or 0) + 1))
  return found


def sentences(source: _sources.Source) -> Iterator[str]:
  """Yields the sentences of a file's docstrings and comments."""
  texts = [text for _, text in _sources.docstrings(source)]
  texts += _comment_blocks(source)
  for text in texts:
    for paragraph in re.split(r"\n\s*\n", text):
      yield from _SENTENCE.split(" ".join(paragraph.split()))


def _comment_blocks(source: _sources.Source) -> list[str]:
  """Returns the comments, those of following lines as one text."""
  blocks: list[str] = []
  last = -1
  for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
    if token.type != tokenize.COMMENT:
      continue
    text = token.string.lstrip("# ")
    if token.start[0] == last + 1 and blocks:
      blocks[-1] += " " + text
    else:
      blocks.append(text)
    last = token.start[0]
  return blocks


def opens_with_of(sentence: str) -> bool:
  """Returns whether a sentence opens with "Of", which hides its subject."""
  return bool(_OF.match(sentence))
