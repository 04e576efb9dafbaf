"""Labels of points that cover nothing else."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

_SIZE = 8
_LINE = {"arrowstyle": "-", "color": "#999999", "lw": 0.6, "shrinkB": 3}
# Offsets in points and alignment, in the order in which they are tried: close
# to the point first, then farther away with a line.
_NEAR = (
  (7, -3, "left"), (-7, -3, "right"), (0, 7, "center"), (0, -13, "center"),
)  # fmt: skip
_AROUND = tuple(
  (sign * away, step * side, "left" if sign > 0 else "right")
  for away in (12, 70, 130)
  for step, side, sign in itertools.product(range(9, 127, 9), (1, -1), (1, -1))
)


def label_points(axes: Any, labels: Sequence[tuple[float, float, str]]) -> None:
  """Writes labels next to their points, after everything else was drawn.

  Args:
    axes: The axes, with their final limits and scales.
    labels: The x, y and text of each point.
  """
  figure = axes.figure
  # Drawing lays the figure out, so that positions in pixels are final.
  figure.canvas.draw()
  renderer = figure.canvas.get_renderer()
  inside = axes.get_window_extent(renderer)
  points = [(x, y) for x, y, _ in labels]
  # Markers have a radius of about four points, and a point is 1/72 inch.
  half = 4 * figure.dpi / 72
  # Boxes in pixels, and how bad it is to cover them: a label is the worst.
  taken = [
    (x - half, y - half, x + half, y + half, 1)
    for x, y in axes.transData.transform(points)
  ]
  # Error bars, with their caps, must stay readable too.
  for bars in axes.collections:
    for bar in bars.get_paths():
      x0, y0, x1, y1 = bar.get_extents(bars.get_transform()).extents
      taken.append((x0 - half, y0, x1 + half, y1, 1))
  for line in axes.lines:
    ends = line.get_transform().transform(line.get_xydata())
    taken += itertools.chain.from_iterable(map(_along, ends, ends[1:]))

  def covered(boxes: Sequence[tuple[float, ...]]) -> float:
    """Returns how much boxes cover of the others or have outside, in pixels."""
    x0, y0, x1, y1 = np.array([box[:4] for box in boxes]).T
    others = np.array(taken)[:, :, None]
    wide = np.minimum(x1, others[:, 2]) - np.maximum(x0, others[:, 0])
    high = np.minimum(y1, others[:, 3]) - np.maximum(y0, others[:, 1])
    found = others[:, 4] * np.maximum(wide, 0) * np.maximum(high, 0)
    outside = np.maximum(inside.x0 - x0, 0) + np.maximum(x1 - inside.x1, 0)
    beyond = np.maximum(inside.y0 - y0, 0) + np.maximum(y1 - inside.y1, 0)
    # A text that leaves the axes is cut off, which is worse than an overlap.
    return float(found.sum() + 1e3 * (outside + beyond).sum())

  # Places depend on the points alone, and not on the order of the labels.
  for x, y, text in sorted(labels, key=lambda one: -one[1]):
    tried = []
    at = axes.transData.transform((x, y))
    for place in (*_NEAR, *_AROUND):
      note = _write(axes, (x, y), text, place, line=None)
      box = tuple(note.get_window_extent(renderer).extents)
      note.remove()
      x0, y0, x1, y1 = box
      # The line leads to the middle of the text, and ends at its box.
      line = [] if place in _NEAR else [
        dot for dot in _along(at, ((x0 + x1) / 2, (y0 + y1) / 2))
        if not (x0 < dot[0] < x1 and y0 < dot[1] < y1)
      ]  # fmt: skip
      # The line begins at its own point.
      tried.append((covered([box, *line[2:]]), place, [box, *line]))
      if not tried[-1][0]:
        break
    _, place, boxes = min(tried, key=lambda one: one[0])
    _write(axes, (x, y), text, place, None if place in _NEAR else _LINE)
    taken += [(*found[:4], 100) for found in boxes]


def _along(start: Any, end: Any) -> list[tuple[float, ...]]:
  """Returns small boxes, in pixels, that follow a line from start to end."""
  (x0, y0), (x1, y1) = start, end
  num = int(max(abs(x1 - x0), abs(y1 - y0)) / 4) + 1
  places = [(x0 + (x1 - x0) * i / num, y0 + (y1 - y0) * i / num)
            for i in range(num + 1)]  # fmt: skip
  return [(x - 1, y - 1, x + 1, y + 1, 1) for x, y in places]


def _write(
  axes: Any,
  at: tuple[float, float],
  text: str,
  place: tuple[int, int, str],
  line: dict[str, Any] | None,
) -> Any:
  right, up, side = place
  return axes.annotate(
    text, at, xytext=(right, up), textcoords="offset points", fontsize=_SIZE,
    ha=side, arrowprops=line, zorder=5,
    bbox={"fc": "white", "ec": "none", "alpha": 0.7, "pad": 0.5},
  )  # fmt: skip
