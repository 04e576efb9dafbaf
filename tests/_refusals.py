"""Tables of refusals: an argument, what gives it, and the words of its rule.

Pinned is what a reader needs, the argument in backticks and its rule after it,
and not the sentence around them.
"""

import contextlib

import pytest


def table(*rows):
  """Parametrizes a test by `argument`, `call` and `rule`."""
  return pytest.mark.parametrize(
    ("argument", "call", "rule"),
    [pytest.param(*row, id=f"{row[0]}: {row[2]}") for row in rows],
  )


@contextlib.contextmanager
def refused(argument, rule, error=ValueError):
  """Asserts that what is called within is refused."""
  with pytest.raises(error) as info:
    yield info
  told = " ".join(str(info.value).split())
  _, named, rest = told.partition(f"`{argument}`")
  assert named, f"`{argument}` is not named: {told}"
  assert rule in rest, f"{rule!r} is not said of `{argument}`: {told}"


def check(argument, call, rule, error=ValueError):
  """Asserts that the call is refused, and returns what is said."""
  with refused(argument, rule, error) as info:
    call()
  return " ".join(str(info.value).split())
