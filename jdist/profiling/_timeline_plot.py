"""Picture of forecasts, with kernels on the device, collectives on the link."""

import os
from collections.abc import Mapping
from typing import Any

from jdist import cluster, signatures, training
from jdist.profiling import _forecast

# The colours are distinct for most kinds of colour vision.
_COLOURS = {
  "product": "#0072b2",
  "other": "#a6cee3",
  "wait": "white",
  "hidden": "#009e73",
  "exposed": "#d55e00",
}
_LOOKS: dict[str, dict[str, Any]] = {
  "product": {"linewidth": 0},
  "other": {"linewidth": 0},
  "wait": {"edgecolor": "#d55e00", "hatch": "////", "linewidth": 0.5},
}
_LABELS = {
  "product": "products, convolutions",
  "other": "other kernels",
  "wait": "device waits",
  "hidden": "sending, hidden",
  "exposed": "sending, waited for",
}
# The lanes from top to bottom, at 0 and 1.
_ROWS = ("device", "link")


@signatures.checked
def plot_forecasts(
  forecasts: Mapping[str, _forecast.Forecast],
  path: str | os.PathLike[str],
  *,
  title: str = "",
  note: str = "",
) -> None:
  """Draws steps as timelines, one below the other on one axis of time.

  Each timeline has two lanes: the device with its kernels and waits, and the
  link with hidden and exposed messages.

  Args:
    forecasts: The forecasts by name, at least one.
    path: The path of the PNG.
    title: The title above all timelines.
    note: A note below them, for instance the assumed rates.

  Raises:
    ImportError: If matplotlib is not installed.
  """
  if not forecasts:
    raise ValueError("`forecasts` must have one entry at least, got none.")
  pyplot = training.pyplot()
  end_s = max(found.end_s for found in forecasts.values())
  scale, unit = cluster.time_unit(end_s)
  figure, axes = pyplot.subplots(
    len(forecasts), 1, figsize=(13, 1.3 + 1.75 * len(forecasts)),
    sharex=True, squeeze=False, layout="constrained",
  )  # fmt: skip
  end, handles = scale * end_s, {}
  try:
    for axis, (name, found) in zip(axes[:, 0], forecasts.items(), strict=True):
      for handle in cluster.draw_trace(
        found.trace, axis, rows=_ROWS, end_s=end_s, colours=_COLOURS,
        looks=_LOOKS, legend=False,
      ):  # fmt: skip
        handles[handle.get_label()] = handle
      _name_collectives(axis, found, scale, end)
      axis.axvline(
        scale * found.end_s, color="#333333", linewidth=0.8, linestyle=":"
      )
      axis.grid(axis="x", alpha=0.25, linewidth=0.6)
      axis.set_axisbelow(True)
      axis.set_xlabel("")
      axis.set_title(
        _summary(name, found, scale, unit), loc="left", fontsize=10
      )
    axes[-1, 0].set_xlim(-0.005 * end, 1.005 * end)
    axes[-1, 0].set_xlabel(f"time in the step, {unit}")
    figure.suptitle(title, fontsize=12)
    shown = [kind for kind in _LABELS if kind in handles]
    figure.legend(
      handles=[handles[kind] for kind in shown],
      labels=[_LABELS[kind] for kind in shown],
      loc="outside lower center", ncols=5, frameon=False, fontsize=9,
      title=note, title_fontsize=8.5,
    )  # fmt: skip
    figure.savefig(path, dpi=130)
  finally:
    pyplot.close(figure)


def _name_collectives(
  axis: Any, found: _forecast.Forecast, scale: float, end: float
) -> None:
  """Writes the bytes into a bar, or above it if there is room."""
  width, free_from = 0.045 * end, 0.0
  for sent in found.collectives:
    middle = scale * (sent.start_s + sent.end_s) / 2
    inside = scale * sent.send_s > width
    # A label above a short bar is left out if it would cover the previous one.
    if not inside and middle - width / 2 < free_from:
      continue
    free_from = middle + width / 2
    axis.text(
      middle, 1.0 if inside else 0.6,
      _megabytes(sent.wire_bytes),
      color="white" if inside else "#333333", fontsize=8, ha="center",
      va="center" if inside else "bottom",
    )  # fmt: skip


def _megabytes(num_bytes: float) -> str:
  """Formats megabytes with two digits."""
  # The format g would write a thousand as 1e+03.
  if num_bytes >= 99.5e6:
    return f"{num_bytes / 1e6:,.0f} MB"
  return f"{num_bytes / 1e6:.2g} MB"


def _summary(
  name: str, found: _forecast.Forecast, scale: float, unit: str
) -> str:
  number, traffic = len(found.collectives), "nothing sent"
  if number:
    traffic = (
      f"{_megabytes(found.wire_bytes)} sent in {number} "
      f"collective{'s' if number > 1 else ''}, "
      f"{100 * found.hidden_share:.1f} % hidden"
    )
  return f"{name}: {traffic}; takes {scale * found.end_s:.3g} {unit}"
