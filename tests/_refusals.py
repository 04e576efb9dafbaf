"""Tables of refusals: an argument, what gives it, and the words of its rule.

Pinned is what a reader needs, the argument in backticks and its rule after it,
and not the sentence around them.
"""

import pytest


def table(*rows):
  """Parametrizes a test by `argument`, `call` and `rule`."""
  return pytest.mark.parametrize(
    ("argument", "call", "rule"),
    [pytest.param(*row, id=f"{row[0]}: {row[2]}") for row in rows],
  )


def check(argument, call, rule, error=ValueError):
  """Asserts that the call is refused, and returns what is said."""
  with pytest.raises(error) as info:
    call()
  told = " ".join(str(info.value).split())
  _, named, rest = told.partition(f"`{argument}`")
  assert named, f"`{argument}` is not named: {told}"
  assert rule in rest, f"{rule!r} is not said of `{argument}`: {told}"
  return told
