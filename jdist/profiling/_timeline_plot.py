"""A picture of forecasts: kernels on the device, collectives on the link."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from jdist import training
from jdist.profiling import _forecast

# Distinct for most kinds of colour vision.
_PRODUCT, _OTHER = "#0072b2", "#a6cee3"
_HIDDEN, _EXPOSED = "#009e73", "#d55e00"
_DEVICE, _LINK = 1.0, 0.0  # The heights of the lanes.
_HEIGHT = 0.62


def plot_forecasts(
  forecasts: Mapping[str, _forecast.Forecast],
  path: str | os.PathLike[str],
  *,
  title: str = "",
  note: str = "",
) -> None:
  """Draws steps as timelines, one below the other on one axis of time.

  Each has two lanes: the device with its kernels and waits, and the link with
  what it sends, hidden or exposed.

  Args:
    forecasts: by name.
    path: of the PNG.
    title: above all.
    note: below all, for instance the stated rates.

  Raises:
    ImportError: when matplotlib is missing.
    ValueError: when there is nothing to draw.
  """
  if not forecasts:
    raise ValueError("`forecasts` must have one entry at least, got none.")
  pyplot = training.pyplot()
  from matplotlib import patches

  scale, unit = _unit(max(f.end_s for f in forecasts.values()))
  figure, axes = pyplot.subplots(
    len(forecasts), 1, figsize=(13, 1.3 + 1.75 * len(forecasts)),
    sharex=True, squeeze=False, layout="constrained",
  )  # fmt: skip
  end = scale * max(f.end_s for f in forecasts.values())
  try:
    for axis, (name, found) in zip(axes[:, 0], forecasts.items(), strict=True):
      _draw(axis, found, scale, end)
      axis.set_title(
        _summary(name, found, scale, unit), loc="left", fontsize=10
      )
    axes[-1, 0].set_xlim(-0.005 * end, 1.005 * end)
    axes[-1, 0].set_xlabel(f"time in the step, {unit}")
    figure.suptitle(title, fontsize=12)
    figure.legend(
      handles=[
        patches.Patch(color=_PRODUCT, label="products, convolutions"),
        patches.Patch(color=_OTHER, label="other kernels"),
        patches.Patch(
          facecolor="white", edgecolor=_EXPOSED, hatch="////",
          label="device waits",
        ),
        patches.Patch(color=_HIDDEN, label="sending, hidden"),
        patches.Patch(color=_EXPOSED, label="sending, waited for"),
      ],
      loc="outside lower center", ncols=5, frameon=False, fontsize=9,
      title=note, title_fontsize=8.5,
    )  # fmt: skip
    figure.savefig(path, dpi=130)
  finally:
    pyplot.close(figure)


def _draw(
  axis: Any, found: _forecast.Forecast, scale: float, end: float
) -> None:
  def bars(
    lane: float, spans: Iterable[tuple[float, float]], **look: Any
  ) -> None:
    axis.broken_barh(
      [(scale * a, scale * (b - a)) for a, b in spans],
      (lane - _HEIGHT / 2, _HEIGHT),
      **look,
    )

  for is_product, color in ((False, _OTHER), (True, _PRODUCT)):
    spans = [
      (kernel.start_s, kernel.end_s)
      for kernel in found.kernels
      if (kernel.flops > 0) == is_product
    ]
    bars(_DEVICE, _joined(spans), facecolors=color)
  waits = [
    (sent.end_s - sent.exposed_s, sent.end_s)
    for sent in found.collectives
    if sent.exposed_s
  ]
  bars(
    _DEVICE, waits, facecolors="white", edgecolors=_EXPOSED, hatch="////",
    linewidth=0.5,
  )  # fmt: skip
  # The device waited for those before a collective in the queue, too.
  cuts = [
    max(sent.start_s, sent.end_s - sent.exposed_s) for sent in found.collectives
  ]
  pairs = list(zip(found.collectives, cuts, strict=True))
  look = {"edgecolors": "white", "linewidth": 0.4}
  bars(_LINK, [(m.start_s, c) for m, c in pairs], facecolors=_HIDDEN, **look)
  bars(_LINK, [(c, m.end_s) for m, c in pairs], facecolors=_EXPOSED, **look)
  _name_collectives(axis, found, scale, end)
  axis.axvline(
    scale * found.end_s, color="#333333", linewidth=0.8, linestyle=":"
  )
  axis.set_yticks([_LINK, _DEVICE], ["link", "device"])
  axis.set_ylim(_LINK - 0.5, _DEVICE + 0.5)
  axis.tick_params(axis="y", length=0)
  axis.spines[["top", "right", "left"]].set_visible(False)
  axis.grid(axis="x", alpha=0.25, linewidth=0.6)
  axis.set_axisbelow(True)


def _name_collectives(
  axis: Any, found: _forecast.Forecast, scale: float, end: float
) -> None:
  """Writes the bytes in a bar, or above it where there is room."""
  width, free_from = 0.045 * end, 0.0
  for sent in found.collectives:
    middle = scale * (sent.start_s + sent.end_s) / 2
    inside = scale * sent.send_s > width
    if not inside and middle - width / 2 < free_from:
      continue
    free_from = middle + width / 2
    axis.text(
      middle, _LINK if inside else _LINK + _HEIGHT / 2 + 0.03,
      _megabytes(sent.wire_bytes),
      color="white" if inside else "#333333", fontsize=8, ha="center",
      va="center" if inside else "bottom",
    )  # fmt: skip


def _megabytes(num_bytes: float) -> str:
  """Writes megabytes, never as 1e+03 MB."""
  if num_bytes >= 99.5e6:
    return f"{num_bytes / 1e6:,.0f} MB"
  return f"{num_bytes / 1e6:.2g} MB"


def _joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
  """Merges neighbours: a thousand seams would make a bar look pale."""
  joined: list[tuple[float, float]] = []
  for start, end in spans:
    if joined and start == joined[-1][1]:
      joined[-1] = (joined[-1][0], end)
    else:
      joined.append((start, end))
  return joined


def _summary(
  name: str, found: _forecast.Forecast, scale: float, unit: str
) -> str:
  number = len(found.collectives)
  if not number:
    traffic = "nothing sent"
  else:
    traffic = (
      f"{_megabytes(found.wire_bytes)} sent in {number} "
      f"collective{'s' if number > 1 else ''}, "
      f"{100 * found.hidden_share:.1f} % hidden"
    )
  return f"{name}: {traffic}; takes {scale * found.end_s:.3g} {unit}"


def _unit(end_s: float) -> tuple[float, str]:
  if end_s >= 1:
    return 1.0, "s"
  return (1e3, "ms") if end_s >= 1e-3 else (1e6, "µs")
