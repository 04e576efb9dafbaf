"""Parameters of tests: a few in the default set, all in the slow one."""

import itertools

import pytest


def thinned(*axes, rounds=1):
  """Returns the product of axes, most of it marked slow.

  In the default set each value of each axis occurs: the first of all of them,
  the second of all of them, and so on, shorter axes again from their start and
  each shifted by its own round; with more `rounds` that goes on.  What is left
  out runs by `./scripts/test.sh -m slow`.
  """
  longest = max(map(len, axes))
  kept = {
    tuple(
      (i + k * (i // len(axis))) % len(axis) for k, axis in enumerate(axes, 1)
    )
    for i in range(rounds * longest)
  }
  found = []
  for places in itertools.product(*(range(len(axis)) for axis in axes)):
    values = [axis[i] for axis, i in zip(axes, places, strict=True)]
    marks = () if places in kept else pytest.mark.slow
    found.append(pytest.param(*values, marks=marks))
  return found


def some(values, kept, smoke=()):
  """Returns values as parameters, those that are not in `kept` marked slow.

  A value of several arguments is a tuple of them.  Those of `smoke` are kept,
  and in that set, too.
  """

  def marks(value):
    if value in smoke:
      return pytest.mark.smoke
    return () if value in kept else pytest.mark.slow

  missing = [x for x in (*kept, *smoke) if x not in values]
  assert not missing, missing
  return [
    pytest.param(
      *(x if isinstance(x, tuple) else (x,)),
      marks=marks(x),
    )
    for x in values
  ]
