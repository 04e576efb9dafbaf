"""The tables that the command line and experiments ask for by name."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from jdist import checks
from jdist.pipeline.schedule import _asynchronous_tables as _async
from jdist.pipeline.schedule import _flush_tables, _table
from jdist.pipeline.schedule._table import Table


@dataclasses.dataclass(frozen=True)
class TableEntry:
  """A table that has a name.

  Attributes:
    factory: Takes the numbers of stages and micro-batches, and options as
      keywords, and returns the table.
    meaning: The table in one line, for the help of the command line.
    asynchronous: Whether iterations overlap.
  """

  factory: Callable[..., Table]
  meaning: str
  asynchronous: bool = False


# Flush tables with a stage on each device differ by a device's order only.
def _flush(
  name: str, order: Callable[..., _flush_tables.Order], meaning: str
) -> TableEntry:
  factory = functools.partial(_flush_tables.flushed, name, order, 1)
  return TableEntry(factory, meaning)


_overlapping = functools.partial(TableEntry, asynchronous=True)
TABLES = {  # Every table by its name.
  "naive": _flush("naive", _flush_tables.naive, "one device at a time"),
  "gpipe": _flush(
    "gpipe", _flush_tables.gpipe, "all forward passes, then all backward passes"
  ),
  "1f1b": _flush(
    "1f1b", _flush_tables.one_f_one_b, "forward and backward passes in turn"
  ),
  "eager_1f1b": _flush(
    "eager_1f1b",
    _flush_tables.eager_one_f_one_b,
    "1f1b further ahead, which late sends and slow links need",
  ),
  "interleaved": TableEntry(
    _flush_tables.interleaved, "1f1b with several stages on each device"
  ),
  "zb_h1": _flush(
    "zb_h1", _flush_tables.zb_h1, "gradients of the parameters fill the bubble"
  ),
  "zb_h2": _overlapping(
    _async.zb_h2, "no flush and no gradient late: zb_h1 in twice the memory"
  ),
  "zb_v": _overlapping(
    _async.zb_v, "zb_h2 with two stages on each device, in 1f1b's memory"
  ),
  "pipedream": _overlapping(
    _async.pipedream, "an update after each micro-batch, weights stashed"
  ),
  "2bw": _overlapping(_async.two_bw, "no flush, two versions of the weights"),
  "paci": _overlapping(
    _async.paci, "no flush, the newest weights in each pass"
  ),
  "ours": _overlapping(_async.ours, "no flush, a window of iterations"),
}


def make_table(
  name: str, num_stages: int, num_microbatches: int, **options: Any
) -> Table:
  """Makes a table for equal stages and free links by its name.

  Args:
    name: One of `TABLES`.
    num_stages: The number of stages, one on each device; for `"interleaved"`
      and `"zb_v"` the number of devices.
    num_microbatches: The number of micro-batches in an iteration.
    **options: Options of the table, such as `num_iterations`, `window` or
      `num_chunks`; see `table_options`.
  """
  checks.check_choice("name", name, tuple(TABLES))
  known = table_options(name)
  unknown = [x for x in options if x not in known]
  if unknown:
    raise ValueError(
      f"`{unknown[0]}` is no option of {name}, which has {', '.join(known)}."
    )
  chunks = checks.check_int("num_chunks", options.get("num_chunks", 1), 1)
  checks.check_int("num_stages", num_stages, 1)
  _table.check_passes(
    num_stages * chunks, num_microbatches, options.get("num_iterations", 1)
  )
  return TABLES[name].factory(num_stages, num_microbatches, **options)


def table_options(name: str) -> tuple[str, ...]:
  """Returns the names of a table's options."""
  checks.check_choice("name", name, tuple(TABLES))
  # By convention a factory's keyword-only parameters are its options.
  parameters = inspect.signature(TABLES[name].factory).parameters.values()
  return tuple(x.name for x in parameters if x.kind == x.KEYWORD_ONLY)
