"""Pictures: a comparison's quality over bytes, rounds and time."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jdist import cluster, signatures
from jdist.training import _pyplot
from jdist.training.comparison import _rows


@contextlib.contextmanager
def picture(
  path: str | os.PathLike[str],
  rows: int = 1,
  columns: int = 1,
  *,
  title: str = "",
  legend: int = 0,
  grid: dict[str, Any] | None = None,
  dpi: int = 130,
  **options: Any,
) -> Iterator[Any]:
  """Gives a grid of axes to draw on, and writes it as a PNG afterwards.

  Args:
    path: The path of the PNG.
    rows: The number of rows of axes.
    columns: The number of columns of axes.
    title: The title above all axes.
    legend: The number of columns of a legend below all axes, which names what
      the first axes show; 0 for none.
    grid: Options of the grid lines; no lines if empty.
    dpi: The resolution of the PNG, in dots per inch.
    **options: Further arguments of `matplotlib.pyplot.subplots`.

  Raises:
    ImportError: If matplotlib is not installed.
  """
  pyplot = _pyplot.pyplot()
  figure, found = pyplot.subplots(
    rows, columns, squeeze=False, layout="constrained", **options
  )
  try:
    # Styled before anything is drawn, so that a drawing may change the style.
    for axes in found.flat:
      if grid != {}:
        axes.grid(**({"alpha": 0.3, "lw": 0.5} | (grid or {})))
      axes.spines[["top", "right"]].set_visible(False)
    yield found
    if legend:
      handles, labels = found.flat[0].get_legend_handles_labels()
      figure.legend(
        handles, labels, loc="outside lower center", ncols=legend,
        frameon=False, fontsize=9,
      )  # fmt: skip
    if title:
      figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=dpi)
  finally:
    pyplot.close(figure)


# The colours are distinct for most kinds of colour vision, and dark on white.
_COLORS = (
  "#333333", "#0072b2", "#d55e00", "#009e73",
  "#cc79a7", "#e69f00", "#56b4e9", "#8c564b",
)  # fmt: skip
_MARKERS = "osD^vP*X"


@signatures.checked
def plot_comparison(
  rows: Sequence[dict[str, Any]],
  path: str | os.PathLike[str],
  link: cluster.Link,
) -> None:
  """Draws test accuracy over bytes, rounds and modelled time.

  For texts it draws bits per byte. A line is the mean over seeds, its band the
  standard deviation, and its marker the end of the run.

  Args:
    rows: The rows of one comparison, with `method`, `seed`, `workers` and
      `curve`.
    path: The path of the PNG.
    link: The link between the machines. The modelled time is the measured time
      of training plus that of a ring's messages, with nothing overlapped.

  Raises:
    ImportError: If matplotlib is not installed.
  """
  if not rows:
    raise ValueError("`rows` must be one at least, got none.")
  for row in rows:
    for name in ("workers", "method", "curve", "config"):
      _rows.entry(row, name)
  num_workers = rows[0]["workers"]
  messages = cluster.ring_messages(num_workers)
  methods = list(dict.fromkeys(row["method"] for row in rows))

  def modelled_s(point: dict[str, Any]) -> float:
    sending = link.send_s(point["sent_bytes"], point["rounds"] * messages)
    return point["train_s"] + sending

  mbit = link.bandwidth_bits_per_s / 1e6
  panels: list[tuple[str, Callable[[dict[str, Any]], float]]] = [
    (
      f"MB sent by each worker (N = {num_workers})",
      lambda point: point["sent_bytes"] / 1e6,
    ),
    ("rounds of communication", lambda point: point["rounds"]),
    (
      f"seconds: computing as measured, sending at {mbit:g} Mbit/s\n"
      f"and {1e3 * link.latency_s:g} ms, nothing overlapped",
      modelled_s,
    ),
  ]
  config = rows[0]["config"]
  seeds = len({row["seed"] for row in rows})
  title = (
    f"{config['dataset']}, {config['model']}, {num_workers} workers, "
    f"{rows[0]['steps']} steps of {config['batch_size']} samples: "
    f"mean and standard deviation of {seeds} seeds"
  )
  with picture(
    path, 1, len(panels), title=title, legend=len(methods),
    grid={"alpha": 0.25, "lw": 0.6}, figsize=(13, 4.6), sharey=True,
  ) as (grid,):  # fmt: skip
    for axes, (label, measure) in zip(grid, panels, strict=True):
      for style, method in enumerate(methods):
        runs = [row["curve"] for row in rows if row["method"] == method]
        _draw(axes, runs, measure, method, style)
      _number_axis(axes)
      axes.set_xlabel(label)
    text = "bits_per_token" in rows[0]
    grid[0].set_ylabel("test bits per byte" if text else "test accuracy, %")
    grid[0].set_ylim(*_limits(rows))


def _draw(
  axes: Any,
  runs: list[list[dict[str, Any]]],
  measure: Callable[[dict[str, Any]], float],
  method: str,
  style: int,
) -> None:
  x = np.mean([[measure(point) for point in run] for run in runs], axis=0)
  y = np.array([[_quality(point) for point in run] for run in runs])
  # A single seed has a deviation of 0; with ddof=1 it would be NaN.
  mean, spread = y.mean(axis=0), y.std(axis=0, ddof=min(1, len(runs) - 1))
  color = _COLORS[style % len(_COLORS)]
  # A single marker at the end distinguishes lines in print, and in the legend.
  axes.plot(
    x, mean, color=color, linewidth=1.6, label=method,
    marker=_MARKERS[style % len(_MARKERS)], markevery=[-1], markersize=7,
  )  # fmt: skip
  axes.fill_between(
    x, mean - spread, mean + spread, color=color, alpha=0.15, linewidth=0
  )


def _number_axis(axes: Any) -> None:
  """Makes an axis logarithmic, with numbers like 0.5 instead of powers."""
  from matplotlib import ticker

  low, high = axes.dataLim.intervalx
  # One worker sends nothing, and zero has no logarithm.
  if not 0 < low < high:
    return
  axes.set_xscale("log")
  # On a wide axis labels at 2 and 5 would overlap.
  wide = high / low > 200
  axes.xaxis.set_major_locator(
    ticker.LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0), numticks=20)
  )
  axes.xaxis.set_major_formatter(lambda value, _: _plain(value))
  axes.xaxis.set_minor_formatter(ticker.NullFormatter())


def _plain(value: float) -> str:
  return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def _quality(point: dict[str, Any]) -> float:
  if "bits_per_token" in point:
    bits = point["bits_per_token"]
    # A diverged run has null.
    return math.nan if bits is None else float(bits)
  return 100 * float(point["accuracy"])


def _limits(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
  """Returns limits around the ends of the runs, without their beginnings."""
  # The first evaluations are near chance, and would take most of the picture.
  ends = [x for x in map(_quality, rows) if math.isfinite(x)] or [0.0]
  if "bits_per_token" in rows[0]:
    span = max(max(ends) - min(ends), 0.1)
    return max(0.0, min(ends) - span), min(8.0, max(ends) + 4 * span)
  span = max(max(ends) - min(ends), 2.0)
  low = max(0.0, min(ends) - 4 * span)
  return low, min(100.0, max(ends) + span)
