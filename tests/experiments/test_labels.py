"""Labels of points overlap neither one another nor error bars."""

import itertools

import pytest

from tests.experiments import _loading

studies = _loading.shared("studies")
matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
pyplot = pytest.importorskip("matplotlib.pyplot")


def test_labels_neither_overlap_nor_leave_the_axes():
  figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
  # Four at nearly one place, others in the corners.
  at = [(1, 1), (1.01, 1), (1, 1.01), (1.02, 1.01), (0, 0), (3, 3), (3, 0)]
  axes.plot(*zip(*at, strict=True), "o")
  labels = [(x, y, f"a method of name {i}") for i, (x, y) in enumerate(at)]
  try:
    studies.label_points(axes, labels)
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    inside = axes.get_window_extent(renderer)
    assert sorted(t.get_text() for t in axes.texts) == sorted(
      name for _, _, name in labels
    )
    boxes = [pyplot.Text.get_window_extent(t, renderer) for t in axes.texts]
    for one, other in itertools.combinations(boxes, 2):
      assert not one.overlaps(other)
    for box in boxes:
      assert inside.x0 <= box.x0 and box.x1 <= inside.x1
  finally:
    pyplot.close(figure)


def _boxes(figure, axes, at):
  """Labels points, and returns the boxes of the texts."""
  studies.label_points(axes, [(x, y, f"a method at {x}") for x, y in at])
  figure.canvas.draw()
  renderer = figure.canvas.get_renderer()
  return [pyplot.Text.get_window_extent(x, renderer) for x in axes.texts]


def test_labels_cover_no_error_bar():
  figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
  at = [(1.0, 1.0), (1.3, 3.0)]
  for x, y in at:
    axes.errorbar(x, y, 2.5, fmt="o", capsize=3)
  axes.set(xlim=(0, 2.5), ylim=(-3, 7))
  try:
    boxes = _boxes(figure, axes, at)
    # To the right of the first is the second's bar.
    first, second = axes.transData.transform(at)[:, 0]
    for box in boxes:
      assert not box.x0 < first < box.x1
      assert not box.x0 < second < box.x1
  finally:
    pyplot.close(figure)


def test_label_leaves_a_crowd_of_error_bars():
  figure, axes = pyplot.subplots(figsize=(10, 6), layout="constrained")
  at = [(1 + 0.06 * i, 1.0) for i in range(4)]
  for x, y in at:
    axes.errorbar(x, y, 1, fmt="o", capsize=3)
  axes.set(xlim=(0, 3), ylim=(-3, 5))
  try:
    boxes = _boxes(figure, axes, at)
    ends = [axes.transData.transform([(x, 0), (x, 2)]) for x, _ in at]
    for box in boxes:
      for (x, bottom), (_, top) in ends:
        beside = box.x1 < x or x < box.x0
        assert beside or box.y1 < bottom or top < box.y0
  finally:
    pyplot.close(figure)


def test_labels_cover_no_line():
  figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
  at = [(1.0, 1.0), (2.0, 1.05), (2.5, 3.0)]
  axes.plot(*zip(*at, strict=True), "o-")
  axes.set(xlim=(0, 5), ylim=(0, 4))
  try:
    line = axes.transData.transform_path(axes.lines[0].get_path())
    for box in _boxes(figure, axes, at):
      assert not line.intersects_bbox(box, filled=False)
  finally:
    pyplot.close(figure)
