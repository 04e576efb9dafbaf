"""Labels of points that cover nothing else."""

import itertools
from collections.abc import Sequence
from typing import Any

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
  taken = [
    (x - half, y - half, x + half, y + half)
    for x, y in axes.transData.transform(points)
  ]
  # Error bars, with their caps, must stay readable too.
  for bars in axes.collections:
    for bar in bars.get_paths():
      x0, y0, x1, y1 = bar.get_extents(bars.get_transform()).extents
      taken.append((x0 - half, y0, x1 + half, y1))

  def covered(box: tuple[float, ...]) -> float:
    """Returns how much a box covers of the others or has outside, in pixels."""
    found = sum(
      max(0.0, min(box[2], other[2]) - max(box[0], other[0]))
      * max(0.0, min(box[3], other[3]) - max(box[1], other[1]))
      for other in taken
    )
    outside = max(0.0, inside.x0 - box[0]) + max(0.0, box[2] - inside.x1)
    beyond = max(0.0, inside.y0 - box[1]) + max(0.0, box[3] - inside.y1)
    # A text that leaves the axes is cut off, which is worse than an overlap.
    return found + 1e3 * (outside + beyond)

  # Places depend on the points alone, and not on the order of the labels.
  for x, y, text in sorted(labels, key=lambda one: -one[1]):
    tried = []
    for place in (*_NEAR, *_AROUND):
      # The line of a label may cross other things, so it is left out here.
      note = _write(axes, (x, y), text, place, line=None)
      box = note.get_window_extent(renderer).extents
      note.remove()
      tried.append((covered(tuple(box)), place, tuple(box)))
      if not tried[-1][0]:
        break
    _, place, box = min(tried, key=lambda one: one[0])
    _write(axes, (x, y), text, place, None if place in _NEAR else _LINE)
    taken.append(box)


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
    ha=side, arrowprops=line,
  )  # fmt: skip
