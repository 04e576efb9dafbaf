"""What codecs tell of the reductions in a traced step."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, TypeAlias

from jdist import collectives
from jdist.reducers import _reducer

PyTree: TypeAlias = Any

_OPEN: contextvars.ContextVar[list[_reducer.Bits] | None] = (
  contextvars.ContextVar("reductions", default=None)
)


@contextlib.contextmanager
def reductions() -> Iterator[list[_reducer.Bits]]:
  """Collects what reducers tell of every reduction that is traced inside.

  Returns:
    A list that is filled while something is traced: one entry for each
    reduction in the program, also for one that stands in a conditional.

  >>> import jax
  >>> with reductions() as found:
  ...   note(_reducer.Exact(), jax.ShapeDtypeStruct((25,), "float32"), None)
  >>> found
  [Bits(payload=800, sent=0.0, received=0.0)]
  """
  found: list[_reducer.Bits] = []
  token = _OPEN.set(found)
  try:
    yield found
  finally:
    _OPEN.reset(token)


def note(
  reducer: _reducer.Reducer, like: PyTree, axis: collectives.Axis
) -> None:
  """Tells an open `reductions` of one; for who calls a reducer."""
  found = _OPEN.get()
  if found is not None:
    found.append(reducer.num_bits(like, reducer.told_workers(axis)))
