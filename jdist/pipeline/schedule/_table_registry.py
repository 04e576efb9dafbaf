"""Tables by name, as the command line and experiments ask for them."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from jdist import checks
from jdist.pipeline.schedule import _asynchronous_tables as _async
from jdist.pipeline.schedule import _flush_tables
from jdist.pipeline.schedule._table import Table


@dataclasses.dataclass(frozen=True)
class TableEntry:
  """A table and where it comes from.

  Attributes:
    name: on the command line.
    factory: takes stages and micro-batches and returns the table.
    meaning: in one line.
    paper: its source.
    asynchronous: whether iterations overlap.
  """

  name: str
  factory: Callable[..., Table]
  meaning: str
  paper: str
  asynchronous: bool = False


_ENTRIES = (
  TableEntry(
    "naive",
    _flush_tables.naive,
    "one device at a time",
    "model parallelism without a pipeline",
  ),
  TableEntry(
    "gpipe",
    _flush_tables.gpipe,
    "all forward passes, then all backward passes",
    "Huang et al., arXiv 1811.06965",
  ),
  TableEntry(
    "1f1b",
    _flush_tables.one_f_one_b,
    "forward and backward passes in turn",
    "Narayanan et al., arXiv 2006.09503",
  ),
  TableEntry(
    "eager_1f1b",
    _flush_tables.eager_one_f_one_b,
    "1f1b further ahead, which late sends and slow links need",
    "Zhuang et al., arXiv 2211.05322",
  ),
  TableEntry(
    "interleaved",
    _flush_tables.interleaved,
    "1f1b with several stages on each device",
    "Narayanan et al., arXiv 2104.04473",
  ),
  TableEntry(
    "zb_h1",
    _flush_tables.zb_h1,
    "gradients of the parameters fill the bubble",
    "Qi et al., arXiv 2401.10241",
  ),
  TableEntry(
    "pipedream",
    _async.pipedream,
    "an update after each micro-batch, weights stashed",
    "Narayanan et al., arXiv 1806.03377",
    asynchronous=True,
  ),
  TableEntry(
    "2bw",
    _async.two_bw,
    "no flush, two versions of the weights",
    "Narayanan et al., arXiv 2006.09503",
    asynchronous=True,
  ),
  TableEntry(
    "paci",
    _async.paci,
    "no flush, the newest weights in each pass",
    "PACI, arXiv 2606.07881",
    asynchronous=True,
  ),
  TableEntry(
    "ours",
    _async.ours,
    "no flush, a window of iterations",
    "adaptive task scheduling for model parallelism (reconstruction)",
    asynchronous=True,
  ),
)
TABLES = {entry.name: entry for entry in _ENTRIES}


def make_table(
  name: str, num_stages: int, num_microbatches: int, **options: Any
) -> Table:
  """Makes a table for equal stages and free links by its name.

  Args:
    name: one of `TABLES`.
    num_stages: a device each, but for `"interleaved"`, where it is the number
      of devices.
    num_microbatches: of an iteration.
    **options: of the table, such as `num_iterations`, `window` or
      `num_chunks`; see its factory.

  Raises:
    ValueError: when there is no such table, or it has no such option.
  """
  checks.check_choice("name", name, tuple(TABLES))
  factory = TABLES[name].factory
  known = table_options(name)
  unknown = [x for x in options if x not in known]
  if unknown:
    raise ValueError(
      f"`{unknown[0]}` is no option of {name}, which has {', '.join(known)}."
    )
  return factory(num_stages, num_microbatches, **options)


def table_options(name: str) -> tuple[str, ...]:
  """Returns the names of a table's options."""
  parameters = inspect.signature(TABLES[name].factory).parameters.values()
  return tuple(x.name for x in parameters if x.kind == x.KEYWORD_ONLY)
