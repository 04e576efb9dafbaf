"""Traces: the times in which named resources were busy, and their picture."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jdist import checks, signatures

# Colours from Paul Tol's palettes, which colour-blind readers can tell apart.
_COLOURS = {
  "compute": "#4477aa", "push": "#ee6677", "pull": "#228833",
  "communicate": "#ee6677", "away": "#bbbbbb", "update": "#ccbb44",
  "forward": "#4477aa", "backward": "#66ccee", "weight": "#228833",
  "activation": "#ee6677", "gradient": "#aa3377",
}  # fmt: skip


class Span(NamedTuple):
  """A time in which a resource was busy.

  Attributes:
    resource: A machine, a stream of one, or a direction of a link.
    name: The name of the work.
    start_s: The time at which it began.
    end_s: The time at which it ended.
    kind: The kind of work, which gives a span its colour: `"compute"`,
      `"push"`, `"pull"` and others.
  """

  resource: str
  name: str
  start_s: float
  end_s: float
  kind: str = "compute"

  @property
  def seconds(self) -> float:
    """The duration in seconds."""
    return self.end_s - self.start_s


@signatures.explained
@dataclasses.dataclass
class Trace:
  """Spans on resources, in the order in which they were added.

  Attributes:
    spans: All spans.
    until_s: The time from which spans are dropped, so that the beginning of a
      long run is kept in little memory.

  >>> trace = Trace()
  >>> trace.add("gpu", "matmul", 0.0, 3.0)
  >>> trace.add("link", "all-reduce", 1.0, 4.0, "communicate")
  >>> trace.end_s, trace.utilisation()
  (4.0, {'gpu': 0.75, 'link': 0.75})
  """

  spans: list[Span] = dataclasses.field(default_factory=list)
  until_s: float = math.inf

  def __post_init__(self) -> None:
    self.spans = list(self.spans)
    checks.check_continuous("until_s", self.until_s)

  def add(
    self,
    resource: str,
    name: str,
    start_s: float,
    end_s: float,
    kind: str = "compute",
  ) -> None:
    """Adds a span; its end may be infinite, and is not before its start."""
    if not start_s <= end_s:
      times = f"{start_s!r} and {end_s!r}"
      raise ValueError(f"`end_s` must be at least `start_s`, got {times}.")
    if start_s < self.until_s:
      self.spans.append(Span(resource, name, start_s, end_s, kind))

  def cut(self, resource: str, end_s: float) -> None:
    """Ends the last span of a resource earlier, where work was interrupted.

    >>> trace = Trace()
    >>> trace.add("gpu", "matmul", 0.0, 3.0)
    >>> trace.cut("gpu", 1.0)
    >>> trace.end_s
    1.0
    """
    # From the end: the span is one of the last, however long the trace is.
    for i in range(len(self.spans) - 1, -1, -1):
      span = self.spans[i]
      if span.resource == resource:
        self.spans[i] = span._replace(end_s=min(span.end_s, end_s))
        return

  def __iter__(self) -> Iterator[Span]:
    return iter(self.spans)

  def __len__(self) -> int:
    return len(self.spans)

  @property
  def resources(self) -> tuple[str, ...]:
    """The resources, in the order of their first spans."""
    return tuple(dict.fromkeys(span.resource for span in self.spans))

  @property
  def end_s(self) -> float:
    """The end of the last span."""
    return max((span.end_s for span in self.spans), default=0.0)

  def utilisation(self) -> dict[str, float]:
    """Returns the fraction of time in which each resource was busy.

    Overlapping spans of one resource count once.
    """
    whole = self.end_s
    by_resource: dict[str, list[Span]] = {}
    for span in self.spans:
      by_resource.setdefault(span.resource, []).append(span)
    return {
      name: union_s(spans) / whole if whole else 0.0
      for name, spans in by_resource.items()
    }

  def save_perfetto(self, path: str | pathlib.Path) -> None:
    """Writes a file of trace events for https://ui.perfetto.dev."""
    checks.check_number("end_s", self.end_s)  # JSON has no infinity.
    # Chrome's format knows processes and threads: each resource is a thread of
    # process 0, a span is a complete event "X", and times are in microseconds.
    numbers = {name: i for i, name in enumerate(self.resources)}
    events: list[dict[str, object]] = [
      {
        "name": "thread_name",
        "ph": "M",
        "pid": 0,
        "tid": i,
        "args": {"name": x},
      }
      for x, i in numbers.items()
    ]
    events += [
      {
        "name": span.name, "cat": span.kind, "ph": "X", "pid": 0,
        "tid": numbers[span.resource], "ts": 1e6 * span.start_s,
        "dur": 1e6 * span.seconds,
      }
      for span in self.spans
    ]  # fmt: skip
    pathlib.Path(path).write_text(json.dumps({"traceEvents": events}))


def union_s(spans: Iterable[Span]) -> float:
  """Returns the seconds that at least one span covers.

  >>> union_s([Span("a", "x", 0, 2), Span("a", "y", 1, 3)])
  3.0
  """
  total, until = 0.0, float("-inf")
  for span in sorted(spans, key=lambda span: span.start_s):
    if span.end_s > until:
      total += span.end_s - max(span.start_s, until)
      until = span.end_s
  return total


@signatures.checked
def plot_trace(
  trace: Trace,
  path: str | pathlib.Path,
  *,
  title: str = "",
  resources: Sequence[str] | None = None,
  end_s: float | None = None,
) -> pathlib.Path:
  """Draws a Gantt chart and writes it to a file.

  Args:
    trace: The spans to draw.
    path: The picture to write; its suffix is the format.
    title: A title above the picture.
    resources: The rows from top to bottom; all, in the order of their first
      spans, if None.
    end_s: The end of the time axis; the end of the last span if None.
  """
  # The figure class, and not pyplot, which would keep every figure alive.
  import matplotlib.figure
  import matplotlib.patches

  rows = list(trace.resources if resources is None else resources)
  if not rows:
    raise ValueError("`trace` must have a span at least, got none.")
  figure = matplotlib.figure.Figure(
    figsize=(11, 1.2 + 0.32 * len(rows)), layout="constrained"
  )
  axes = figure.subplots()
  end = checks.check_number("end_s", trace.end_s if end_s is None else end_s)
  scale, unit = _time_unit(end)
  more = iter(("#66ccee", "#aa3377", "#999933", "#882255") * len(trace))
  of_kind: dict[str, dict[int, list[tuple[float, float]]]] = {}
  places = {name: i for i, name in enumerate(rows)}
  for span in trace:
    if span.resource in places and span.start_s < end:
      bars = of_kind.setdefault(span.kind, {})
      bars.setdefault(places[span.resource], []).append(
        (scale * span.start_s, scale * span.seconds)
      )
  handles = []
  for kind, bars in of_kind.items():
    look: dict[str, Any] = {
      "facecolor": _COLOURS.get(kind) or next(more),
      "edgecolor": "white",
      "linewidth": 0.3,
    }
    handles.append(matplotlib.patches.Patch(label=kind, **look))
    for place, spans in bars.items():
      axes.broken_barh(spans, (place - 0.38, 0.76), **look)
  axes.set_yticks(range(len(rows)), rows)
  # The first row is on top, as in a table.
  axes.set_ylim(len(rows) - 0.5, -0.5)
  axes.set_xlim(0, scale * end)
  axes.set_xlabel(f"time, {unit}")
  axes.spines[["top", "right", "left"]].set_visible(False)
  axes.tick_params(axis="y", length=0)
  axes.legend(
    handles=handles, loc="lower right", bbox_to_anchor=(1, 1),
    ncols=min(len(handles), 9) or 1, frameon=False,
  )  # fmt: skip
  if title:
    figure.suptitle(title, x=0.01, ha="left")
  path = pathlib.Path(path)
  known = tuple(figure.canvas.get_supported_filetypes())
  checks.check_choice("path's suffix", path.suffix[1:].lower() or "png", known)
  figure.savefig(path, dpi=150)
  return path


def _time_unit(seconds: float) -> tuple[float, str]:
  """Returns a factor and a unit in which a time has one to four digits.

  >>> _time_unit(0.02)
  (1000.0, 'ms')
  """
  for factor, unit in ((1.0, "s"), (1e3, "ms")):
    if seconds * factor >= 1:
      return factor, unit
  return 1e6, "µs"
