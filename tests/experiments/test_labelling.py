"""Names beside points."""

import itertools
import pathlib
import sys

import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")
pyplot = pytest.importorskip("matplotlib.pyplot")
_FOLDER = pathlib.Path(__file__).parents[2] / "experiments"


@pytest.fixture
def labelling(monkeypatch):
  monkeypatch.syspath_prepend(str(_FOLDER))
  import labelling

  yield labelling
  sys.modules.pop("labelling", None)


def test_no_name_is_over_another_or_outside(labelling):
  figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
  # Four at nearly one place, others in the corners.
  at = [(1, 1), (1.01, 1), (1, 1.01), (1.02, 1.01), (0, 0), (3, 3), (3, 0)]
  axes.plot(*zip(*at, strict=True), "o")
  labels = [(x, y, f"a method of name {i}") for i, (x, y) in enumerate(at)]
  try:
    labelling.label(axes, labels)
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
